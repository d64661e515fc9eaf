"""A long cable between two network devices: what goes in at one end comes out at the other one a fixed time later.

`python -m tests.train.cable NEAR FAR SECONDS`. The kernel's own delay, netem, is a module that many systems lack.
"""

import select
import socket
import sys
import time
from collections import deque
from typing import NoReturn

ALL_PROTOCOLS = 0x0003
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
PACKET_VNET_HDR = 15
PACKET_IGNORE_OUTGOING = 23
SOL_PACKET = 263
LARGEST = 2**17
"""Bytes of a frame: several segments of TCP may be one until a real network card would cut them."""
QUEUE_BYTES = 2**25


def end(device: str) -> socket.socket:
    """Takes the frames that arrive at a device, and sends some from it."""
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    made.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, QUEUE_BYTES)
    made.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, QUEUE_BYTES)
    made.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    # Frames keep the note of what is left to do for them: their checksums, and where to cut them.
    made.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    made.bind((device, ALL_PROTOCOLS))
    return made


def carry(near: socket.socket, far: socket.socket, seconds: float) -> NoReturn:
    """Carry frames both ways, for ever."""
    opposite = {near: far, far: near}
    under_way: deque[tuple[float, socket.socket, bytes]] = deque()
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        arrived, _, _ = select.select([near, far], [], [], wait)
        for one in arrived:
            under_way.append((time.monotonic() + seconds, opposite[one], one.recv(LARGEST)))
        while under_way and under_way[0][0] <= time.monotonic():
            _, to, frame = under_way.popleft()
            to.send(frame)


if __name__ == "__main__":
    ends = end(sys.argv[1]), end(sys.argv[2])
    print("connected", flush=True)
    carry(*ends, float(sys.argv[3]))
