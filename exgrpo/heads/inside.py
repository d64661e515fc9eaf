"""Running a function inside the forward of a head, where ZeRO-3 and FSDP have gathered the head's parameters.

:func:`open_head` prepares a head. After that a caller that has hidden states calls :func:`compute`; a caller that runs
a whole model, which calls its head by itself, uses :func:`compute_during`. All other calls of the head are as before.
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
"""What runs instead of the head's product. Tensors in its result, a tensor or a tuple, may need gradients."""

_KEY = "_exgrpo_head"


@dataclass(frozen=True, eq=False)
class _OpenHead:
    """Kept on the head, so that a copy of the head has its own."""

    forward: Replacement
    handle: RemovableHandle
    """Of `_keep_result` among the head's forward hooks; where it is loaded, new hooks get other keys."""
    hook: int
    """Its key, which torch.compile can read."""


@dataclass(eq=False)
class _PendingCall:
    """A `compute_during` under way: what the head runs, and what came of it."""

    head: nn.Module
    function: Function
    result: Any = None


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.call: _PendingCall | None = None


_under_way = _OfThread()
"""The innermost call of this thread. Threads may share a head."""


def open_head(head: nn.Module) -> None:
    """Prepares a head for :func:`compute` and :func:`compute_during`. In place; :func:`close_head` undoes it.

    Args:
        head: a module that is called with hidden states, ``[..., D]``; before or after an engine has wrapped its model.
    """
    handle = head.register_forward_hook(_keep_result)
    vars(head)[_KEY] = _OpenHead(replace_forward(head, _forward), handle, handle.id)


def close_head(head: nn.Module) -> None:
    """Undoes :func:`open_head`."""
    opened: _OpenHead = vars(head).pop(_KEY)
    opened.handle.remove()
    opened.forward.undo(head)


def is_open(head: nn.Module) -> bool:
    """Whether :func:`open_head` has prepared the head."""
    return _KEY in vars(head)


def is_outermost(head: nn.Module) -> bool:
    """Whether nothing has replaced the forward of an open head since :func:`open_head`."""
    opened: _OpenHead = vars(head)[_KEY]
    return opened.forward.is_outermost(head)


def compute(head: nn.Module, hidden: Tensor, function: Function) -> Any:
    """Calls an open head with hidden states, and runs a function instead of its product.

    Args:
        head: an open head.
        hidden: hidden states, ``[..., D]``.
        function: gets what :func:`~exgrpo.heads.inputs.head_inputs` makes of the head and the hidden states.

    Returns:
        What the function returns, as the hooks of engines have left it.

    Raises:
        TypeError, RuntimeError, ValueError: those of :func:`~exgrpo.heads.inputs.head_inputs`.
    """
    return head(hidden, function=function)


def compute_during(head: nn.Module, function: Function, forward: Callable[[], Any]) -> tuple[Any, Any]:
    """Runs a forward of the head's model, in which the head runs a function instead of its product.

    The model gets logits without any column from its head, ``[..., 0]``, so what it does with them costs nothing.

    Args:
        head: an open head.
        function: as in :func:`compute`.
        forward: calls the model.

    Returns:
        tuple: what ``forward`` returns, and what the function has returned, as the hooks of engines have left it.

    Raises:
        RuntimeError: the model did not call its head.
        TypeError, ValueError: those of :func:`~exgrpo.heads.inputs.head_inputs`.
    """
    opened: _OpenHead = vars(head)[_KEY]
    hooks = head._forward_hooks
    if list(hooks)[-1] != opened.hook:  # the hooks of an engine that came later have to see the result first
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
    # Accelerate's, of a model on several devices, is around the forward that does not run.
    hook = getattr(head, "_hf_hook", None)
    if hook is None:
        return function(head_inputs(head, hidden))
    (hidden,), _ = hook.pre_forward(head, hidden)
    return hook.post_forward(head, function(head_inputs(head, hidden)))


def _keep_result(head: nn.Module, args: tuple[Tensor, ...], output: Any) -> Tensor | None:
    """Forward hook: takes the result of the function away, and hands on logits without any column."""
    call = _call_of(head)
    if call is None:
        return None
    call.result = output
    return args[0].detach()[..., :0]
