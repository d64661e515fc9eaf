"""Spread requests over the servers that hold the policy's weights."""

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
from exgrpo.train.rollout.server.client import LONG_SECONDS, Reply, ServerClient, ServerError, SilentServerError

logger = logging.getLogger(__name__)
REQUESTS = 64
"""Maximum number of concurrent requests of one rank per server: enough for a full batch there."""
LEAST_SECONDS = 60
"""Minimum time limit of a request, and the wait after which the first warning is logged."""
TOKEN_SECONDS = 1.0
"""Time limit added per token of an answer, which includes queueing; a request has an hour at most."""
ATTEMPTS = 3
"""Number of attempts at one server for a request that fails, for example by a broken connection."""
PAUSE_SECONDS = 0.5
"""Pause between two attempts."""


class NoServerError(RolloutError):
    """Raised when no rollout server is left; the message has the last problem of each."""


@dataclass(frozen=True, eq=False)
class Job:
    """Request to a server for `count` answers, numbers `sample` onwards of the call's request number `request`."""

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
    """Outstanding requests of one call of `generate`, by name; once it is over, nothing is retried."""

    over: bool = False
    requests: dict[str, _Member] = field(default_factory=dict)


class ServerPool:
    """Sends each request to the server with the fewest outstanding answers, and failed ones to another server.

    It has no servers before the first `renew`.
    """

    def __init__(self, clients: Sequence[ServerClient], eos: Sequence[int]) -> None:
        self._clients = {client.url: client for client in clients}
        self._eos = list(eos)
        self._lock = threading.Lock()
        self._members: dict[str, _Member] = {}
        self._versions: list[str] = []
        self._problems: dict[str, str] = {}

    def expect(self, version: str) -> None:
        """Accept answers by the weights of this label, too, from now on."""
        self._versions.append(version)

    def renew(self, problems: Mapping[str, str]) -> None:
        """Use the servers that hold the weights from now on: those whose problem is empty."""
        with self._lock:
            self._members = {url: _Member(self._clients[url]) for url, problem in problems.items() if not problem}
            self._problems = dict(problems)

    def failure(self) -> NoServerError | None:
        """Return the error to raise if no server is left."""
        with self._lock:
            return None if self._members else self._error()

    def _error(self) -> NoServerError:
        each = "; ".join(f"{url}: {self._problems.get(url, 'no weights yet')}" for url in self._clients)
        return NoServerError(f"no rollout server is left ({each}): start them again, and go on with --resume auto")

    def generate(self, jobs: Sequence[Job]) -> Generator[tuple[Job, Reply]]:
        """Yield the jobs with their answers, each once it is complete; raise NoServerError if no server is left."""
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
            # Also reached when the caller closes the generator early, or the last server is gone.
            with self._lock:
                call.over, left = True, dict(call.requests)
                members = list(self._members.values())  # servers that were dropped are ignored
            executor.shutdown(wait=False, cancel_futures=True)
            for member in members:
                if names := [name for name, asked in left.items() if asked is member]:
                    member.client.abort(names)

    def _next(self, done: "SimpleQueue[Future[Reply]]") -> "Future[Reply]":
        """Return the next job that is done; while that takes long, log warnings with the outstanding answers."""
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
                # From 0.33 on, vLLM refuses requests while it is paused for new weights; before, it queued them.
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
            # Several requests notice the same failure, some only after the server was taken back.
            if call.over or self._members.get(url) is not member:
                return
            del self._members[url]
            self._problems[url] = reason
        logger.warning("rollout server %s is left out until the next push of weights: %s", url, reason)
