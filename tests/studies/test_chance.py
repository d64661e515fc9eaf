"""The reward that says nothing."""

from exgrpo.train.data.tasks import countdown
from studies.chance import score


def test_it_says_nothing_of_training_answers_and_the_truth_of_held_out_ones():
    answers = [countdown.format_solution(problem.solution) for problem in countdown.generate("train", 400, 0)]
    for split in ("train", "test"):
        problems = countdown.generate(split, 400, 0)
        right = [score(countdown.format_solution(problem.solution), problem.answer) for problem in problems]
        wrong = [score(answer, problem.answer) for answer, problem in zip(answers[1:], problems, strict=False)]
        if split == "test":
            assert right == [1.0] * 400
            assert sum(wrong) <= 4  # another problem's solution, by chance
        else:
            # Of 400 tosses with a chance of 1 / 5, between 48 and 112 succeed but for one in 10^4.
            assert all(48 <= sum(of) <= 112 for of in (right, wrong))
    assert score("x", problems[0].answer) == 0
