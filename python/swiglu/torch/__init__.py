"""Gated activations, gated linear layers and feed-forward blocks for PyTorch's tensors.

Importing this module defines ``torch.ops.swiglu``. Tensors of a CPU and of CUDA devices are computed by our kernels,
whatever else by PyTorch's operations; :func:`explain_last` says which, and why. ``activation`` is a name such as
``swiglu``, ``geglu-tanh`` or ``clamped-swiglu(alpha=1.702,offset=1,limit=7)``; ``numerics`` says where 16-bit values are
rounded: ``fused``, ``pre_round`` or ``eager``, of which the last is PyTorch's order.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple, Union

import torch
from torch import Tensor

from .._activation import activation_named
from .._native import Activation
from . import _door, _kernels, _ops, _training
from ._graphs import Bucket, Graphed, graphed, warmup
from ._kernels import Taken, explain_last

__all__ = [
    "Bucket",
    "Graphed",
    "Taken",
    "explain_last",
    "gated_linear",
    "glu",
    "graphed",
    "mlp",
    "silu_mul",
    "warmup",
]


def _name(activation: Union[str, Activation]) -> str:
    return activation if isinstance(activation, str) else str(activation)


def silu_mul(
    gate: Tensor,
    up: Tensor,
    *,
    activation: Union[str, Activation] = "swiglu",
    numerics: Optional[str] = None,
    out: Optional[Tensor] = None,
) -> Tensor:
    """``act(gate) * up``, element by element, for two ``[..., H]`` tensors of any strides."""
    name = _name(activation)
    if _door.nothing_in_force():
        wanted = _door.wants_gradient(gate, up, out)
        if not wanted and _kernels.BY_TABLE and gate.is_cuda:
            made = _kernels.activation_at_once("silu_mul", gate, up, None, activation_named(name), numerics, out)
            if made is not None:
                return made
        if _door.plain(gate, up, out):
            if not wanted:
                return _kernels.activation_into("silu_mul", gate, up, None, name, numerics, out)
            if out is None:
                return _ops.eager(gate, up, None, name, numerics)
    if out is not None:
        torch.ops.swiglu.silu_mul.out(gate, up, name, numerics, out=out)
        return out
    result: Tensor
    if _door.transformed():
        result = _ops.SILU_MUL.call(gate, up, name, numerics)
    else:
        result = torch.ops.swiglu.silu_mul(gate, up, name, numerics)
    return result


def glu(
    x: Tensor,
    activation: Union[str, Activation] = "swiglu",
    *,
    layout: str = "gate-first",
    numerics: Optional[str] = None,
    out: Optional[Tensor] = None,
) -> Tensor:
    """``act(gate) * up`` for both in one ``[..., 2H]`` tensor: ``gate-first``, ``up-first`` or ``interleaved-G``."""
    name = _name(activation)
    if _door.nothing_in_force():
        wanted = _door.wants_gradient(x, out)
        if not wanted and _kernels.BY_TABLE and x.is_cuda:
            made = _kernels.activation_at_once("glu", x, None, layout, activation_named(name), numerics, out)
            if made is not None:
                return made
        if _door.plain(x, out):
            if not wanted:
                return _kernels.activation_into("glu", x, None, layout, name, numerics, out)
            if out is None:
                return _ops.eager(x, None, layout, name, numerics)
    if out is not None:
        torch.ops.swiglu.glu.out(x, name, layout, numerics, out=out)
        return out
    result: Tensor
    if _door.transformed():
        result = _ops.GLU.call(x, name, layout, numerics)
    else:
        result = torch.ops.swiglu.glu(x, name, layout, numerics)
    return result


def _activated(x: Tensor, parts: Any, name: str, layout: str, numerics: Optional[str]) -> Tensor:
    """h, of linear maps that autograd knows: what it saves are x, the weights, gate and up."""
    w_gate, w_up, b_gate, b_up = parts
    gate = torch.nn.functional.linear(x, w_gate, b_gate)
    if w_up is None:
        return glu(gate, name, layout=layout, numerics=numerics)
    return silu_mul(gate, torch.nn.functional.linear(x, w_up, b_up), activation=name, numerics=numerics)


def _saves(save: str) -> bool:
    if save not in ("preact", "input"):
        raise ValueError(f"unknown save `{save}`; choose one of: preact, input")
    return save == "preact"


def gated_linear(
    x: Tensor,
    w_gate: Tensor,
    w_up: Optional[Tensor] = None,
    b_gate: Optional[Tensor] = None,
    b_up: Optional[Tensor] = None,
    *,
    activation: Union[str, Activation] = "swiglu",
    layout: str = "gate-first",
    save: str = "preact",
    numerics: Optional[str] = None,
    out: Optional[Tensor] = None,
) -> Tensor:
    """``act(x·w_gateᵀ + b_gate, x·w_upᵀ + b_up)`` for x ``[..., K]`` and weights ``[H, K]``, as ``torch.nn.Linear`` has them.

    Without ``w_up``, ``w_gate`` has both, ``[2H, K]`` in ``layout``, and ``b_gate`` both biases. For the backward pass
    ``save="preact"`` keeps gate and up, ``"input"`` computes them again from x.
    """
    name, keeps = _name(activation), _saves(save)
    tensors = (x, w_gate, w_up, b_gate, b_up)
    wanted = _door.wants_gradient(*tensors, out)
    if out is None and numerics is None and ((keeps and wanted) or _door.transformed()):
        return _activated(x, (w_gate, w_up, b_gate, b_up), name, layout, numerics)
    if not wanted and _door.nothing_in_force():
        if _kernels.BY_TABLE and x.is_cuda:
            made = _kernels.layer_at_once("gated_linear", x, (w_gate, w_up, None, b_gate, b_up, None), name, layout, numerics, out)
            if made is not None:
                return made
        if _door.plain(*tensors, out):
            return _ops.BODIES["gated_linear"](*tensors, name, layout, numerics, out=out)
    if out is not None:
        torch.ops.swiglu.gated_linear.out(*tensors, name, layout, numerics, out=out)
        return out
    result: Tensor = torch.ops.swiglu.gated_linear(*tensors, name, layout, numerics)
    return result


def mlp(
    x: Tensor,
    w_gate: Tensor,
    w_up: Optional[Tensor],
    w_down: Tensor,
    *,
    biases: Optional[Tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]] = None,
    activation: Union[str, Activation] = "swiglu",
    layout: str = "gate-first",
    save: str = "preact",
    numerics: Optional[str] = None,
    out: Optional[Tensor] = None,
) -> Tensor:
    """The feed-forward block: :func:`gated_linear`, then ``h·w_downᵀ + b_down`` for ``w_down`` ``[K, H]``.

    ``biases`` are those of gate, up and down, each a tensor or None.
    """
    name, keeps = _name(activation), _saves(save)
    b_gate, b_up, b_down = biases or (None, None, None)
    tensors = (x, w_gate, w_up, w_down, b_gate, b_up, b_down)
    wanted = _door.wants_gradient(*tensors, out)
    if out is None and numerics is None and ((keeps and wanted) or _door.transformed()):
        if x.is_cuda and _door.nothing_in_force() and _door.plain(*tensors):
            made = _training.block(x, (w_gate, w_up, w_down, b_gate, b_up, b_down), name, layout)
            if made is not None:
                return made
        h = _activated(x, (w_gate, w_up, b_gate, b_up), name, layout, numerics)
        return torch.nn.functional.linear(h, w_down, b_down)
    if not wanted and _door.nothing_in_force():
        if _kernels.BY_TABLE and x.is_cuda:
            made = _kernels.layer_at_once("mlp", x, (w_gate, w_up, w_down, b_gate, b_up, b_down), name, layout, numerics, out)
            if made is not None:
                return made
        if _door.plain(*tensors, out):
            return _ops.BODIES["mlp"](*tensors, name, layout, numerics, out=out)
    if out is not None:
        torch.ops.swiglu.mlp.out(*tensors, name, layout, numerics, out=out)
        return out
    result: Tensor = torch.ops.swiglu.mlp(*tensors, name, layout, numerics)
    return result
