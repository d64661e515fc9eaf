"""A channel for weights from the trainer's first rank to the worker processes of one server.

Each server has its own group, so that the death of one does not affect the others. vLLM is imported only for a channel
over NCCL; servers use `GlooGroup` too.
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
"""Time limit for one bucket of weights."""
ALIGNED = 16
"""Alignment in bytes of the weights in a bucket, as views of any dtype and kernels need it."""


def pack(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Pack weights into a bucket of [B] bytes: one broadcast instead of hundreds."""
    parts = []
    for weight in weights:
        raw = weight.detach().contiguous().view(-1).view(torch.uint8)
        parts += [raw, raw.new_zeros(-len(raw) % ALIGNED)]
    return torch.cat(parts)


def packed_bytes(dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]) -> int:
    """Return the bytes of weights once packed."""
    sizes = (dtype.itemsize * math.prod(shape) for dtype, shape in zip(dtypes, shapes, strict=True))
    return sum(size + -size % ALIGNED for size in sizes)


def unpack(
    bucket: torch.Tensor, dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]
) -> Iterator[torch.Tensor]:
    """Yield the weights in a bucket [B], as views of it."""
    start = 0
    for dtype, shape in zip(dtypes, shapes, strict=True):
        size = dtype.itemsize * math.prod(shape)
        yield bucket[start : start + size].view(dtype).view(list(shape))
        start += size + -size % ALIGNED


class GlooGroup:
    """Broadcasts among `size` processes that share no torch process group and rendezvous by a store.

    Raises:
        RuntimeError: not all of them joined in time.
    """

    def __init__(self, store: TCPStore, address: str, rank: int, size: int) -> None:
        gloo: Any = dist.ProcessGroupGloo  # torch's stubs leave out what is needed here
        options = gloo._Options()
        # By default gloo listens at the address of the host's name: on some machines that is the loopback device.
        options._devices = [gloo.create_device(hostname=address)]
        options._timeout = JOIN
        self._store = store  # the group does not keep it alive
        self._group = gloo(PrefixStore("weights", store), rank, size, options)

    def broadcast(self, tensor: torch.Tensor, src: int = 0, stream: None = None) -> None:
        """Broadcast the tensor of member `src` in place (on the CPU); RuntimeError if one is gone or too slow."""
        raw = tensor.view(-1).view(torch.uint8)
        self._group.broadcast(raw, src, datetime.timedelta(seconds=SEND_SECONDS)).wait()

    def destroy(self) -> None:
        """Leave the group; members that wait for this one get an error."""
        self._group.abort()


def join_gloo(address: str, port: int, rank: int, size: int) -> GlooGroup:
    """Join the group whose member 0 listens at the address."""
    store = TCPStore(address, port, is_master=False, timeout=JOIN)
    return GlooGroup(store, own_address(address, port), rank, size)


def own_address(host: str, port: int) -> str:
    """Return the address of this machine's interface towards another machine; nothing is sent."""
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


class WeightChannel:
    """The trainer's end: member 0 of a group with a server's workers.

    Args:
        backend: "nccl" (the weights and the workers are on GPUs) or "gloo".
        workers: number of its worker processes.
        device: where the weights are.

    Raises:
        ImportError: the backend is NCCL, and this machine has no vLLM that can join such a group.
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
        """The `init_info` of vLLM's weight transfer, with which its workers join."""
        return {
            "master_address": self.address,
            "master_port": self.port,
            "rank_offset": 1,
            "world_size": self._size,
        }

    def connect(self) -> None:
        """Wait for the workers, which must get the invitation at the same time, or raise RuntimeError."""
        if self._store is not None:
            self._group = GlooGroup(self._store, self.address, 0, self._size)
        else:
            torch.cuda.set_device(self._device)  # the device is per thread and starts as 0
            self._group = self._join(self.address, self.port, 0, self._size, self._device)

    def send(self, bucket: torch.Tensor, *, cancelled: Callable[[], bool]) -> None:
        """Broadcast a bucket; the workers must be asked to receive it at the same time.

        Args:
            bucket: [B] bytes, on the channel's device.
            cancelled: polled; True aborts, since the workers do not receive.

        Raises:
            RuntimeError: the workers are gone, too slow or do not receive; the channel cannot be used again.
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
        stream.wait_stream(torch.cuda.current_stream(self._device))  # the copies were made there
        self._group.broadcast(bucket, src=0, stream=stream)
        done = torch.cuda.Event()
        done.record(stream)
        # NCCL waits forever for a peer that died: only leaving the group ends its kernels.
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
