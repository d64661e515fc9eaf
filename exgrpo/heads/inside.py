"""Run a function inside the forward of a head, while ZeRO-3 or FSDP has gathered the head's parameters.

:func:`open_head` prepares a head. Then a caller with hidden states uses :func:`compute`, and a caller that runs the
whole model, which calls its head itself, uses :func:`compute_during`. All other calls of the head are unchanged.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from exgrpo.heads.forwards import Replacement, replace_forward
from exgrpo.heads.inputs import HeadInputs, head_inputs

Function = Callable[[HeadInputs], Any]
"""Replacement of the head's product; returns a tensor or a tuple, which may require gradients."""

_KEY = "_exgrpo_head"


@dataclass(frozen=True, eq=False)
class _OpenHead:
    """State of an open head; an attribute of the head, so that a copy of the head gets its own."""

    forward: Replacement
    handle: RemovableHandle
    """Handle of the hook `_keep_result`; after unpickling it keeps new hooks from getting the same key."""
    hook: int
    """Key of the hook, which torch.compile can read, unlike the handle."""


@dataclass(eq=False)
class _PendingCall:
    """A running `compute_during`: the function for the head and its result."""

    head: nn.Module
    function: Function
    result: Any = None


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.call: _PendingCall | None = None


_under_way = _OfThread()
"""The innermost call of this thread; threads may share a head."""


def open_head(head: nn.Module) -> None:
    """Prepare a head for :func:`compute` and :func:`compute_during`, in place; :func:`close_head` undoes it.

    Args:
        head: a module called with hidden states, ``[..., D]``; before or after an engine has wrapped its model.
    """
    handle = head.register_forward_hook(_keep_result)
    vars(head)[_KEY] = _OpenHead(replace_forward(head, _forward), handle, handle.id)


def close_head(head: nn.Module) -> None:
    """Undo :func:`open_head`."""
    opened: _OpenHead = vars(head).pop(_KEY)
    opened.handle.remove()
    opened.forward.undo(head)


def is_open(head: nn.Module) -> bool:
    """True if :func:`open_head` has prepared the head."""
    return _KEY in vars(head)


def is_outermost(head: nn.Module) -> bool:
    """True if the forward of an open head has not been replaced since :func:`open_head`."""
    opened: _OpenHead = vars(head)[_KEY]
    return opened.forward.is_outermost(head)


def compute(head: nn.Module, hidden: Tensor, function: Function) -> Any:
    """Call an open head with hidden states, running a function instead of its product.

    Args:
        head: an open head.
        hidden: hidden states, ``[..., D]``.
        function: called with :func:`~exgrpo.heads.inputs.head_inputs` of the head and the hidden states.

    Returns:
        The function's result, after the hooks of engines.

    Raises:
        TypeError, RuntimeError, ValueError: as :func:`~exgrpo.heads.inputs.head_inputs`.
    """
    return head(hidden, function=function)


def compute_during(head: nn.Module, function: Function, forward: Callable[[], Any]) -> tuple[Any, Any]:
    """Run a forward of the head's model, in which the head runs a function instead of its product.

    The head returns empty logits, ``[..., 0]``, to the model, so the model's code after the head costs nothing.

    Args:
        head: an open head.
        function: as in :func:`compute`.
        forward: calls the model.

    Returns:
        tuple: the results of ``forward`` and of the function, the latter after the hooks of engines.

    Raises:
        RuntimeError: the model did not call its head.
        TypeError, ValueError: as :func:`~exgrpo.heads.inputs.head_inputs`.
    """
    opened: _OpenHead = vars(head)[_KEY]
    hooks = head._forward_hooks
    if list(hooks)[-1] != opened.hook:  # run last: hooks that an engine added later must see the result first
        hooks.move_to_end(opened.hook)  # type: ignore[attr-defined]
    outer, call = _under_way.call, _PendingCall(head, function)
    _under_way.call = call
    try:
        output = forward()
    finally:
        _under_way.call = outer
    if call.result is None:
        raise RuntimeError("model: its forward did not call its head")
    return output, call.result


def _call_of(head: nn.Module) -> _PendingCall | None:
    call = _under_way.call
    return call if call is not None and call.head is head else None


def _forward(head: nn.Module, hidden: Tensor, *, function: Function | None = None) -> Any:
    if function is None and (call := _call_of(head)) is not None:
        function = call.function
    opened: _OpenHead = vars(head)[_KEY]
    if function is None:
        return opened.forward.own(hidden)
    # With a model on several devices, accelerate's hook wraps the original forward, which does not run here.
    hook = getattr(head, "_hf_hook", None)
    if hook is None:
        return function(head_inputs(head, hidden))
    (hidden,), _ = hook.pre_forward(head, hidden)
    return hook.post_forward(head, function(head_inputs(head, hidden)))


def _keep_result(head: nn.Module, args: tuple[Tensor, ...], output: Any) -> Tensor | None:
    """Forward hook: store the function's result, and return empty logits to the model."""
    call = _call_of(head)
    if call is None:
        return None
    call.result = output
    return args[0].detach()[..., :0]
