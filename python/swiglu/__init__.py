"""Fused SwiGLU and gated linear units for NVIDIA GPUs and CPUs.

Without PyTorch: numpy arrays, and arrays of every library that speaks DLPack.

>>> import numpy as np, swiglu
>>> gate, up = np.ones((2, 4), np.float32), np.full((2, 4), 2, np.float32)
>>> swiglu.silu_mul(gate, up).shape
(2, 4)
"""

from __future__ import annotations

from ._activation import glu, silu_mul
from ._layer import Layer, explain, load
from ._native import Activation, Array, ShapeError, SwigluError, __version__
from ._system import SwigluWarning, info

__all__ = [
    "Activation",
    "Array",
    "Layer",
    "ShapeError",
    "SwigluError",
    "SwigluWarning",
    "__version__",
    "explain",
    "glu",
    "info",
    "load",
    "silu_mul",
]
