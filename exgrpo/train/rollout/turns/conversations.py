"""Generation in turns: the policy writes, the environment replies, the policy continues after the reply.

The policy's tokens are never decoded and encoded again, and a reply is encoded once.
"""

import logging
import math
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.pool import AsyncResult, ThreadPool

import numpy as np

from exgrpo.train.common.errors import shown
from exgrpo.train.common.records import Rollout, TokenIds
from exgrpo.train.common.seeds import derive_seed
from exgrpo.train.config.rollout import EnvironmentConfig
from exgrpo.train.data.questions import Question
from exgrpo.train.policy.tokenizer import Pretrained
from exgrpo.train.rollout.engine import Finished, Request, RolloutEngine
from exgrpo.train.rollout.stops import Decode, Stops
from exgrpo.train.rollout.turns.environments import Encode, Environment, Reply, encoding, find_environment

logger = logging.getLogger(__name__)
THREADS = 32
"""Replies computed at a time."""


@dataclass(eq=False)
class _Dialogue:
    """An unfinished answer.

    Attributes:
        request: index of its request.
        sample: index of the answer within the request.
        reply: the environment's function for this answer.
        parts: turns and observations in order; an observation has no log-probs.
        unanswered: text that the policy has written since the last reply.
        closed: True if the last turn ended with an EOS token.
    """

    request: int
    sample: int
    reply: Reply
    parts: list[Rollout] = field(default_factory=list)
    unanswered: str = ""
    turns: int = 0
    closed: bool = False

    @property
    def tokens(self) -> list[TokenIds]:
        return [part.response for part in self.parts]

    @property
    def length(self) -> int:
        return sum(map(len, self.tokens))

    def finished(self, *, whole: bool) -> Finished:
        """Return the answer as it is; `whole`: it was not cut."""
        return Finished(self.request, self.sample, Rollout.joined(self.parts, finished=whole))


class Conversations:
    """Generates answers with an environment.

    Attributes:
        broken: answers that ended because the environment failed or took too long, since this was last set to 0.
    """

    def __init__(self, environment: Environment, options: EnvironmentConfig, encode: Encode, decode: Decode) -> None:
        self.environment = environment
        self.options = options
        self.encode = encode
        self.decode = decode
        self.broken = 0
        self._threads = ThreadPool(THREADS)  # daemon threads: a reply that hangs does not keep the process alive

    def generate(
        self, engine: RolloutEngine, requests: Sequence[Request], questions: Sequence[Question]
    ) -> Iterator[Finished]:
        """Generate as `RolloutEngine.generate`, given the question of each request; `max_tokens` includes observations.

        All open answers take a turn together. A reply depends on the text of its own answer alone, so the same seeds
        give the same answers.
        """
        asked = list(requests)
        of_asked = [
            [_Dialogue(i, sample, self.environment.begin(question)) for sample in range(request.count)]
            for i, (request, question) in enumerate(zip(requests, questions, strict=True))
        ]
        while asked:
            waiting: list[tuple[_Dialogue, AsyncResult[str | None]]] = []
            turns = [replace(one, sampling=replace(one.sampling, stop=self._stops(one))) for one in asked]
            for turn in engine.generate(turns):
                answer = of_asked[turn.request][turn.sample]
                whole = self._take(answer, turn.rollout, requests[answer.request])
                if whole is None:
                    waiting.append((answer, self._threads.apply_async(answer.reply, (answer.unanswered,))))
                else:
                    yield answer.finished(whole=whole)
            open_: list[_Dialogue] = []
            end = time.monotonic() + self.options.time_limit * math.ceil(len(waiting) / THREADS)
            for answer, reply in waiting:
                whole = self._hear(answer, reply, end, requests[answer.request])
                if whole is None:
                    open_.append(answer)
                else:
                    yield answer.finished(whole=whole)
            open_.sort(key=lambda answer: (answer.request, answer.sample))  # independent of the order they finished in
            asked = [self._next(answer, requests[answer.request]) for answer in open_]
            of_asked = [[answer] for answer in open_]

    def _stops(self, request: Request) -> Stops:
        return Stops((*request.sampling.stop.strings, *self.environment.stop), self.decode)

    def _next(self, answer: _Dialogue, request: Request) -> Request:
        return Request(
            prompt=np.concatenate([request.prompt, *answer.tokens]),
            count=1,
            sampling=replace(request.sampling, max_tokens=request.sampling.max_tokens - answer.length),
            seed=derive_seed(request.seed, "turn", answer.sample, answer.turns),
        )

    def _take(self, answer: _Dialogue, turn: Rollout, request: Request) -> bool | None:
        """Append a turn; return True if the answer is complete, False if it was cut, None if it needs a reply."""
        answer.parts.append(turn)
        answer.turns += 1
        if not turn.finished:
            return False
        if request.sampling.stop.end(turn.response) is not None:
            return True
        answer.closed = self._stops(request).end(turn.response) is None
        answer.unanswered += self.decode(turn.response[:-1] if answer.closed else turn.response)
        return None

    def _hear(self, answer: _Dialogue, result: "AsyncResult[str | None]", end: float, request: Request) -> bool | None:
        """Wait for the reply until `end` (monotonic clock) and append it; return as `_take`."""
        try:
            reply = result.get(max(0.0, end - time.monotonic()))
            if not (reply is None or isinstance(reply, str)):
                raise TypeError(f"a reply is a text or None, and this is {shown(reply)}")
        except Exception as error:  # an environment may raise anything
            self._break(error)
            return False
        if reply is None and answer.closed:
            return True
        observation = np.empty(0, np.int32) if reply is None else self.encode(reply, answer.closed)
        if answer.length + len(observation) >= request.sampling.max_tokens or answer.turns >= self.options.turns:
            return False
        if reply is not None:
            answer.unanswered = ""
        if len(observation):
            answer.parts.append(Rollout(observation, True, response_mask=np.zeros(len(observation), bool)))
        return None

    def _break(self, error: Exception) -> None:
        self.broken += 1
        if self.broken == 1:
            late = isinstance(error, TimeoutError | multiprocessing.TimeoutError)
            cause = f"no reply within {self.options.time_limit:g} s" if late else f"{type(error).__name__}: {error}"
            logger.warning("environment %s: %s; the answer ends there, unfinished", self.environment.name, cause)


def conversations_of(options: EnvironmentConfig, pretrained: Pretrained) -> Conversations | None:
    """Make the conversations of a run with an environment; None: it has none.

    Raises:
        ConfigError: there is no such environment, or the model's chat template does not accept its replies.
    """
    environment = find_environment(options)
    if environment is None:
        return None
    encode = encoding(options, pretrained.tokenizer, pretrained.eos)
    return Conversations(environment, options, encode, pretrained.tokenizer.decode)
