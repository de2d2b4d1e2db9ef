"""The activation without PyTorch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Optional, Union

from . import _native
from ._arrays import described, is_numpy, is_torch, plain
from ._native import Activation


@lru_cache(maxsize=256)
def activation_named(name: str) -> Activation:
    return Activation(name)


def as_activation(activation: Union[str, Activation]) -> Activation:
    return activation_named(activation) if isinstance(activation, str) else activation


def silu_mul(
    gate: Any,
    up: Any,
    *,
    activation: Union[str, Activation] = "swiglu",
    numerics: Optional[str] = None,
    out: Any = None,
) -> Any:
    """``act(gate) * up``, element by element, with one rounding.

    ``gate`` and ``up`` are ``[..., H]`` arrays of one type: float32, float16 or bfloat16. numpy gives numpy; other arrays of
    the host are taken by DLPack and give an :class:`Array` for ``from_dlpack``; tensors go to :mod:`swiglu.torch`.
    """
    if is_torch(gate):
        from .torch import silu_mul as of_tensors

        return of_tensors(gate, up, activation=activation, numerics=numerics, out=out)
    return _compute(gate, up, activation, numerics, None, out)


def glu(
    x: Any,
    activation: Union[str, Activation] = "swiglu",
    *,
    layout: str = "gate-first",
    numerics: Optional[str] = None,
    out: Any = None,
) -> Any:
    """``act(gate) * up`` for both in one ``[..., 2H]`` array.

    ``layout`` is ``gate-first``, ``up-first``, ``interleaved`` or ``interleaved-G``: G features of one, G of the other.
    """
    if is_torch(x):
        from .torch import glu as of_tensors

        return of_tensors(x, activation, layout=layout, numerics=numerics, out=out)
    return _compute(x, None, activation, numerics, layout, out)


def _compute(
    gate: Any,
    up: Any,
    activation: Union[str, Activation],
    numerics: Optional[str],
    layout: Optional[str],
    out: Any,
) -> Any:
    act = as_activation(activation)
    gate, up = plain(gate), plain(up)
    if out is None and is_numpy(gate):
        import numpy

        # What fits no shape is refused by the call, which names both.
        packed = up is None and gate.ndim > 0
        shape = (*gate.shape[:-1], gate.shape[-1] // 2) if packed else gate.shape
        out = numpy.empty(shape, gate.dtype)
    second = None if up is None else described(up)
    made = _native.activation(act, numerics, layout, described(gate), second, None if out is None else described(out))
    return made if out is None else out
