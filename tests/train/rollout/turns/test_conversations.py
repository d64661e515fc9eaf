"""Answers of several turns, by an engine and an environment that follow a script."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exgrpo.train.common.records import AllowedTokens, Rollout
from exgrpo.train.config.rollout import EnvironmentConfig
from exgrpo.train.data.questions import Question
from exgrpo.train.reward.contract import Columns
from exgrpo.train.rollout.engine import Finished, Request, Sampling, collect
from exgrpo.train.rollout.stops import Stops, text_of
from exgrpo.train.rollout.turns.conversations import Conversations
from exgrpo.train.rollout.turns.environments import Environment
from tests.train.batches import lists, sets

EOS = "."
RUN_STOP, WAIT = "!", "?"
PROMPT = np.array([ord("P")], np.int32)


def ids(text):
    return np.array([ord(character) for character in text], np.int32)


def read(tokens):
    return "".join(chr(token) for token in tokens)


class Script:
    """Writes the turns of an answer one after the other: a token is a character, its log-prob minus its place in it.

    Which answer goes on is known from what stands behind the prompt's letter. The last answer is finished first.
    """

    def __init__(self, *answers):
        self.answers = answers
        self.asked = []

    def generate(self, requests):
        self.asked.append(requests)
        finished = [
            Finished(i, sample, self._turn(request, sample))
            for i, request in enumerate(requests)
            for sample in range(request.count)
        ]
        yield from reversed(finished)

    def _turn(self, request, sample):
        before = read(request.prompt[1:])
        turns = self.answers[sample] if not before else next(a for a in self.answers if before.startswith(a[0]))
        place = sum(before.count(turn) for turn in set(turns)) if before else 0
        limit = request.sampling.max_tokens
        whole = ids(turns[place])
        log_prob, allowed_tokens = -np.arange(len(whole), dtype=np.float32), AllowedTokens.from_lists(sets(whole))
        stopped = request.sampling.stop.cut(
            Rollout(whole[:limit], False, log_prob[:limit], allowed_tokens=allowed_tokens[:limit])
        )
        return replace(stopped, finished=stopped.finished or read(whole)[limit - 1 :] == EOS)


class Ended(Script):
    """The same, where a turn that ends with EOS is finished."""

    def _turn(self, request, sample):
        turn = super()._turn(request, sample)
        return replace(turn, finished=turn.finished or read(turn.response).endswith(EOS))


def conversations(reply, encode=ids, **options):
    """`reply(question, turn)` is the environment's."""
    environment = Environment(
        "scripted", lambda question, gold: lambda turn: reply(question, turn), Columns(), stop=(WAIT,)
    )
    return Conversations(
        environment, EnvironmentConfig(function="calculator", **options), lambda text, closed: encode(text), read
    )


def answer(reply, *turns, max_tokens=100, **options):
    """The one answer of a conversation, and the script that wrote it."""
    script = Ended(list(turns))
    sampling = Sampling(max_tokens, log_prob=True, stop=Stops((RUN_STOP,), read))
    asked = [Request(PROMPT, 1, sampling, 7)]
    talk = conversations(reply, **options)
    ((found,),) = collect(asked, talk.generate(script, asked, [Question(0, (80,), "question", "gold", "source")]))
    return found, script, talk


def shown(found):
    """The text with what was observed in brackets."""
    written = np.ones(len(found.response), bool) if found.response_mask is None else found.response_mask
    text = "".join(chr(t) if own else f"[{chr(t)}]" for t, own in zip(found.response, written, strict=True))
    return text.replace("][", "")


def test_the_policy_goes_on_behind_what_it_was_told():
    heard = []

    def reply(question, turn):
        heard.append((question, turn))
        return {"ab?": "12", "cd?": None}.get(turn)

    found, script, talk = answer(reply, "ab?", "cd?", "ef.")
    assert shown(found) == "ab?[12]cd?ef."
    assert found.finished
    assert found.log_prob.tolist() == [0, -1, -2, 0, 0, 0, -1, -2, 0, -1, -2]
    assert lists(found.allowed_tokens) == [*sets(b"ab?"), [], [], *sets(b"cd?ef.")]  # an observation has no words
    # Without a reply, the turn is not over for the environment.
    assert heard == [("question", "ab?"), ("question", "cd?"), ("question", "cd?ef")]
    assert [read(request.prompt) for (request,) in script.asked] == ["P", "Pab?12", "Pab?12cd?"]
    assert [request.sampling.max_tokens for (request,) in script.asked] == [100, 95, 92]
    assert len({request.seed for (request,) in script.asked}) == 3
    assert talk.broken == 0
    assert text_of(found, read, (RUN_STOP,)) == "ab?12cd?ef"


@pytest.mark.parametrize(
    ("replies", "turns", "expected", "text"),
    [
        ({}, ["abc."], "abc.", "abc"),
        ({"a": "no"}, ["a.", "b."], "a.[no]b.", "a.nob"),  # goes on behind an EOS token
        ({"ab!": "asked"}, ["ab!"], "ab!", "ab"),  # a stop string of the run: nobody is asked
        ({"a?": "x!y"}, ["a?", "b."], "a?[x!y]b.", "a?x!yb"),  # one in a reply ends nothing
        ({"a?": "x!y"}, ["a?", "b!"], "a?[x!y]b!", "a?x!yb"),
    ],
)
def test_what_ends_an_answer(replies, turns, expected, text):
    found, _, _ = answer(lambda question, turn: replies.get(turn), *turns)
    assert (shown(found), found.finished, text_of(found, read, (RUN_STOP,))) == (expected, True, text)
    assert (found.response_mask is None) == (len(turns) == 1)


def test_an_empty_reply_is_a_message_all_the_same():
    found, _, _ = answer(
        lambda question, turn: "" if "?" in turn else None, "a?", "b.", encode=lambda text: ids(f"<{text}>")
    )
    assert shown(found) == "a?[<>]b."


def test_the_turns_are_counted():
    found, _, _ = answer(lambda question, turn: "1" if "?" in turn else None, "a?", "b?", "c?", "d.", turns=3)
    assert (shown(found), found.finished) == ("a?[1]b?[1]c?", False)


@pytest.mark.parametrize("wrong", [7, b"text", ValueError("a bad tool")])
def test_a_reply_that_fails_ends_the_answer_unfinished_and_is_counted(wrong, caplog):
    def reply(question, turn):
        if isinstance(wrong, Exception):
            raise wrong
        return wrong

    found, _, talk = answer(reply, "ab?", "c.")
    assert (shown(found), found.finished) == ("ab?", False)
    assert talk.broken == 1
    (record,) = caplog.records
    assert "environment scripted" in record.getMessage()
    assert ("a bad tool" if isinstance(wrong, Exception) else "a reply is a text or None") in record.getMessage()


def test_a_reply_that_does_not_come_is_waited_for_no_longer_than_said(caplog):
    hangs = threading.Event()
    found, _, talk = answer(lambda question, turn: hangs.wait(60) and "", "ab?", "c.", time_limit=0.1)
    hangs.set()
    assert (shown(found), found.finished, talk.broken) == ("ab?", False, 1)
    assert "no reply within 0.1 s" in caplog.text


TURNS = st.lists(st.sampled_from(["a?", "bb?", "c?"]), max_size=4, unique=True)


@given(st.lists(TURNS, min_size=1, max_size=5, unique_by=tuple), st.integers(3, 30))
def test_every_answer_is_what_a_plain_loop_writes(scripts, max_tokens):
    """Answers side by side, in the order of samples, each with the replies to its own turns alone."""
    answers = [[*(f"{number}{turn}" for turn in turns), f"{number}z."] for number, turns in enumerate(scripts)]

    def reply(question, turn):
        return turn[1:-1].upper() * 2 if turn.endswith(WAIT) else None

    def plain(turns):
        tokens, written = "", []
        for turn in turns:
            room = max_tokens - len(tokens)
            tokens, written = tokens + turn[:room], written + [True] * len(turn[:room])
            if room < len(turn):
                return tokens, written, False
            said = reply("", turn)
            if said is None:
                return tokens, written, True
            if len(tokens) + len(said) >= max_tokens:
                return tokens, written, False
            tokens, written = tokens + said, written + [False] * len(said)
        raise AssertionError

    asked = [Request(PROMPT, len(answers), Sampling(max_tokens, log_prob=True), 3)]
    talk = conversations(reply)
    (found,) = collect(asked, talk.generate(Ended(*answers), asked, [Question(0, (80,), "", "", "")]))
    for one, turns in zip(found, answers, strict=True):
        tokens, written, finished = plain(turns)
        assert read(one.response) == tokens
        assert (one.response_mask is None and all(written)) or one.response_mask.tolist() == written
        assert one.finished == finished
