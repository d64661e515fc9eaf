"""The servers that hold the policy's weights, and requests spread over them."""

import logging
import threading
import time
import uuid
from collections import Counter
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
TOKEN_SECONDS = 1.0
"""For each token of an answer, the wait for its turn included; an answer is waited for an hour at most."""
ATTEMPTS = 3
"""So often a server is asked for an answer that it does not give, as where a connection breaks."""
PAUSE_SECONDS = 0.5
"""Before it is asked again."""


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
class _Call:
    """The requests of one call that are with servers, by name; once it is over, nothing is asked again."""

    over: bool = False
    requests: dict[str, _Member] = field(default_factory=dict)


class ServerPool:
    """Asks the server with the least outstanding answers; what one fails to answer is asked of another.

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
                future = self._next(done)
                yield futures.pop(future), future.result()
        finally:
            # The caller may have had enough, or the last server may be gone.
            with self._lock:
                call.over, left = True, dict(call.requests)
                members = list(self._members.values())  # no other is listened to
            executor.shutdown(wait=False, cancel_futures=True)
            for member in members:
                if names := [name for name, asked in left.items() if asked is member]:
                    member.client.abort(names)

    def _next(self, done: "SimpleQueue[Future[Reply]]") -> "Future[Reply]":
        """The next job that is done; where that takes long, a warning says what is waited for."""
        waited = 0
        seconds = LEAST_SECONDS
        while True:
            try:
                return done.get(timeout=seconds)
            except Empty:
                with self._lock:
                    waiting = "; ".join(f"{url} has {one.outstanding} to give" for url, one in self._members.items())
                waited += seconds
                logger.warning("no answer of a rollout server for %d s: %s", waited, waiting)
                seconds = waited

    def _answer(self, call: _Call, job: Job) -> Reply:
        seconds = min(LONG_SECONDS, LEAST_SECONDS + TOKEN_SECONDS * job.sampling.max_tokens)
        oldest, end, failures = len(self._versions) - 1, time.monotonic() + LONG_SECONDS, Counter[str]()
        while True:
            request = uuid.uuid4().hex
            member = self._take(call, job, request)
            client = member.client
            try:
                reply = client.generate(request, job.tokens, job.count, job.sampling, self._eos, seconds)
                foreign = reply.versions - set(self._versions[oldest:])
                if not foreign:
                    return reply
                self._drop(call, member, f"it has other weights ({', '.join(sorted(foreign))}), as after a restart")
            except SilentServerError as error:
                self._drop(call, member, str(error))
            except ServerError as error:
                failures[client.url] += 1
                # From 0.33 on vLLM refuses requests while it is paused, as it is for new weights; before it kept them.
                refused = error.status == HTTPStatus.SERVICE_UNAVAILABLE and time.monotonic() < end
                if failures[client.url] < ATTEMPTS or (refused and client.paused()):
                    time.sleep(PAUSE_SECONDS)
                else:
                    self._drop(call, member, str(error))
            finally:
                with self._lock:
                    member.outstanding -= job.count
                    call.requests.pop(request, None)

    def _take(self, call: _Call, job: Job, request: str) -> _Member:
        with self._lock:
            if call.over or not self._members:
                raise self._error()
            member = min(self._members.values(), key=lambda member: member.outstanding)
            member.outstanding += job.count
            call.requests[request] = member
            return member

    def _drop(self, call: _Call, member: _Member, reason: str) -> None:
        url = member.client.url
        with self._lock:
            # Several requests notice it, and some after the server was taken in again.
            if call.over or self._members.get(url) is not member:
                return
            del self._members[url]
            self._problems[url] = reason
        logger.warning("rollout server %s is left out until the next push of weights: %s", url, reason)
