"""The order in which ``auto`` tries the backends, and what is printed about the choice."""

import os
import sys
from functools import cache

import torch

DEBUG = "EXGRPO_DEBUG"
NAMES = ("torch", "triton", "cpu", "cuda")
LARGE = 1 << 20
"""Logits above which a call is large: below, it costs what its operators cost to launch."""


def order(device: torch.device, operand: torch.dtype, logits: int) -> tuple[str, ...]:
    """Return the backends for operands of a dtype and a number of logits, the fastest first."""
    # 2 threads of an x86-64 machine with AVX-512 (bf16 too), torch 2.13.0, 2026-11-21: forward and policy loss with
    # gradients, time of torch / time of cpu at (T, D, V):
    #
    #                (64, 32, 64)   (512, 96, 512)   (1024, 64, 1024)   (1024, 896, 32000)
    #   bfloat16          1.32            1.46               2.73                 2.12
    #   float16           1.10            1.21               1.36                 1.04
    #   float32           1.22            1.31               1.34                 1.05
    #   float64           1.23            1.19               1.25                 1.04
    if device.type == "cpu":
        return ("cpu", "torch")
    # Policy loss in bfloat16 on an H100 in milliseconds, torch 2.11.0, triton 3.6.0. One call after another, as in a
    # training, 2026-11-22: (16384, 1536, 151936) triton 39.2, cuda 33.8; (16384, 3584, 152064) 84.0, 81.2. After an
    # idle time, 2026-11-23: (8192, 1536, 151936) torch 49.7, triton 18.7, cuda 18.6; (8192, 3584, 152064) 75.8, 40.6,
    # 41.6. The forward: 7.3 and 6.5, 13.9 and 14.2.
    if architecture(device) == "sm_90" and operand == torch.bfloat16 and logits > LARGE:
        return ("cuda", "triton", "torch")
    return ("triton", "torch")


def why(device: torch.device, operand: torch.dtype) -> str:
    """Return the reason for the first backend of `order` in large calls."""
    name = architecture(device)
    if device.type == "cpu":
        return "compiled C++ is the fastest on CPUs"
    if name != "sm_90":
        return f"cuda is written for sm_90 (Hopper), and this is {name}"
    if operand != torch.bfloat16:
        return "cuda multiplies bfloat16 alone"
    return "cuda is the fastest for large calls on Hopper"


def architecture(device: torch.device) -> str:
    """Return the name of a GPU's architecture, such as sm_90 or gfx942; "cpu" for any CPU."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def talkative() -> bool:
    """True if EXGRPO_DEBUG asks for a line about each kind of call."""
    return os.environ.get(DEBUG, "0") not in ("", "0")


def say_product(operand: torch.dtype, width: int, fused: bool) -> None:
    """Print which product a head takes, if it is asked for."""
    if talkative():
        say(f"{operand} head of width {width}: {'its own' if fused else 'the library'} product")


@cache
def say(line: str) -> None:
    """Print a line on stderr, once per process."""
    print(f"exgrpo: {line}", file=sys.stderr, flush=True)
