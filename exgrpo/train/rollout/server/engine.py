"""Rollouts by any number of `vllm serve` instances, on this machine or others; see docs/servers.md."""

import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing

import torch

from exgrpo.train.common.distributed import World, agree, on_main
from exgrpo.train.common.errors import ConfigError
from exgrpo.train.common.records import EngineCounts
from exgrpo.train.rollout.engine import EngineSettings, Enough, Finished, Request
from exgrpo.train.rollout.server.check import FRESH
from exgrpo.train.rollout.server.client import ServerClient
from exgrpo.train.rollout.server.guard import server_token
from exgrpo.train.rollout.server.pool import Job, ServerPool
from exgrpo.train.rollout.server.sender import WeightSender

BUCKET_BYTES = 2**28


class ServerEngine:
    """Each rank requests its own answers from the servers; the first rank sends them the weights.

    `generate` makes no collective call and may run in a separate thread.

    Args:
        settings: the model, lengths, and the servers' addresses, http://host:port each.
        world: the ranks; making the engine is a collective call.
        bucket_bytes: approximate size of the parts in which weights are copied and sent.

    Raises:
        ConfigError: on all ranks, if a server cannot be reached or does not fit this run.
    """

    unrepeatable: str | None = "each server draws from a generator of its own, in an order that depends on timing"
    free_log_prob = True
    ranks = 1

    def __init__(self, settings: EngineSettings, world: World, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.world = world
        vocabulary = settings.source.config.get_text_config().vocab_size
        # Launchers do not pass the environment of the first rank to other machines.
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
        # Before the first push, only servers that have never received weights hold the model's own.
        self._pool.expect(FRESH)
        other = "it has weights of another run until some are pushed; a server that is started anew has the model's"
        self._pool.renew({url: "" if of_server.label == FRESH else other for url, of_server in facts.items()})

    def generate(self, requests: Sequence[Request], enough: Enough | None = None) -> Iterator[Finished]:
        """Generate as `RolloutEngine.generate`, without the seeds; raise NoServerError if no server is left."""
        if enough is not None:
            raise ValueError("servers do not return what is written of an answer, so `enough` is not for them")
        # Answers in one HTTP request share their prompt's blocks in the server's cache.
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
        """Send the weights; leaves out servers that cannot be reached and takes back those that can again.

        Raises:
            NoServerError: on all ranks, if no server holds the weights.
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
        """Return differing weights as `RolloutEngine.differing`; the first rank compares all servers."""
        self._wait_for_answers()
        if self._sender is not None:
            return self._sender.differing(weights)
        _run_through(weights)
        return []

    def _wait_for_answers(self) -> None:
        """Barrier before the first rank uses servers for something else than answers.

        Avoids a deadlock: a server that waits for weights generates nothing, and gathering the sharded weights needs
        all ranks, of which one may still wait for that server's answer.
        """
        self.world.gather(None)

    def counts(self) -> EngineCounts:
        counts, self._counts = self._counts, EngineCounts()
        return counts

    def sleep(self) -> None:
        """Do nothing: the servers do not share the trainer's memory."""

    def wake(self) -> None:
        """Do nothing, as `sleep`."""

    def close(self) -> None:
        """Close the connections; the servers keep running."""
        if self._sender is not None:
            self._sender.close()
        for client in self._clients:
            client.close()


def _run_through(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    for _ in weights:  # iteration gathers each weight, which needs all ranks
        pass
