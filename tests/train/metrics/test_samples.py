"""What a run writes of its groups: which ones, what of them, and the same after a resume."""

import json
from contextlib import ExitStack

import numpy as np
import pytest

from exgrpo.train.common.records import Rollout
from exgrpo.train.metrics.log_files import SAMPLES, Sample, SampledAnswer, read_samples, to_line
from exgrpo.train.rollout.stops import parts_of, text_of, turns_of
from exgrpo.train.run.recorder import Recorder
from tests.train.trainers import half, make

STEPS = 12
OUTPUT = {"trackers": (), "sample_groups": 2, "tracked_questions": 3}


def recorder(trainer, folder, resources, position=None):
    folder.mkdir(exist_ok=True)
    return Recorder(trainer, folder, resources, position)


def results(**sections):
    trainer = make(half(8), output={**OUTPUT, **sections})
    return trainer, [trainer.step(step) for step in range(1, STEPS + 1)]


def written(folder, trainer, of_steps):
    with ExitStack() as resources:
        record = recorder(trainer, folder, resources)
        for step, result in enumerate(of_steps, start=1):
            record.step(step, result)
    return list(read_samples(folder / SAMPLES))


@pytest.mark.parametrize(("groups", "tracked"), [(2, 3), (1, 1), (2, 0), (0, 3), (6, 8)])
def test_every_group_of_a_followed_question_is_written_and_no_other_beside_those_that_are_shown(
    tmp_path, groups, tracked
):
    trainer, of_steps = results(sample_groups=groups, tracked_questions=tracked)
    samples = written(tmp_path, trainer, of_steps)
    followed, expected = [], []
    for step, result in enumerate(of_steps, start=1):
        count, questions = result.batch.groups, result.batch.question.tolist()
        shown = {0, count - 1} if groups == 2 else set(range(min(groups, count)))
        for i in sorted(shown):
            if len(followed) < tracked and questions[i] not in followed:
                followed.append(questions[i])
        chosen = [i for i in range(count) if i in shown or questions[i] in followed]
        expected += [(step, questions[i], questions[i] in followed) for i in chosen]
    assert [(one.step, one.question, one.followed) for one in samples] == expected
    assert len(followed) == (min(tracked, 8) if groups else 0)


def test_a_group_is_written_as_the_step_had_it(tmp_path):
    trainer, of_steps = results()
    replayed = 0
    for sample in written(tmp_path, trainer, of_steps):
        batch = of_steps[sample.step - 1].batch
        rows = batch.rows_of([batch.question.tolist().index(sample.question)])
        question = trainer.questions[sample.question]
        assert (sample.text, sample.gold) == (question.text, question.gold)
        fresh, stored = rows[batch.fresh[rows]], rows[batch.replayed[rows]]
        assert [answer.reward for answer in sample.answers] == batch.reward[rows].tolist()
        steps = [None] * len(fresh) + batch.step[stored].tolist()
        assert [answer.replayed_from for answer in sample.answers] == steps
        texts = [(("policy", text),) for text in batch.text[fresh]]
        assert [answer.parts for answer in sample.answers[: len(fresh)]] == texts
        assert [answer.tokens for answer in sample.answers] == batch.length[rows].tolist()
        replayed += len(stored)
    assert replayed


def test_the_entropy_is_that_by_which_an_answer_was_chosen(tmp_path):
    trainer, of_steps = results(sample_groups=100)
    samples = written(tmp_path, trainer, of_steps)
    for step, result in enumerate(of_steps, start=1):
        answers = [answer for sample in samples if sample.step == step for answer in sample.answers]
        known = [answer.entropy for answer in answers if answer.replayed_from is not None]
        assert all(answer.entropy is None for answer in answers if answer.replayed_from is None)
        if known:
            assert np.mean(known) == pytest.approx(result.metrics["replayed_entropy"])
    assert any(answer.entropy for sample in samples for answer in sample.answers)


@pytest.mark.parametrize("cut", [1, 5, STEPS - 1])
def test_a_run_that_goes_on_writes_the_same_bytes(tmp_path, cut):
    """It is stopped two steps after the position from which it goes on."""
    trainer, of_steps = results()
    written(tmp_path / "whole", trainer, of_steps)
    with ExitStack() as resources:
        record = recorder(trainer, tmp_path / "resumed", resources)
        for step in range(1, min(cut + 2, STEPS) + 1):
            record.step(step, of_steps[step - 1])
            if step == cut:
                position = record.position()
    with ExitStack() as resources:
        record = recorder(trainer, tmp_path / "resumed", resources, position)
        for step in range(cut + 1, STEPS + 1):
            record.step(step, of_steps[step - 1])
    assert (tmp_path / "resumed" / SAMPLES).read_bytes() == (tmp_path / "whole" / SAMPLES).read_bytes()


def decode(tokens):
    return "".join(map(chr, tokens))


@pytest.mark.parametrize("stop", [(), ("=",)])
def test_what_an_environment_wrote_is_a_part_of_its_own(stop):
    response = np.array([*b"1+1=", *b" 2!", *b" is=", 0] if not stop else [*b"1+1=", *b" 2!", *b" is="], np.int32)
    own = np.array([True] * 4 + [False] * 3 + [True] * (len(response) - 7))
    answer = Rollout(response, True, response_mask=own)
    parts = parts_of(answer, decode, stop)
    assert parts == ["1+1=", " 2!", " is" if stop else " is="]
    assert "".join(parts) == text_of(answer, decode, stop)
    cut = Rollout(response, False, response_mask=own)
    assert parts_of(cut, decode, stop) == turns_of(cut, decode)
    alone = Rollout(response[:4], True)
    assert parts_of(alone, decode, stop) == [text_of(alone, decode, stop)]


def test_a_line_says_all_of_a_sample_and_what_is_no_sample_is_left_out(tmp_path):
    strange = "\u2028</script>\udcff\x00\n"
    answers = (
        SampledAnswer((("policy", strange), ("environment", " 2")), 0.5, False, 9),
        SampledAnswer((("policy", ""),), 1.0, True, 1, replayed_from=3, entropy=0.25),
    )
    sample = Sample(4, 0, strange, strange, True, answers)
    line = to_line(sample)
    assert line.isascii()
    assert line.count("\n") == 1
    values = json.loads(line)
    bad = [{**values, "answers": [7]}, {**values, "answers": [{"parts": [["policy"]]}]}, {**values, "more": 1}]
    lines = [line, "\n", "[1]\n", "[" * 99_999 + "\n", *(json.dumps(one) + "\n" for one in bad), line, line[:50]]
    (tmp_path / SAMPLES).write_text("".join(lines))
    assert list(read_samples(tmp_path / SAMPLES)) == [sample, sample]
