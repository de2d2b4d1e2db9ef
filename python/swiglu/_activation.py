"""The activation without PyTorch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Optional, Tuple, Union

from . import _native
from ._arrays import described, is_numpy, is_torch, plain
from ._errors import expect_layout
from ._native import Activation


@lru_cache(maxsize=256)
def activation_named(name: str) -> Activation:
    return Activation(name)


def as_activation(activation: Union[str, Activation]) -> Activation:
    return activation if isinstance(activation, Activation) else activation_named(str(activation))


def expect_numerics(numerics: Optional[str]) -> Optional[str]:
    """The name itself, or None for what the element type implies."""
    if numerics is None:
        return None
    _native.expect_numerics(str(numerics))
    return str(numerics)


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
    if is_torch(gate) or is_torch(up):
        from .torch import silu_mul as of_tensors

        return of_tensors(gate, up, activation=activation, numerics=numerics, out=out)
    return _compute(gate, (up,), activation, numerics, None, out)


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
    return _compute(x, (), activation, numerics, expect_layout(layout), out)


def _compute(
    gate: Any,
    up: Tuple[Any, ...],
    activation: Union[str, Activation],
    numerics: Optional[str],
    layout: Optional[str],
    out: Any,
) -> Any:
    act = as_activation(activation)
    gate, up = plain(gate), tuple(map(plain, up))
    first = described("gate" if up else "x", gate)
    second = described("up", up[0]) if up else None
    if out is None and is_numpy(gate):
        import numpy

        # What fits no shape is refused by the call, which names both.
        packed = not up and gate.ndim > 0
        shape = (*gate.shape[:-1], gate.shape[-1] // 2) if packed else gate.shape
        out = numpy.empty(shape, gate.dtype)
    result = None if out is None else described("out", out)
    made = _native.activation(act, expect_numerics(numerics), layout, first, second, result)
    if is_torch(out):
        from .torch._kernels import written

        return written(out)
    return made if out is None else out
