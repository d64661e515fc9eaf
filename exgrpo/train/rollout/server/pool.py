"""The servers that hold the policy's weights, and requests spread over them."""

import logging
import threading
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from http import HTTPStatus
from queue import Empty, SimpleQueue

from exgrpo.train.common.errors import RolloutError
from exgrpo.train.common.records import TokenIds
from exgrpo.train.rollout.engine import Sampling
from exgrpo.train.rollout.server.client import LONG_SECONDS, ServerClient
from exgrpo.train.rollout.server.reply import Reply, ServerError, SilentServerError

logger = logging.getLogger(__name__)
REQUESTS = 64
"""At most so many requests of one rank are with a server at a time: enough for a full batch there."""
LEAST_SECONDS = 60
"""The shortest time for which an answer is waited for, and after which a word is said."""
ASSUMED_PACE = 1.0
"""Seconds per token of an answer, the wait for its turn included, until a server has given some."""
PATIENCE = 5
"""How much slower than the slowest one so far an answer may be."""
PAUSE_SECONDS = 0.5
"""Between two questions to a server that takes new weights."""
SHORT_ANSWER = 32
"""Tokens: what shorter answers take is not the time of their tokens."""


class NoServerError(RolloutError):
    """No rollout server is left; the message has the last problem of each."""


@dataclass(frozen=True, eq=False)
class Job:
    """`count` answers to the prompt of a request of the call, the first of which is its `sample`-th one."""

    request: int
    sample: int
    count: int
    tokens: TokenIds
    sampling: Sampling


@dataclass(eq=False)
class _Member:
    client: ServerClient
    outstanding: int = 0


@dataclass(eq=False)
class _Request:
    """What a server was asked for."""

    client: ServerClient
    count: int
    since: float
    seconds: float


@dataclass(eq=False)
class _Call:
    """The requests of one call that are with servers, by name; once it is over, nothing is asked again."""

    over: bool = False
    requests: dict[str, _Request] = field(default_factory=dict)

    def waiting(self) -> str:
        """For whom and how long it waits, in words."""
        by_url: dict[str, list[_Request]] = {}
        for request in list(self.requests.values()):
            by_url.setdefault(request.client.url, []).append(request)
        now = time.monotonic()
        return "; ".join(
            f"{url} has {sum(one.count for one in asked)} answers to give and is waited for for another "
            f"{max(0.0, min(one.since + one.seconds for one in asked) - now):.0f} s at most"
            for url, asked in by_url.items()
        )


class ServerPool:
    """Asks the server with the least outstanding answers; what one fails to answer is asked of another.

    An answer is waited for as long as its tokens may take: `PATIENCE` times as long per token as the slowest answer of
    that server so far (`ASSUMED_PACE` before the first one), at least `LEAST_SECONDS` more and at most an hour.

    No server is asked before the first `renew`.

    Args:
        clients: all servers of the run.
        eos: token ids that end an answer.
    """

    def __init__(self, clients: Sequence[ServerClient], eos: Sequence[int]) -> None:
        self._clients = {client.url: client for client in clients}
        self._eos = list(eos)
        self._lock = threading.Lock()
        self._members: dict[str, _Member] = {}
        self._versions: list[str] = []
        self._problems: dict[str, str] = {}
        self._pace: dict[str, float] = {}

    def expect(self, version: str) -> None:
        """From now on answers may be written by the weights of this label too."""
        self._versions.append(version)

    def renew(self, problems: Mapping[str, str]) -> None:
        """From now on ask the servers that hold the weights: those of which the problem is empty."""
        with self._lock:
            self._members = {url: _Member(self._clients[url]) for url, problem in problems.items() if not problem}
            self._problems = dict(problems)

    def failure(self) -> NoServerError | None:
        """The error to raise where no server is left."""
        with self._lock:
            return None if self._members else self._error()

    def _error(self) -> NoServerError:
        each = "; ".join(f"{url}: {self._problems.get(url, 'no weights yet')}" for url in self._clients)
        return NoServerError(f"no rollout server is left ({each}): start them again, and go on with --resume auto")

    def generate(self, jobs: Sequence[Job]) -> Generator[tuple[Job, Reply]]:
        """The jobs and their answers, each as soon as it is there.

        Raises:
            NoServerError: no server is left.
        """
        call = _Call()
        executor = ThreadPoolExecutor(REQUESTS * len(self._clients), thread_name_prefix="rollouts")
        try:
            done: SimpleQueue[Future[Reply]] = SimpleQueue()
            futures = {executor.submit(self._answer, call, job): job for job in jobs}
            for future in futures:
                future.add_done_callback(done.put)
            while futures:
                future = _next(done, call)
                yield futures.pop(future), future.result()
        finally:
            # The caller may have had enough, or the last server may be gone.
            with self._lock:
                call.over, left = True, dict(call.requests)
            executor.shutdown(wait=False, cancel_futures=True)
            self._abort(left)

    def _abort(self, left: Mapping[str, _Request]) -> None:
        with self._lock:
            clients = [member.client for member in self._members.values()]  # no other is listened to
        for client in clients:
            if names := [name for name, request in left.items() if request.client is client]:
                client.abort(names)

    def _answer(self, call: _Call, job: Job) -> Reply:
        oldest, end = len(self._versions) - 1, time.monotonic() + LONG_SECONDS
        while True:
            request = uuid.uuid4().hex
            member, asked = self._take(call, job, request)
            try:
                reply = member.client.generate(request, job.tokens, job.count, job.sampling, self._eos, asked.seconds)
                self._measure(asked, reply)
                foreign = reply.versions - set(self._versions[oldest:])
                if not foreign:
                    return reply
                self._drop(call, member, f"it has other weights ({', '.join(sorted(foreign))}), as after a restart")
            except SilentServerError as error:
                self._drop(call, member, f"{error}, and {member.client.doing()}")
            except ServerError as error:
                # From 0.33 on vLLM refuses requests while it is paused, as it is for new weights; before it kept them.
                refused = error.status == HTTPStatus.SERVICE_UNAVAILABLE and time.monotonic() < end
                if refused and member.client.paused():
                    time.sleep(PAUSE_SECONDS)
                else:
                    self._drop(call, member, str(error))
            finally:
                with self._lock:
                    member.outstanding -= job.count
                    call.requests.pop(request, None)

    def _measure(self, asked: _Request, reply: Reply) -> None:
        pace = (time.monotonic() - asked.since) / max(SHORT_ANSWER, reply.longest)
        with self._lock:
            self._pace[asked.client.url] = max(pace, self._pace.get(asked.client.url, 0.0))

    def _take(self, call: _Call, job: Job, request: str) -> tuple[_Member, _Request]:
        with self._lock:
            if call.over or not self._members:
                raise self._error()
            member = min(self._members.values(), key=lambda member: member.outstanding)
            member.outstanding += job.count
            pace = self._pace.get(member.client.url, ASSUMED_PACE)
            seconds = min(LONG_SECONDS, LEAST_SECONDS + PATIENCE * pace * job.sampling.max_tokens)
            call.requests[request] = _Request(member.client, job.count, time.monotonic(), seconds)
            return member, call.requests[request]

    def _drop(self, call: _Call, member: _Member, reason: str) -> None:
        url = member.client.url
        with self._lock:
            # Several requests notice it, and some after the server was taken in again.
            if call.over or self._members.get(url) is not member:
                return
            del self._members[url]
            self._problems[url] = reason
        logger.warning("rollout server %s is left out until the next push of weights: %s", url, reason)


def _next(done: "SimpleQueue[Future[Reply]]", call: _Call) -> "Future[Reply]":
    """The next job that is done; where that takes long, a warning says what is waited for."""
    seconds = LEAST_SECONDS
    while True:
        try:
            return done.get(timeout=seconds)
        except Empty:
            logger.warning("no answer of a rollout server for %d s: %s", seconds, call.waiting())
            seconds *= 2
