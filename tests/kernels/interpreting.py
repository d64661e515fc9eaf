"""Corrections of Triton's interpreter. To be imported only if TRITON_INTERPRET is set."""

from types import SimpleNamespace

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def patch_language_once():
    """Otherwise each call of a function inside a kernel patches the language again: two fifths of all time."""
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()  # nothing to restore


def correct_bfloat16_dot():
    """The interpreter multiplies the bits of bf16 numbers as integers: it gets them in fp32, as a GPU adds them up."""
    dot = InterpreterBuilder.create_dot

    def create_dot(self, a, b, *more):
        return dot(self, _widened(a), _widened(b), *more)

    InterpreterBuilder.create_dot = create_dot


def _widened(x):
    if x.dtype.scalar != tl.bfloat16:
        return x
    return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
