"""The servers that hold the policy's weights, and requests spread over them."""

import logging
import threading
import uuid
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field

from exgrpo.train.errors import RolloutError
from exgrpo.train.records import TokenIds
from exgrpo.train.rollout.engine import Sampling
from exgrpo.train.rollout.server.client import Reply, ServerClient, ServerError

logger = logging.getLogger(__name__)
REQUESTS = 64
"""At most so many requests of one rank are with a server at a time: enough for a full batch there."""


class NoServerError(RolloutError):
    """No rollout server is left; the message has the last problem of each."""


@dataclass(frozen=True, eq=False)
class Job:
    """`count` answers to a prompt of the call, the first of which is its `sample`-th one."""

    prompt: int
    sample: int
    count: int
    tokens: TokenIds


@dataclass(eq=False)
class _Member:
    client: ServerClient
    outstanding: int = 0


@dataclass(eq=False)
class _Call:
    """The requests of one call that are with servers; once it is over, nothing is asked again."""

    over: bool = False
    requests: dict[str, ServerClient] = field(default_factory=dict)


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

    def generate(self, jobs: Sequence[Job], sampling: Sampling) -> Generator[tuple[Job, Reply]]:
        """The jobs and their answers, each as soon as it is there.

        Raises:
            NoServerError: no server is left.
        """
        call = _Call()
        executor = ThreadPoolExecutor(REQUESTS * len(self._clients), thread_name_prefix="rollouts")
        try:
            futures = {executor.submit(self._answer, call, job, sampling): job for job in jobs}
            for future in as_completed(futures):
                yield futures.pop(future), future.result()
        finally:
            # The caller may have had enough, or the last server may be gone.
            with self._lock:
                call.over, left = True, dict(call.requests)
            executor.shutdown(wait=False, cancel_futures=True)
            for request, client in left.items():
                client.abort(request)

    def _answer(self, call: _Call, job: Job, sampling: Sampling) -> Reply:
        oldest = len(self._versions) - 1
        while True:
            request = uuid.uuid4().hex
            member = self._take(call, job, request)
            try:
                reply = member.client.generate(request, job.tokens, job.count, sampling, self._eos)
                foreign = reply.versions - set(self._versions[oldest:])
                if not foreign:
                    return reply
                self._drop(call, member, f"it has other weights ({', '.join(sorted(foreign))}), as after a restart")
            except ServerError as error:
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
            call.requests[request] = member.client
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
