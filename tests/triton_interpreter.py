"""Mends two things in Triton's interpreter; import it before launching an interpreted kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import triton.language as tl
from triton.runtime import interpreter

_patch_lang_tensor = interpreter._patch_lang_tensor
_create_dot = interpreter.InterpreterBuilder.create_dot


def _patched(tensor: Any, *scope: Any) -> None:
    """NumPy 2.4 makes no int of an array with a dimension; the interpreter's scalars, loop bounds too, have one.

    Triton 3.5 patches for good; later releases within a scope, which takes it back.
    """
    _patch_lang_tensor(tensor, *scope)
    set_attribute = scope[0].set_attr if scope else setattr
    set_attribute(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _as_float(operand: Any) -> Any:
    if operand.dtype.scalar != tl.bfloat16:
        return operand
    values = (operand.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(values, tl.float32)


def _dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
    """The interpreter keeps bfloat16 as the uint16 of its bits and multiplies those."""
    return _create_dot(self, _as_float(a), _as_float(b), d, *options)


interpreter._patch_lang_tensor = _patched
interpreter.InterpreterBuilder.create_dot = _dot
