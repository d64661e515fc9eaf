"""Schemas of the operators by name, and structures as flat arguments.

A schema of torch.library knows tensors, numbers and lists of them. An operator therefore takes a structure apart into
flat arguments, and puts it together again by their names. Nothing here depends on the place of an argument.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from exgrpo.kernels.inputs import AllowedIds, Head, HeadOptions, PolicyTerms, PolicyTokens, Surrogate, VocabShard

WAITS = (torch.Tag.cudagraph_unsafe,)
"""Of an operator whose host waits for the device: `torch.compile` keeps it out of its CUDA graphs."""

HEAD = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? temperature, float? softcap, "
    "ScalarType operand, SymInt[] shard, str group, SymInt? memory, SymInt[]? counts, Tensor? allowed_ids, "
    "Tensor? allowed_offsets"
)
"""The arguments of a head: see `flat_head`."""
TOKENS = "Tensor old_log_prob, Tensor advantage, Tensor? replayed"
"""The fields of `PolicyTokens`."""
SURROGATE = "float[]? clip, float? beta"
"""The fields of `Surrogate`."""


NUMBERS = ("softcap", "clip", "beta", "entropy_coef")
"""The arguments of all operators that are floats, or lists of them."""


class Schema:
    """The schema of an operator.

    ``arguments`` and ``results`` are as torch.library writes them. One more argument is last, ``traced``: torch.compile
    makes a number that changes symbolic, but would fix one that it meets as a float, and compile each value anew.
    Therefore `traced` hands the numbers over in a tensor, and what stands in their own places has no meaning.
    """

    def __init__(self, arguments: str, results: str) -> None:
        arguments = f"{arguments}, Tensor? traced"
        self.text = f"({arguments}) -> {results}"
        self.names = tuple(argument.split()[-1] for argument in arguments.split(", "))

    def named(self, values: tuple[Any, ...]) -> dict[str, Any]:
        """Return the values by the names of the arguments; numbers are not yet those of ``traced``."""
        return dict(zip(self.names, values, strict=True))

    def given(self, values: tuple[Any, ...]) -> dict[str, Any]:
        """Return the values by name where tensors have values: with the numbers of ``traced``."""
        named = self.named(values)
        if named["traced"] is not None:
            numbers = iter(named["traced"].tolist())
            for name in NUMBERS:
                value = named.get(name)
                if value is not None:
                    named[name] = [next(numbers) for _ in value] if name == "clip" else next(numbers)
        return named

    def traced(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values of all arguments but the last, and that one: the numbers, [N] float64, where a compiler traces."""
        if not torch.compiler.is_compiling():
            return (*values, None)
        named = dict(zip(self.names, values, strict=False))
        numbers: list[float] = []
        for name in NUMBERS:
            value = named.get(name)
            if value is not None:
                numbers += value if name == "clip" else [value]
                named[name] = [0.0, 0.0] if name == "clip" else 0.0
        zero = torch.zeros(1, dtype=torch.float64, device="cpu")
        return (*named.values(), torch.cat([zero + number for number in numbers]) if numbers else None)

    def gradients(self, found: Mapping[str, Tensor | None]) -> tuple[Tensor | None, ...]:
        """Return the result of a derivative: gradients by name, None for all other arguments."""
        return tuple(found.get(name) for name in self.names)


def flat_head(head: Head) -> tuple[Any, ...]:
    """A head as the arguments HEAD; `head_of` is the way back."""
    options, shard = head.options, head.options.shard
    sizes = [shard.size, shard.offset, shard.vocabulary, shard.largest]
    tensors = (head.hidden, head.weight, head.bias, head.target, options.temperature)
    counts = None if options.counts is None else list(options.counts)
    numbers = (options.softcap, options.operand, sizes, shard.group_name, options.memory, counts)
    return (*tensors, *numbers, *(options.allowed_tokens or (None, None)))


def head_of(given: Mapping[str, Any]) -> Head:
    """The head whose flat arguments were given."""
    size, offset, vocabulary, largest = given["shard"]
    shard = VocabShard(size, offset, vocabulary, largest, given["group"])
    counts = None if given["counts"] is None else (given["counts"][0], given["counts"][1])
    allowed_tokens = (
        None if given["allowed_ids"] is None else AllowedIds(given["allowed_ids"], given["allowed_offsets"])
    )
    softcap, operand, memory = given["softcap"], given["operand"], given["memory"]
    options = HeadOptions(given["temperature"], softcap, operand, shard, memory, counts, allowed_tokens)
    return Head(given["hidden"], given["weight"], given["bias"], given["target"], options)


def tokens_of(given: Mapping[str, Any]) -> PolicyTokens:
    """The tokens whose flat arguments were given."""
    return PolicyTokens(given["old_log_prob"], given["advantage"], given["replayed"])


def surrogate_of(given: Mapping[str, Any]) -> Surrogate:
    """The surrogate whose flat arguments were given."""
    clip = given["clip"]
    return Surrogate(None if clip is None else (clip[0], clip[1]), given["beta"])


def terms_of(given: Mapping[str, Any]) -> PolicyTerms:
    """The terms of a loss whose flat arguments were given."""
    return PolicyTerms(tokens_of(given), surrogate_of(given), given["entropy_coef"], given["normalizer"])


def without_autocast(tensor: Tensor) -> torch.autocast:
    """A context without autocast: the head itself rounds the operands to its dtype, and nothing else may be rounded."""
    return torch.autocast(tensor.device.type, enabled=False)
