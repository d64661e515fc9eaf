"""Comparison of a backend with plain PyTorch on small cases, before its first use in a dtype on a device.

A backend passes if its errors against float64 are at most FACTOR times those of plain torch in the same dtype and under
the same settings (TF32, for instance), plus some roundings. EXGRPO_SELF_TEST=0 leaves the test out.
"""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, cycle

import torch
from torch import Tensor

from exgrpo.kernels import inputs
from exgrpo.kernels.chunks import walks
from exgrpo.kernels.chunks.passes import Backend
from exgrpo.kernels.inputs import AllowedIds, Needed, PolicyTerms, PolicyTokens, compute_dtype

ENVIRONMENT = "EXGRPO_SELF_TEST"
PLAIN = "torch"
LIMIT = 300.0  # seconds; compilers take some tens of them
FACTOR = 5.0
"""Ratio of two right errors at most: with TF32 one was 3.2 times the other on an H100."""
TOKENS, WIDTH, VOCABULARY, UNLIKELY, SPREAD = 33, 48, 1031, 1, 8.0
"""UNLIKELY has a target next to impossible, where fused products change the anchor: its logits are SPREAD wider."""
SIZES = (3, 0, 8, 1, 300)
"""Sets of allowed tokens: pairs, the whole vocabulary, one token alone, and a large part."""

_VERDICTS: dict[tuple[str, torch.device, torch.dtype], str] = {}
_LOCK = threading.Lock()


def fault(name: str, device: torch.device, dtype: torch.dtype, load: Callable[[str], Backend]) -> str:
    """Return what is wrong with a backend, "" if it passes or is not tested; RuntimeError: the GPU is lost."""
    if name == PLAIN or os.environ.get(ENVIRONMENT, "1") == "0":
        return ""
    with _LOCK:
        if (key := (name, device, dtype)) not in _VERDICTS:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return ""  # a capture admits no waiting
            _VERDICTS[key] = _tested(name, device, lambda: _compared(load(name), load(PLAIN), device, dtype))
        return _VERDICTS[key]


def _tested(name: str, device: torch.device, compare: Callable[[], str]) -> str:
    found: list[str] = []

    def test() -> None:
        wrong = compare()
        with suppress(RuntimeError):
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # raises, or never ends, where the GPU is lost
            found.append(wrong)

    # A thread of its own has none of the caller's modes (autocast, inference mode, torch.func), and can be left behind.
    thread = threading.Thread(target=test, daemon=True)
    thread.start()
    thread.join(LIMIT)
    if found:
        return found[0]
    wrong = f"it did not end within {LIMIT:.0f} s" if thread.is_alive() else "it made the device fail"
    if device.type != "cuda":
        return wrong
    remedy = f"the GPU is lost to this process: start it again with EXGRPO_BACKEND={PLAIN} in the environment"
    raise RuntimeError(f"the {name} backend failed its self-test: {wrong}; {remedy}")


@torch.no_grad()
def _compared(ours: Backend, plain: Backend, device: torch.device, dtype: torch.dtype) -> str:
    """Return what is wrong with a backend's results in a few words, "" if they are right."""
    try:
        exact, theirs, found = (_outcomes(*of, device, dtype) for of in ((plain, True), (plain, False), (ours, False)))
    except torch.OutOfMemoryError:
        return ""  # no fault of the backend: the call itself will raise it
    except Exception as error:
        return f"it raised {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]
    for gradients in (False, True):
        names = [name for name in exact if ("gradient" in name) == gradients]
        # All results together, as a single one may be exact by chance; 1e-11 is the error of float64 itself.
        allowed = FACTOR * max(_error(theirs[name], exact[name]) for name in names)
        allowed += max(1e-11, 256 * torch.finfo(compute_dtype(dtype)).eps)
        allowed += 8 * torch.finfo(dtype).eps * gradients  # products may round a factor to the operands' dtype
        for name in names:
            if found[name].shape != exact[name].shape:
                return f"{name} has shape {list(found[name].shape)}, where {list(exact[name].shape)} is right"
            if not (off := _error(found[name], exact[name])) <= allowed:
                return f"{name} is off by {off:.1e} of its size, where {allowed:.1e} is allowed"
    return ""


def _error(value: Tensor, exact: Tensor) -> float:
    typical = exact.square().mean().sqrt()  # an entry that is nearly 0 has the errors of the others
    return ((value - exact).abs() / (exact.abs() + typical).clamp(min=1e-300)).max().item()


def _outcomes(backend: Backend, exact: bool, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return results of all operations by name, on the CPU; ``exact``: in float64 from the same rounded numbers."""
    plain = _head(exact, device, dtype)
    slope, number = torch.linspace(-1, 1, TOKENS, device=device), torch.arange(TOKENS, device=device)
    slope[::5], slope[UNLIKELY] = 0, slope[UNLIKELY] / SPREAD
    heat = (1.5 + slope).to(compute_dtype(plain.hidden.dtype))
    ratios = torch.tensor([-0.6, -0.1, 0.1, 0.6], device=device)[number % 4]  # far from the bounds of the clipping
    needed, surrogate = Needed(True, True, True), inputs.Surrogate((0.2, 0.2), 0.1)
    found: dict[str, Tensor] = {}
    for case, temperature, cap, sets, entropy in (
        ("", None, None, None, 0.0),
        (" (temperature, entropy)", heat, None, None, 0.05),
        (" (softcap, sets, entropy)", None, 5.0, plain.options.allowed_tokens, 0.05),
    ):
        head = plain._replace(options=replace(plain.options, temperature=temperature, softcap=cap, allowed_tokens=sets))
        (log_prob, spread), saved = walks.log_prob_forward(head, backend)
        parts = walks.log_prob_backward(head, saved, slope, slope.flip(0) if entropy else None, needed, backend)
        tokens = PolicyTokens(log_prob - ratios, slope, number % 3 == 0)
        terms = PolicyTerms(tokens, surrogate, entropy, None)
        loss, per_token, formed = walks.policy_loss_forward(head, terms, needed, backend)
        scored = inputs.ScoredTokens(log_prob, spread, tokens, number % 3 != 1)
        sums, (*_, ratio, _), coefficient = backend.token_objective(scored, surrogate)
        named = {"log_prob": log_prob, "entropy": spread, "loss": loss, "sums": sums, "ratio": ratio}
        named |= dict(zip(("own log_prob", "own entropy", "own ratio", "clipped"), per_token, strict=True))
        named |= {f"gradient of {name}": value for name, value in parts._asdict().items()}
        named |= {f"gradient of {name} with the loss": value for name, value in formed._asdict().items()}
        found |= {f"{name}{case}": value for name, value in named.items()}
        found[f"gradient of tokens{case}"] = coefficient
    found["gradient times a factor"] = scaled = plain.weight.clone()
    backend.scale(scaled, heat[2])
    found["advantage"] = backend.centre_groups(heat, number % 7, True)
    found["mean"] = backend.segment_mean(heat, number % 3 != 0, torch.tensor([0, 9, 9, 30, TOKENS], device=device))
    return {name: value.to("cpu", torch.float64) for name, value in found.items()}


def _head(exact: bool, device: torch.device, dtype: torch.dtype) -> inputs.Head:
    """Return a head with bias and sets of allowed tokens; one target in seven is left out."""
    random, shapes = torch.Generator("cpu").manual_seed(20251002), ((TOKENS, WIDTH), (VOCABULARY, WIDTH), VOCABULARY)
    hidden, weight, bias = (torch.randn(s, generator=random, dtype=torch.float32, device="cpu") for s in shapes)
    hidden[UNLIKELY] *= SPREAD
    weight /= WIDTH**0.5
    target = torch.arange(TOKENS, device="cpu") * 29
    target[UNLIKELY] = (weight @ hidden[UNLIKELY] + bias).argmin()
    words = [(one + 7 * torch.arange(n, device="cpu")) % VOCABULARY for one, n in zip(target, cycle(SIZES))]
    offsets = torch.tensor([0, *accumulate(map(len, words))], device=device)
    target[::7] = inputs.LEFT_OUT
    operand = torch.float64 if exact else dtype
    hidden, weight, bias = (values.to(dtype).to(device, operand) for values in (hidden, weight, bias))
    sets, shard = AllowedIds(torch.cat(words).int().to(device), offsets), inputs.VocabShard.whole(VOCABULARY)
    return inputs.Head(
        hidden, weight, bias, target.to(device), inputs.HeadOptions(None, None, operand, shard, allowed_tokens=sets)
    )
