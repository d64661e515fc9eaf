"""Where stop strings end answers: the rule against a plain scan, and the rule in generation, grading and training."""

import dataclasses

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from exgrpo.train.common.distributed import ALONE
from exgrpo.train.common.errors import ConfigError
from exgrpo.train.common.records import Rollout
from exgrpo.train.rollout.engine import Sampling
from exgrpo.train.rollout.stops import NO_STOPS, Stops, text_of
from exgrpo.train.rollout.transformers.engine import TransformersEngine
from tests.train import pieces, tiny
from tests.train.asking import in_two_parts, requests_for
from tests.train.configs import configured

EOS = (2, 5)
STRINGS = ("b\n", "→", "é:", ":Q", "\n\nQ:")
MAX_TOKENS = 24
SAMPLING = Sampling(MAX_TOKENS, log_prob=True)
STOPPED = dataclasses.replace(SAMPLING, stop=Stops(STRINGS, pieces.read))
# The last two end with the beginning of a stop string, or with a whole one.
PROMPTS = [*(tiny.prompt(question) for question in range(4)), pieces.tokens(b"a", b"b"), pieces.tokens(b"b\n")]


def strip(tokens):
    """As decoders do that take the first space for a part of the format."""
    return pieces.read(tokens).removeprefix("a")


answers = st.lists(st.integers(0, tiny.VOCABULARY - 1), min_size=1, max_size=30)
stop_strings = st.lists(st.text("ab\nQ:é→", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


@settings(max_examples=500, deadline=None)
@given(answers, stop_strings)
@example(pieces.tokens(b"a", b"\n\nQ: a", b"b").tolist(), ("\n\nQ:",))
@example(pieces.tokens(b"a", b"\xe2", b"\x86", b"\x92Q").tolist(), ("→",))
@example(pieces.tokens(b"a", b"b", b"</s>").tolist(), ("ab", "b"))
@example(pieces.tokens(b"aQ:\nb").tolist(), ("Q:\nb", ":"))
def test_an_answer_ends_where_a_plain_scan_finds_the_first_stop_string(tokens, strings):
    stop = Stops(strings, pieces.read)
    expected = pieces.scan(tokens, strings)
    assert stop.end(tokens) == expected
    for length in range(1, expected or len(tokens) + 1):
        assert not stop.reached(tokens[:length])
    assert expected is None or stop.reached(tokens[:expected])
    log_prob = np.arange(len(tokens), dtype=np.float32)
    cut = stop.cut(Rollout(np.array(tokens, np.int32), finished=False, log_prob=log_prob))
    assert cut.response.tolist() == tokens[:expected]
    assert cut.log_prob.tolist() == list(range(len(cut.response)))
    assert cut.finished == (expected is not None)
    written = pieces.read(tokens[:expected])
    assert text_of(cut, pieces.read, strings) == (written if expected is None else pieces.before(written, strings))


@settings(max_examples=300, deadline=None)
@given(answers, stop_strings, st.integers(0, 30))
@example(pieces.tokens(b"a", b"\n\nQ: a", b"b").tolist(), ("\n\nQ: ab",), 2)
def test_an_answer_that_is_begun_ends_where_the_whole_one_does(tokens, strings, seam):
    expected = pieces.scan(tokens, strings)
    seam = min(seam, len(tokens) - 1, (expected or len(tokens)) - 1)
    stop = Stops(strings, pieces.read, before=tuple(tokens[:seam]))
    rest = tokens[seam:]
    assert stop.end(rest) == (expected and expected - seam)
    for length in range(1, len(rest) + 1 if expected is None else expected - seam):
        assert not stop.reached(rest[:length])
    assert expected is None or stop.reached(rest[: expected - seam])


@settings(max_examples=300, deadline=None)
@given(answers, stop_strings)
# The last four tokens alone begin with a broken character.
@example(pieces.tokens(b"\xc3", b"\xa9", b"b", b"b", b"b").tolist(), ("\ufffd",))
def test_a_look_at_the_last_tokens_is_never_wrong(tokens, strings):
    stop = Stops(strings, strip)
    for length in range(1, len(tokens) + 1):
        if stop.reached(tokens[:length]):
            assert stop.end(tokens[:length]) is not None


@settings(max_examples=200, deadline=None)
@given(answers, stop_strings)
def test_without_a_stop_string_the_text_ends_before_eos(tokens, strings):
    finished = Rollout(np.array([*tokens, 2], np.int32), finished=True)
    assert NO_STOPS.cut(finished) is finished
    assert text_of(finished, pieces.read, ()) == pieces.read(tokens)
    if pieces.scan(tokens, strings) is None:
        assert text_of(finished, pieces.read, strings) == pieces.read(tokens)


class Unpushed(TransformersEngine):
    """Takes no weights from a policy that has none."""

    def push_weights(self, weights):
        pass


@pytest.fixture(params=[0, EOS[0]], ids=["own pad", "pad is EOS"])
def engine(request, folder):
    return Unpushed(tiny.engine_settings(folder, eos=EOS, pad=request.param, batch_tokens=1500), ALONE)


def flat(answers):
    return [
        (rollout.response.tolist(), rollout.finished, rollout.log_prob.tolist())
        for of_prompt in answers
        for rollout in of_prompt
    ]


def test_stopped_answers_are_the_scan_of_those_that_run_on(engine):
    counts = [30] * len(PROMPTS)
    free = flat(tiny.rollouts(engine, PROMPTS, counts, SAMPLING, seed=0))
    stopped = flat(tiny.rollouts(engine, PROMPTS, counts, STOPPED, seed=0))
    scanned = [pieces.ended(*answer, STRINGS) for answer in free]
    assert [answer[:2] for answer in stopped] == [answer[:2] for answer in scanned]
    # Rows that have ended are left out, and products of other shapes round otherwise.
    for found, expected in zip(stopped, scanned, strict=True):
        assert found[2] == pytest.approx(expected[2], abs=1e-5)
    # All ways to end, EOS behind a stop string, and a stop string that the last token of all completes.
    pairs = list(zip(free, stopped, strict=True))
    at_stop = [(before[0], after[0]) for before, after in pairs if pieces.scan(after[0], STRINGS)]
    assert any(long[-1] in EOS and len(long) > len(short) for long, short in at_stop)
    assert any(len(short) == MAX_TOKENS for _, short in at_stop)
    assert any(after[:2] == before[:2] and before[1] for before, after in pairs)
    assert any(not finished for _, finished, _ in stopped)


def test_stop_strings_over_a_seam_end_answers(engine):
    answers = in_two_parts(engine, requests_for(PROMPTS, [30] * len(PROMPTS), STOPPED, range(len(PROMPTS))), 3)
    ends = [(pieces.scan(rollout.response, STRINGS), rollout) for of_prompt in answers for rollout in of_prompt]
    for end, rollout in ends:
        assert end in (None, len(rollout.response))
        assert rollout.finished == (end is not None or rollout.response[-1] in EOS)
        assert rollout.finished or len(rollout.response) == MAX_TOKENS
    after_seam = [rollout.response for end, rollout in ends if end is not None and end > 3]
    assert any(pieces.scan(response[3:], STRINGS) is None for response in after_seam)  # only both parts have one


def test_generation_ends_when_all_answers_have(engine):
    everything = Sampling(200, stop=Stops(tuple("abQ:x<\n\ufffdé→"), pieces.read))
    steps = []
    engine.model.register_forward_hook(lambda *arguments: steps.append(arguments))
    answers = tiny.rollouts(engine, PROMPTS, [2] * len(PROMPTS), everything, seed=0)
    assert {len(rollout.response) for of_prompt in answers for rollout in of_prompt} == {1}
    assert len(steps) < 2 * 6


def test_an_empty_stop_string_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"^test: rollout\.stop\.1: .*at least 1 character"):
        configured({"rollout": {"stop": ["\nQuestion:", ""]}})
