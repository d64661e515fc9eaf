"""Weights from the trainer's first rank to all servers at once, by vLLM's weight-transfer routes."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch

from exgrpo.train.common.errors import ConfigError, shown
from exgrpo.train.rollout.engine import EngineSettings
from exgrpo.train.rollout.server.channel import WeightChannel, pack
from exgrpo.train.rollout.server.check import INCOMPLETE, ServerFacts, check_server, end_update
from exgrpo.train.rollout.server.client import LONG_SECONDS, ServerClient, ServerError, SilentServerError
from exgrpo.train.rollout.vllm.availability import INSTALL, SERVERS

logger = logging.getLogger(__name__)
Layout = dict[str, list[Any]]
"""Names, dtypes and shapes of weights, as vLLM's routes take them."""


def layout_of(weights: Sequence[tuple[str, torch.Tensor]]) -> Layout:
    """Return the layout of named weights."""
    return {
        "names": [name for name, _ in weights],
        "dtype_names": [str(weight.dtype).removeprefix("torch.") for _, weight in weights],
        "shapes": [list(weight.shape) for _, weight in weights],
    }


@dataclass(eq=False)
class Receiver:
    """State of one server in the sender.

    Attributes:
        label: label of the weights that it should have.
        channel: channel to its workers, if connected.
        request: request that makes the workers receive; done when they have received.
        problem: reason why it is left out since the last push; empty: it is not.
    """

    client: ServerClient
    label: str = ""
    channel: WeightChannel | None = None
    request: "Future[Any] | None" = None
    problem: str = ""


class WeightSender:
    """Sends weights to all servers in buckets of about this size; one that fails is left out until the next push."""

    def __init__(
        self, clients: Sequence[ServerClient], settings: EngineSettings, device: torch.device, bucket_bytes: int
    ) -> None:
        self._settings = settings
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._receivers = [Receiver(client) for client in clients]
        # Two threads per server: one posts the request to receive a bucket while another sends it.
        self._threads = ThreadPoolExecutor(2 * len(clients), thread_name_prefix="weights")
        self._layouts: list[Layout] = []

    def open(self) -> dict[str, ServerFacts]:
        """Check all servers and connect to their workers; return their facts by address or raise ConfigError."""
        facts = self._threads.map(self._connect, self._receivers)
        return {receiver.client.url: of_server for receiver, of_server in zip(self._receivers, facts, strict=True)}

    def _connect(self, receiver: Receiver) -> ServerFacts:
        client = receiver.client
        facts = check_server(client, self._settings, self._device)
        try:
            receiver.channel = self._open_channel(client, facts)
        except ImportError as error:
            raise ConfigError(
                f"rollout.servers: weights go to {client.url} over NCCL, and for this the trainer needs vLLM "
                f"{SERVERS}, too ({shown(error)}): {INSTALL['cuda']}"
            ) from None
        except (ServerError, RuntimeError, OSError) as error:
            raise ConfigError(
                f"rollout.servers: {client.url} and the trainer cannot open a channel over {facts.backend} for weights "
                f"({shown(error)}): the server's machine must reach the trainer's, on any port"
            ) from None
        receiver.label = facts.label
        return facts

    def _open_channel(self, client: ServerClient, facts: ServerFacts) -> WeightChannel:
        client.post("shutdown_weight_transfer_engine")
        channel = WeightChannel(str(facts.backend), client.url, facts.workers, self._device)
        invited = self._threads.submit(client.post, "init_weight_transfer_engine", {"init_info": channel.invitation})
        try:
            channel.connect()
        except RuntimeError:
            channel.close()
            if invited.done():
                invited.result()  # raises the server's error, which is more precise
            raise
        invited.result()
        return channel

    def push(self, weights: Iterable[tuple[str, torch.Tensor]], label: str) -> dict[str, str]:
        """Replace the weights of all servers that can be reached; iterates over all weights in any case.

        Returns:
            the problem of each server by address; empty if it holds the weights.
        """
        problems: dict[str, str] = {}
        live = self._each(self._begin, self._receivers, problems)
        self._layouts = []
        for layout, bucket in self._buckets(weights):
            self._layouts.append(layout)
            live = self._each(partial(self._update, layout=layout, bucket=bucket), live, problems)
        live = self._each(partial(self._finish, label=label), live, problems)
        return problems | {receiver.client.url: "" for receiver in live}

    def _begin(self, receiver: Receiver) -> None:
        client = receiver.client
        if receiver.channel is None or client.weight_version() != receiver.label:
            self._disconnect(receiver)
            self._connect(receiver)
        client.post("pause?mode=wait")  # quick, since all ranks have their answers
        # Answers by half-replaced weights must not pass for answers by the old or the new ones.
        client.post("update_weight_version", {"new_version": INCOMPLETE})
        client.post("start_weight_update")

    def _update(self, receiver: Receiver, layout: Layout, bucket: torch.Tensor) -> None:
        receiver.request = self._threads.submit(receiver.client.post, "update_weights", {"update_info": layout})
        self._send(receiver, bucket)
        _taken(receiver)

    def _finish(self, receiver: Receiver, label: str) -> None:
        receiver.client.post("finish_weight_update", {"weight_version": label})
        receiver.client.post("resume")
        receiver.label, receiver.problem = label, ""

    def differing(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """Return the names of weights that differ on servers; none before the first push."""
        problems: dict[str, str] = {}
        live = [receiver for receiver in self._receivers if receiver.channel is not None and self._layouts]
        for receiver in live:
            call = partial(receiver.client.call_workers, seconds=LONG_SECONDS)
            receiver.request = self._threads.submit(call, "rollout_differing", self._layouts)
        for _, bucket in self._buckets(weights):  # the same buckets as those of the push
            live = self._each(partial(self._send, bucket=bucket), live, problems)
        live = self._each(_taken, live, problems)
        found: dict[str, list[str]] = {}
        for receiver in live:
            for name in dict.fromkeys(chain.from_iterable(_taken(receiver))):
                found.setdefault(name, []).append(receiver.client.url)
        return [name if len(at) == len(live) else f"{name} (at {', '.join(at)})" for name, at in found.items()]

    def close(self) -> None:
        """Leave all channels."""
        for receiver in self._receivers:
            self._disconnect(receiver)
        self._threads.shutdown(wait=False)

    def _send(self, receiver: Receiver, bucket: torch.Tensor) -> None:
        channel, request = receiver.channel, receiver.request
        assert channel is not None
        assert request is not None
        try:
            channel.send(bucket, cancelled=lambda: request.done() and request.exception() is not None)
        except RuntimeError:
            channel.close()  # makes the workers' request fail
            request.result()  # raises their error, which is more precise
            raise

    def _each(
        self, step: Callable[[Receiver], None], receivers: Sequence[Receiver], problems: dict[str, str]
    ) -> list[Receiver]:
        """Run a step for all receivers concurrently.

        Returns:
            the receivers for which it succeeded; the errors of the others are added to `problems`, by address.
        """

        def attempt(receiver: Receiver) -> str:
            try:
                step(receiver)
            except (ServerError, ConfigError, RuntimeError, OSError) as error:
                self._give_up(receiver, silent=isinstance(error, SilentServerError))
                return shown(error, 300)
            return ""

        live = []
        for receiver, problem in zip(receivers, self._threads.map(attempt, receivers), strict=True):
            if not problem:
                live.append(receiver)
                continue
            url = receiver.client.url
            problems[url] = problem
            if problem != receiver.problem:  # warn once, not at every push
                logger.warning("rollout server %s takes no weights and is left out until it does: %s", url, problem)
            receiver.problem = problem
        return live

    def _give_up(self, receiver: Receiver, *, silent: bool) -> None:
        self._disconnect(receiver)
        if silent:
            return  # another request would wait for its time limit again
        # Requests that wait at the server end with the label `INCOMPLETE`, so they are sent to another server.
        with suppress(ServerError):
            if receiver.client.weight_version() == INCOMPLETE:
                end_update(receiver.client)
            receiver.client.post("resume")

    @staticmethod
    def _disconnect(receiver: Receiver) -> None:
        if receiver.channel is not None:
            receiver.channel.close()
        receiver.channel, receiver.label = None, ""

    def _buckets(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[Layout, torch.Tensor]]:
        """Copy the weights into buckets; each given weight is valid only until the next one."""
        copies, size = list[tuple[str, torch.Tensor]](), 0
        for name, weight in weights:
            copies.append((name, weight.detach().clone(memory_format=torch.contiguous_format)))
            size += weight.nbytes
            if size >= self._bucket_bytes:
                yield layout_of(copies), pack([copy for _, copy in copies])
                copies, size = [], 0
        if copies:
            yield layout_of(copies), pack([copy for _, copy in copies])


def _taken(receiver: Receiver) -> Any:
    """Wait until a server has received what was sent; return its response."""
    assert receiver.request is not None
    return receiver.request.result()
