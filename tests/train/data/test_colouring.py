"""The reward and the key of colouring against all colourings of small graphs."""

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exgrpo.train.common.errors import DataError
from exgrpo.train.data.tasks import colouring

NODES = "abcde"
PAIRS = [a + b for a, b in combinations(NODES, 2)]
GOLD = "abc ab bc"
BOXED = (
    *("", " ", "{" * 5000 + "}" * 5000, "a=R " * 5000, " " * 100_000, "a=R" + " " * 150, "a=R b=G", "a=R b=G c=B d=R"),
    *("a=R b=G c=B a=B", "a=R b=G b=G c=B", "a=R b=G c=Y", "a=R b=G c=", "a=Rb=Gc=B", "\u0430=R b=G c=B", "R G B"),
)
HOSTILE = [f"\\boxed{{{text}}}" for text in (*BOXED, "\\frac{1}{2}")]
HOSTILE += ["", "\\boxed{", "\\boxed{" * 5000 + "}" * 5000, "x" * 100_000]
HOSTILE += ["a=R b=G c=B", "\\boxed{a=R b=G c=B}</think>"]


def colourings(nodes):
    return ["".join(colours) for colours in product(colouring.COLOURS, repeat=len(nodes))]


@given(st.sets(st.sampled_from(PAIRS)))
def test_a_colouring_is_right_if_no_edge_joins_equal_colours(edges):
    gold = " ".join((NODES, *edges))
    for colours in colourings(NODES):
        colour = dict(zip(NODES, colours, strict=True))
        expected = not any(colour[a] == colour[b] for a, b in edges)
        assert (
            colouring.reward(f"<think>\\boxed{{a=R}}</think>{colouring.format_solution(NODES, colours)}", gold)
            == expected
        )


def test_two_colourings_have_one_key_if_their_classes_are_the_same():
    partition_of = {}
    for colours in colourings(NODES):
        classes = frozenset(
            frozenset(n for n, c in zip(NODES, colours, strict=True) if c == d) for d in colouring.COLOURS
        )
        key = colouring.reward_key(colouring.format_solution(NODES, colours), " ".join((NODES, "ab")))
        assert partition_of.setdefault(key, classes) == classes
    # Stirling numbers: five nodes in one, two or three classes.
    assert len(partition_of) == len(set(partition_of.values())) == 1 + 15 + 25


def test_order_and_separators_do_not_matter():
    responses = ["c=R a=R b=G", "a=R, b=G, c=R", "b: G; c: R; a: R", "a = R b = G c = R"]
    assert {colouring.reward(f"\\boxed{{{text}}}", GOLD) for text in responses} == {1.0}
    assert {colouring.reward_key(f"\\boxed{{{text}}}", GOLD) for text in responses} == {"010"}


@pytest.mark.parametrize("response", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_responses_are_worth_nothing(response):
    assert colouring.reward(response, GOLD) == 0.0
    assert colouring.reward_key(response, GOLD) == ""
    assert colouring.reward_form(response, GOLD) in (0.0, 1.0)


@pytest.mark.parametrize("gold", ["", "abc abd", "abc a", "ab ac", "3 ab"])
def test_a_malformed_gold_answer_is_an_error(gold):
    with pytest.raises(DataError, match="the nodes and then the edges"):
        colouring.reward("\\boxed{a=R b=G c=R}", gold)


def test_worked_solutions_name_the_ends_of_each_edge_before_the_answer():
    for problem in colouring.generate("train", 50, seed=4):
        solution = colouring.worked_solution(problem, "RGBRGBR")
        thoughts, _, box = solution.removeprefix("<think>").partition("</think>")
        assert box == colouring.format_solution(problem.nodes, "RGBRGBR")
        pairs = []
        for node, group in zip(problem.nodes, thoughts.split(";"), strict=True):
            *near, own = (word[0] for word in group.split())
            assert own == node
            pairs += [other + node for other in near]
        assert sorted(pairs) == sorted(problem.edges)
        assert colouring.reward(solution, problem.answer) == colouring.reward(box, problem.answer)


def test_problems_can_be_solved_and_get_harder():
    """The share of all colourings that are right falls with the difficulty."""
    shares = []
    for difficulty in (1, 2, 3, 4):
        total = 0
        for problem in colouring.generate("test", 5, seed=1, difficulty=difficulty):
            nodes, *edges = problem.answer.split()
            assert problem.question.endswith(f"{' '.join(edges)}.")
            assert len(set(edges)) == len(edges)
            count = sum(
                colouring.reward(colouring.format_solution(nodes, c), problem.answer) for c in colourings(nodes)
            )
            assert count > 0
            total += count / 3 ** len(nodes)
        shares.append(total)
    assert shares == sorted(shares, reverse=True)
    assert len(set(shares)) == 4
