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

from .._activation import activation_named, as_activation
from .._errors import expect_choice, said, wrong
from .._native import Activation
from . import _check, _door, _kernels, _ops, _training
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


def _name(activation: Union[str, Activation], numerics: Optional[str]) -> str:
    if numerics is not None:
        _check.expect_name("numerics", numerics)
    return activation if isinstance(activation, str) else str(as_activation(activation))


def silu_mul(
    gate: Tensor,
    up: Tensor,
    *,
    activation: Union[str, Activation] = "swiglu",
    numerics: Optional[str] = None,
    out: Optional[Tensor] = None,
) -> Tensor:
    """``act(gate) * up``, element by element, for two ``[..., H]`` tensors of any strides."""
    if not (isinstance(gate, Tensor) and isinstance(up, Tensor) and (out is None or isinstance(out, Tensor))):
        _check.expect_tensors(("gate", "up", "out"), (gate, up, out), 2)
    name = _name(activation, numerics)
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
    _check.expect_dense("gate", gate)
    _check.expect_dense("up", up)
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
    if not (isinstance(x, Tensor) and (out is None or isinstance(out, Tensor))):
        _check.expect_tensors(("x", "out"), (x, out), 1)
    name = _name(activation, numerics)
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
    _check.expect_dense("x", x)
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
    return expect_choice("save", save, ("preact", "input")) == "preact"


def _with_autograd(out: Optional[Tensor], numerics: Optional[str], wanted: bool) -> bool:
    """Whether linear maps that autograd knows are called."""
    return out is None and numerics is None and (wanted or _door.transformed())


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
    name, keeps = _name(activation, numerics), _saves(save)
    tensors = (x, w_gate, w_up, b_gate, b_up)
    _check.expect_tensors(("x", "w_gate", "w_up", "b_gate", "b_up", "out"), (x, w_gate, w_up, b_gate, b_up, out), 2)
    wanted = _door.wants_gradient(*tensors, out)
    if _with_autograd(out, numerics, keeps and wanted):
        _check.layer(x, (w_gate, w_up, None, b_gate, b_up, None), layout, cast=_door.autocasts())
        return _activated(x, (w_gate, w_up, b_gate, b_up), name, layout, numerics)
    if not wanted and _door.nothing_in_force():
        if _kernels.BY_TABLE and x.is_cuda:
            made = _kernels.layer_at_once("gated_linear", x, (w_gate, w_up, None, b_gate, b_up, None), name, layout, numerics, out)
            if made is not None:
                return made
        if _door.plain(*tensors, out):
            return _ops.BODIES["gated_linear"](*tensors, name, layout, numerics, out=out)
    _check.expect_dense("x", x)
    if out is not None:
        torch.ops.swiglu.gated_linear.out(*tensors, name, layout, numerics, out=out)
        return out
    result: Tensor = torch.ops.swiglu.gated_linear(*tensors, name, layout, numerics)
    return result


#: Those that may be left out come last.
_OF_BLOCKS = ("x", "w_gate", "w_down", "w_up", "b_gate", "b_up", "b_down", "out")


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
    name, keeps = _name(activation, numerics), _saves(save)
    if biases is None:
        biases = None, None, None
    elif not isinstance(biases, (tuple, list)) or len(biases) != 3:
        given = f"{len(biases)} of them" if isinstance(biases, (tuple, list)) else said(biases)
        raise wrong("biases", "those of gate, up and down, each a tensor or None", given)
    b_gate, b_up, b_down = biases
    tensors = (x, w_gate, w_up, w_down, b_gate, b_up, b_down)
    _check.expect_tensors(_OF_BLOCKS, (x, w_gate, w_down, w_up, b_gate, b_up, b_down, out), 3)
    wanted = _door.wants_gradient(*tensors, out)
    if _with_autograd(out, numerics, keeps and wanted):
        _check.layer(x, (w_gate, w_up, w_down, b_gate, b_up, b_down), layout, cast=_door.autocasts())
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
    _check.expect_dense("x", x)
    if out is not None:
        torch.ops.swiglu.mlp.out(*tensors, name, layout, numerics, out=out)
        return out
    result: Tensor = torch.ops.swiglu.mlp(*tensors, name, layout, numerics)
    return result
