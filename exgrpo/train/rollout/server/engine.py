"""Rollouts by any number of `vllm serve` instances, on this machine or others; see docs/servers.md."""

import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing

import torch

from exgrpo.train.common.distributed import World, agree, on_main
from exgrpo.train.common.errors import ConfigError
from exgrpo.train.common.records import EngineCounts
from exgrpo.train.rollout.engine import EngineSettings, Finished, Request
from exgrpo.train.rollout.server.check import FRESH
from exgrpo.train.rollout.server.client import ServerClient
from exgrpo.train.rollout.server.guard import server_token
from exgrpo.train.rollout.server.pool import Job, ServerPool
from exgrpo.train.rollout.server.sender import WeightSender

BUCKET_BYTES = 2**28


class ServerEngine:
    """Every rank asks the servers for its own answers; the first rank gives them their weights.

    `generate` makes no collective call and may run in a thread beside those of the trainer.

    Args:
        settings: the model, lengths, and the servers' addresses, http://host:port each.
        world: the ranks; all of them make an engine together.
        bucket_bytes: weights are copied and sent in parts of about this size.

    Raises:
        ConfigError: on all ranks, where a server cannot be reached or is not one for this run.
    """

    unrepeatable: str | None = "each server draws from a generator of its own, in an order that depends on timing"
    free_log_prob = True
    ranks = 1

    def __init__(self, settings: EngineSettings, world: World, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.world = world
        vocabulary = settings.source.config.get_text_config().vocab_size
        # Launchers do not give the environment of the first rank to those on other machines.
        token = world.gather(on_main(world, server_token))[0] or ""
        self._clients = [ServerClient(url, vocabulary, token) for url in settings.rollout.servers]
        self._pool = ServerPool(self._clients, sorted(set(settings.eos)))
        self._counts = EngineCounts()
        self._sender: WeightSender | None = None
        if world.is_main:
            self._sender = WeightSender(self._clients, settings, world.device, bucket_bytes)
        try:
            facts = agree(world, lambda: self._sender.open() if self._sender else {})
        except ConfigError:
            self.close()
            raise
        self._run, facts = world.gather((uuid.uuid4().hex[:8], facts))[0]
        self._sequences = min(of_server.sequences for of_server in facts.values())
        self._pushes = 0
        # Until the first push only servers that nobody has pushed anything to are of use.
        self._pool.expect(FRESH)
        other = "it has weights of another run until some are pushed; a server that is started anew has the model's"
        self._pool.renew({url: "" if of_server.label == FRESH else other for url, of_server in facts.items()})

    def generate(self, requests: Sequence[Request]) -> Iterator[Finished]:
        """See `RolloutEngine.generate`; the seeds are not used.

        Raises:
            NoServerError: no server is left.
        """
        # Answers of one request share their prompt's blocks in the server's cache.
        most = self._sequences
        jobs = [
            Job(i, first, min(most, request.count - first), request.prompt, request.sampling)
            for i, request in enumerate(requests)
            for first in range(0, request.count, most)
        ]
        with closing(self._pool.generate(jobs)) as replies:
            for job, reply in replies:
                self._counts = EngineCounts(
                    self._counts.prompt_tokens + len(job.tokens) * job.count,
                    self._counts.cached_tokens + reply.cached_tokens,
                )
                for sample, rollout in enumerate(reply.rollouts, job.sample):
                    yield Finished(job.request, sample, rollout)

    def push_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `RolloutEngine.push_weights`; a server that cannot be reached is left out, one that is back taken in.

        Raises:
            NoServerError: on all ranks, where no server holds the weights.
        """
        self._wait_for_answers()
        self._pushes += 1
        label = f"{self._run}-{self._pushes}"
        self._pool.expect(label)
        problems = {}
        if self._sender is not None:
            problems = self._sender.push(weights, label)
        else:
            _run_through(weights)
        self._pool.renew(self.world.gather(problems)[0])
        if error := self._pool.failure():
            raise error

    def differing(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """See `RolloutEngine.differing`; the first rank tells of all servers."""
        self._wait_for_answers()
        if self._sender is not None:
            return self._sender.differing(weights)
        _run_through(weights)
        return []

    def _wait_for_answers(self) -> None:
        """Have all ranks here before the first one has servers do something else.

        A server that waits for weights gives no answers, and the weights are sharded: the first rank would wait for a
        rank that waits for an answer, the server for the first rank, and that answer for the server.
        """
        self.world.gather(None)

    def counts(self) -> EngineCounts:
        """See `RolloutEngine.counts`."""
        counts, self._counts = self._counts, EngineCounts()
        return counts

    def sleep(self) -> None:
        """Nothing: the servers' memory is their own."""

    def wake(self) -> None:
        """Nothing; see `sleep`."""

    def close(self) -> None:
        """Leave the servers as they are."""
        if self._sender is not None:
            self._sender.close()
        for client in self._clients:
            client.close()


def _run_through(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """All ranks gather each weight together, whoever needs it."""
    for _ in weights:
        pass
