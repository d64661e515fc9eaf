"""Check a model folder's files and context length before loading it.

`from_pretrained` fills missing weights with random numbers, and under ZeRO-3 it does not report unused ones. So the
names and shapes in the files are held against the model without weights, by transformers' own rules (prefixes, tied and
renamed weights, what an architecture ignores), and every number is read once. A compiled layer is held
against a plain one.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel
from transformers.modeling_utils import load_state_dict
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    logging,
)
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from exgrpo.train.common.distributed import ALONE, World, agree
from exgrpo.train.common.errors import ConfigError, ModelError, shown
from exgrpo.train.config.policy import to_arguments
from exgrpo.train.policy.source import ModelSource

Header = dict[str, torch.Tensor]
"""Names and shapes in a file, as tensors without content."""

FILES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
"""Where weights are looked for, in this order, as transformers does."""
SHOWN_NAMES = 3
"""So many weights of a kind are named in an error."""


def check_dtype(dtype: str, device: torch.device) -> None:
    """Raise ConfigError if this device has no instructions for products of a dtype."""
    if dtype == "fp16" and not get_accelerator().is_fp16_supported():
        raise ConfigError(
            f"policy.dtype fp16: PyTorch has no products in fp16 for this {device.type.upper()} (of a CPU they need "
            "AVX512-FP16), and its plain loops take tens of times as long: take bf16 or fp32, or a GPU"
        )


def check_positions(model: ModelSource, length: int, lengths: str) -> None:
    """Check that a model has positions for `length` tokens of prompt + response.

    Raises:
        ConfigError: it has fewer; `lengths` names in the message what to lower.
    """
    if model.positions is not None and length > model.positions:
        raise ConfigError(
            f"{lengths} exceed the {model.positions} positions of {model.path}: lower them, or raise the positions by "
            f"overrides of the model's configuration (max_position_embeddings={length}, and a rope_theta that suits it)"
        )


def check_weights(model: ModelSource, world: World = ALONE) -> None:
    """Read all weights of a model once, to see that they are all there and finite; ranks share the reading.

    Raises:
        ModelError: it is no causal LM, or weights are missing, left over, of another shape or not finite; the message
            names them.
    """
    empty = model.empty()
    changed = f" with {', '.join(to_arguments(model.overrides))}" if model.overrides else ""
    refused = f"policy.path: {model.path}{changed} cannot be used"

    def read_share() -> list[str]:
        try:
            return _read_share(model, empty, world)
        except (ModelError, OSError) as error:
            raise ModelError(f"{refused}: {shown(error, 500)}") from None

    not_finite = [name for of_rank in world.gather(agree(world, read_share)) for name in of_rank]
    if not_finite:
        raise ModelError(f"{refused}: NaN or infinity in {_shortened(sorted(not_finite))}")


def _read_share(model: ModelSource, empty: PreTrainedModel, world: World) -> list[str]:
    """Hold all files against the model; names of the weights of this rank's share that are not finite."""
    headers = {file: _header(file) for file in _files(model.path)}
    if problem := _mismatch(empty, headers.values()):
        raise ModelError(problem)
    weights = [(file, name) for file, header in headers.items() for name in header]
    return list(_not_finite([weight for _, weight in world.split(weights)]))


def _files(path: str) -> list[str]:
    """The files that transformers would load; those of a hub are downloaded if they are not there."""
    for name in FILES:
        found = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        if found is None:
            continue
        if not name.endswith(".index.json"):
            return [found]
        try:
            return get_checkpoint_shard_files(path, found)[0]
        except OSError:
            raise
        except Exception as error:  # of whatever kind: an index may hold anything
            raise ModelError(f"{name} is no index of weights ({shown(error, 500)})") from None
    raise ModelError(f"it has no weights, neither {', '.join(FILES[:-1])} nor {FILES[-1]}")


def _header(file: str) -> Header:
    try:
        return load_state_dict(file, map_location="meta")
    except Exception as error:
        # Of whatever kind: each format has errors of its own for what is cut off or damaged.
        raise ModelError(
            f"{Path(file).name} cannot be read ({shown(error, 500)}): download it or save it again"
        ) from None


def _mismatch(empty: PreTrainedModel, headers: Iterable[Header]) -> str:
    """Describe how names and shapes differ from those of a model without weights; empty if they do not."""
    if getattr(empty.config, "quantization_config", None) is not None:
        return "its weights are quantised, which cannot be trained: take them in bf16 or fp32"
    try:
        with _silence():
            _, report = type(empty).from_pretrained(
                None,
                config=empty.config,
                state_dict={name: weight for header in headers for name, weight in header.items()},
                device_map={"": "meta"},
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except (RuntimeError, ValueError) as error:  # weights that belong together, such as experts, and are not all there
        return shown(error, 500)
    shapes = [f"{name} {list(found)} instead of {list(own)}" for name, found, own in report["mismatched_keys"]]
    return listed(
        {
            "missing weights": report["missing_keys"],
            "weights that the model does not have": report["unexpected_keys"],
            "weights of another shape": shapes,
        }
    )


@contextmanager
def _silence() -> Iterator[None]:
    """Transformers keeps its bar and its report of a load that loads nothing to itself."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _not_finite(weights: Sequence[tuple[str, str]]) -> Iterator[str]:
    for file in dict.fromkeys(file for file, _ in weights):
        for name, weight in _read(file, [name for of, name in weights if of == file]):
            # The extremes are NaN where any number is; unlike isfinite this reads at the memory's speed.
            if weight.is_floating_point() and weight.numel() and not torch.stack(weight.aminmax()).isfinite().all():
                yield name


def _read(file: str, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    if file.endswith(".safetensors"):
        with safe_open(file, framework="pt") as opened:
            yield from ((name, opened.get_tensor(name)) for name in names)
    else:
        whole = load_state_dict(file)
        yield from ((name, whole[name]) for name in names)


def differing_layer(layer: nn.Module, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> str:
    """Describe how a compiled layer is further from a copy in a finer dtype than a plain copy; "" if it is not.

    Its output is compared, and the gradients of its input, `arguments[0]`, and of what is trained in it. An error may
    be twice the plain one, and a rounding.
    """
    dtype = arguments[0].dtype
    finer = torch.float64 if dtype == torch.float32 else torch.float32
    plain, exact = (copy.deepcopy(layer) for _ in range(2))  # which are not compiled
    layers = {layer: dtype, plain: dtype, exact.to(finer): finer}
    for found, of_plain, right in zip(
        *(_results(one, to, arguments, options) for one, to in layers.items()), strict=True
    ):
        error, usual = ((value.double() - right.double()).norm() for value in (found, of_plain))
        size = right.double().norm()
        if not error <= 2 * usual + torch.finfo(dtype).eps * size:
            what = f"a result of shape {list(right.shape)} is off by {error / size:.1e}"
            return f"{what} of its size, where that of a plain layer is off by {usual / size:.1e}"
    return ""


def _results(
    layer: nn.Module, dtype: torch.dtype, arguments: tuple[Any, ...], options: Mapping[str, Any]
) -> list[Tensor]:
    """Output of a layer, and gradients of its product with the input."""
    calls = (arguments, dict(options))
    (hidden, *others), named = tree_map_only(
        Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, calls
    )
    hidden = hidden.detach().requires_grad_()
    output = layer(hidden, *others, **named)
    output = output[0] if isinstance(output, tuple) else output
    weights = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    return [output.detach(), *torch.autograd.grad(output, [hidden, *weights], hidden.detach())]


def listed(kinds: Mapping[str, Iterable[str]]) -> str:
    """Names by what is wrong with them, the first ones of each kind; empty where there are none."""
    return "; ".join(f"{kind}: {_shortened(sorted(names))}" for kind, names in kinds.items() if names)


def _shortened(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more
