"""A channel for weights from the trainer's first rank to the worker processes of one server.

Each server has a group of its own, so that one that dies takes no other with it. Nothing here imports vLLM before a
channel over NCCL is wanted; servers use `GlooGroup` too.
"""

import datetime
import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import distributed as dist
from torch.distributed import PrefixStore, TCPStore

JOIN = datetime.timedelta(seconds=60)
SEND_SECONDS = 600
"""For one bucket of weights."""
ALIGNED = 16
"""Bytes: in a bucket each weight begins at a multiple of them, as views of any dtype and kernels want it."""


def pack(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """[B] bytes of a bucket of weights: one broadcast in the place of hundreds."""
    parts = []
    for weight in weights:
        raw = weight.detach().contiguous().view(-1).view(torch.uint8)
        parts += [raw, raw.new_zeros(-len(raw) % ALIGNED)]
    return torch.cat(parts)


def packed_bytes(dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]) -> int:
    """Bytes that weights have when they are packed."""
    sizes = (dtype.itemsize * math.prod(shape) for dtype, shape in zip(dtypes, shapes, strict=True))
    return sum(size + -size % ALIGNED for size in sizes)


def unpack(
    bucket: torch.Tensor, dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]
) -> Iterator[torch.Tensor]:
    """The weights in a bucket [B], as views of it."""
    start = 0
    for dtype, shape in zip(dtypes, shapes, strict=True):
        size = dtype.itemsize * math.prod(shape)
        yield bucket[start : start + size].view(dtype).view(list(shape))
        start += size + -size % ALIGNED


class GlooGroup:
    """Broadcasts among `size` processes that share no process group of torch and find each other by a store.

    Raises RuntimeError where not all of them came in time.
    """

    def __init__(self, store: TCPStore, address: str, rank: int, size: int) -> None:
        gloo: Any = dist.ProcessGroupGloo  # torch's stubs leave out what is needed here
        options = gloo._Options()
        # By default gloo listens where the host's name points to: on some machines that is the loopback device.
        options._devices = [gloo.create_device(hostname=address)]
        options._timeout = JOIN
        self._store = store  # the group does not keep it alive
        self._group = gloo(PrefixStore("weights", store), rank, size, options)

    def broadcast(self, tensor: torch.Tensor, src: int = 0, stream: None = None) -> None:
        """Give member `src`'s tensor to all, in place; contiguous, on the CPU, of any dtype.

        Raises:
            RuntimeError: a member is gone, or `SEND_SECONDS` are over.
        """
        raw = tensor.view(-1).view(torch.uint8)
        self._group.broadcast(raw, src, datetime.timedelta(seconds=SEND_SECONDS)).wait()

    def destroy(self) -> None:
        """Leave the group; who waits for this member gets an error."""
        self._group.abort()


def join_gloo(address: str, port: int, rank: int, size: int) -> GlooGroup:
    """Become a member of the group whose member 0 waits at the address."""
    store = TCPStore(address, port, is_master=False, timeout=JOIN)
    return GlooGroup(store, own_address(address, port), rank, size)


def own_address(host: str, port: int) -> str:
    """This machine's address on the way to another one; nothing is sent."""
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


class WeightChannel:
    """The trainer's end: member 0 of a group with a server's workers.

    Args:
        backend: "nccl" (the weights and the workers are on GPUs) or "gloo".
        url: the server.
        workers: number of its worker processes.
        device: where the weights are.

    Raises:
        ImportError: the backend is NCCL, and there is no vLLM here that can join such a group.
    """

    def __init__(self, backend: str, url: str, workers: int, device: torch.device) -> None:
        parts = urlsplit(url)
        self.address = own_address(parts.hostname or "", parts.port or 80)
        self._size, self._device = workers + 1, device
        self._group: Any = None
        self._store: TCPStore | None = None
        if backend == "gloo":
            self._store = TCPStore(
                self.address, 0, is_master=True, timeout=JOIN, wait_for_workers=False, multi_tenant=True
            )
            self.port = self._store.port
        else:
            from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group

            self._join: Callable[..., Any] = stateless_init_process_group
            self.port = _free_port(self.address)

    @property
    def invitation(self) -> dict[str, Any]:
        """What vLLM's workers need to know to join: the `init_info` of its weight transfer."""
        return {
            "master_address": self.address,
            "master_port": self.port,
            "rank_offset": 1,
            "world_size": self._size,
        }

    def connect(self) -> None:
        """Wait for the workers, who have to be told at the same time.

        Raises:
            RuntimeError: they did not come.
        """
        if self._store is not None:
            self._group = GlooGroup(self._store, self.address, 0, self._size)
        else:
            torch.cuda.set_device(self._device)  # threads begin with device 0
            self._group = self._join(self.address, self.port, 0, self._size, self._device)

    def send(self, bucket: torch.Tensor, *, cancelled: Callable[[], bool]) -> None:
        """Broadcast a bucket; the workers have to be told at the same time.

        Args:
            bucket: [B] bytes, on the channel's device.
            cancelled: asked now and then; True: the workers will not take them.

        Raises:
            RuntimeError: the workers are gone, too slow or will not take them; the channel is of no more use.
        """
        if self._store is not None:
            if cancelled():
                raise RuntimeError("the server has stopped to take weights")
            self._group.broadcast(bucket.cpu())
        else:
            self._send_nccl(bucket, cancelled)

    def _send_nccl(self, bucket: torch.Tensor, cancelled: Callable[[], bool]) -> None:
        torch.cuda.set_device(self._device)
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))  # where the copies were made
        self._group.broadcast(bucket, src=0, stream=stream)
        done = torch.cuda.Event()
        done.record(stream)
        # NCCL waits for ever for a peer that died: only leaving the group ends its kernels.
        deadline = time.monotonic() + SEND_SECONDS
        while not done.query():
            if cancelled() or time.monotonic() > deadline:
                raise RuntimeError("the server has stopped to take weights")
            time.sleep(0.001)

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.destroy()
        self._group = self._store = None


def _free_port(address: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]
