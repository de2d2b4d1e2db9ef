"""Fused SwiGLU and gated linear units for NVIDIA GPUs and CPUs.

Without PyTorch: numpy arrays, and arrays of every library that speaks DLPack.

>>> import numpy as np, swiglu
>>> gate, up = np.ones((2, 4), np.float32), np.full((2, 4), 2, np.float32)
>>> swiglu.silu_mul(gate, up).shape
(2, 4)

With PyTorch: ``swiglu.torch`` (functions and ``torch.ops.swiglu``), ``swiglu.nn`` (modules), and
``swiglu.patch(model)``, which lets the blocks of a model compute with them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, List

from ._activation import glu, silu_mul
from ._layer import Layer, explain, load
from ._native import Activation, Array, ShapeError, SwigluError, __version__
from ._system import info

if TYPE_CHECKING:
    from . import hf as hf, nn as nn, torch as torch
    from ._patch import PatchReport, patch, unpatch
    from .torch import explain_last

__all__ = [
    "Activation",
    "Array",
    "Layer",
    "PatchReport",
    "ShapeError",
    "SwigluError",
    "__version__",
    "explain",
    "explain_last",
    "glu",
    "info",
    "load",
    "patch",
    "silu_mul",
    "unpatch",
]


def __getattr__(name: str) -> Any:
    """What needs PyTorch is imported when it is asked for."""
    if name in {"patch", "unpatch", "PatchReport"}:
        from . import _patch

        return getattr(_patch, name)
    if name == "explain_last":
        from .torch import explain_last

        return explain_last
    if name in {"hf", "nn", "torch"}:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> List[str]:
    return sorted({*globals(), *__all__})
