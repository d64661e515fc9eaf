"""What a network adds to the phases of a training step: bytes through the adapter of a host, and trips that wait.

Nothing is computed meanwhile, and the hosts are alike.
"""

from dataclasses import dataclass

TRIPS_OF_MESSAGE = 2
"""The word that the receiver waits, and the message: so it is with gloo."""
PUSH_REQUESTS = 7
"""Requests to a server one after another in a push of one bucket: see `WeightSender`."""
TRIPS_OF_REQUEST = 4
"""There and back for the connection, there and back for the answer."""


@dataclass(frozen=True)
class Network:
    """What lies between hosts.

    Attributes:
        bandwidth: bytes/s through the adapters of a host, in each direction.
        latency: seconds for which a message is under way, one way.
    """

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Traffic:
    """What a phase asks of the network.

    Attributes:
        size: bytes through the busiest adapter, at its whole bandwidth.
        trips: messages that wait for one another.
    """

    size: float
    trips: float

    def seconds(self, network: Network) -> float:
        """What it adds to a phase that does not compute meanwhile."""
        return self.size / network.bandwidth + self.trips * network.latency

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.size + other.size, self.trips + other.trips)


@dataclass(frozen=True)
class Ring:
    """Ranks in a ring, those of a host beside each other: each gives its neighbour what it got from the other one.

    Attributes:
        hosts: of the trainer, at least two.
        ranks: on all of them together.
        use: share of the bandwidth that collectives reach.
    """

    hosts: int
    ranks: int
    use: float = 1.0

    def collective(self, size: float, calls: float) -> Traffic:
        """Gathers that make `size` bytes whole on every rank, or sums of so many that are shared out, in some calls.

        What is whole passes the adapter of a host once, however many ranks the host has, without the part of the rank
        that receives it. A part goes over the border of each host but the one that lies behind its own rank.
        """
        trips = TRIPS_OF_MESSAGE * min(self.hosts, self.ranks - 1)
        return Traffic(size * (self.ranks - 1) / self.ranks / self.use, trips * calls)

    def update(self, weights: float, gathers: float, reduced: float, calls: float) -> Traffic:
        """An optimiser step under ZeRO-3.

        Args:
            weights: bytes of the model as it is gathered.
            gathers: how often all of it is: for the forward and for the backward of each micro-batch.
            reduced: bytes of gradients that are reduced; under gloo twice those, which gathers what it has reduced.
            calls: collectives, one after another.
        """
        return self.collective(gathers * weights + reduced, calls)

    def push(self, weights: float, tensors: float, servers: int) -> Traffic:
        """So many weights to all servers: each gathered, and out of the first host once for each server."""
        sent = Traffic(servers * weights, TRIPS_OF_MESSAGE * tensors + PUSH_REQUESTS * TRIPS_OF_REQUEST)
        return self.collective(weights, tensors) + sent


@dataclass(frozen=True)
class Large:
    """A training step of recipes/paper.yaml, Qwen2.5-Math-7B, on hosts with eight GPUs each.

    Attributes:
        weights: bytes in bf16; the gradients are reduced in bf16, too.
        updates: optimiser steps of a training step, of one micro-batch each from 64 GPUs on.
        passes: that score answers: those that are replayed, and the fresh ones.
        calls: gathers of a pass: seven matrices in each of 28 layers, the embedding and the head.
        buckets: in which the gradients are reduced, 5e8 elements each.
        answers: bytes of the answers: 128 x 8, 2048 tokens each, an id and a log-prob for each token.
        objects: collectives that gather Python objects.
        use: share of the bandwidth that collectives reach.
    """

    weights: float = 15.2e9
    updates: int = 2
    passes: int = 2
    calls: int = 198
    buckets: int = 16
    answers: float = 128 * 8 * 2048 * 8
    objects: int = 8
    use: float = 0.8

    def phases(self, hosts: int, servers: int) -> dict[str, Traffic]:
        """What each phase asks of the network."""
        ring, calls = Ring(hosts, 8 * hosts, self.use), 2 * self.calls + self.buckets
        of_updates = self.updates * self.weights
        return {
            "update": ring.update(of_updates, 2, of_updates, self.updates * calls),
            "score": ring.collective(self.passes * self.weights, self.passes * self.calls),
            "push": ring.push(self.weights, self.calls, servers),
            "replicate": ring.collective(self.answers, self.objects),
        }


NETWORKS = {
    "Ethernet, 100 Gbit/s": Network(12.5e9, 30e-6),
    "InfiniBand, 400 Gbit/s": Network(50e9, 5e-6),
}
"""One adapter in each host."""


def table() -> str:
    """What the model predicts for large runs, in Markdown."""
    lines = [
        "| hosts of the trainer, servers | network | update | score | push | replicate |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for hosts in (8, 64):
        for name, network in NETWORKS.items():
            seconds = [f"{one.seconds(network):.2g} s" for one in Large().phases(hosts, hosts).values()]
            lines.append(f"| {hosts}, {hosts} | {name} | {' | '.join(seconds)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
