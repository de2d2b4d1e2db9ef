"""The activation and its gradient composed of PyTorch's operations: for what there are no kernels.

16-bit types are computed in float32 and rounded once, unless the numerics are ``eager``; other types in themselves.
"""

from __future__ import annotations

from typing import Optional, Tuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .._native import Activation

HALVES = (torch.float16, torch.bfloat16)
_aten = torch.ops.aten


def rounds_each_step(numerics: Optional[str]) -> bool:
    return numerics is not None and numerics.startswith("eager")


def _wide(tensor: Tensor, numerics: Optional[str]) -> Tensor:
    return tensor.float() if tensor.dtype in HALVES and not rounds_each_step(numerics) else tensor


def _function(act: Activation, gate: Tensor) -> Tensor:
    kind = act.gate
    if kind == "silu":
        return F.silu(gate) if act.beta == 1.0 else gate * torch.sigmoid(act.beta * gate)
    if kind == "sigmoid":
        return torch.sigmoid(gate)
    if kind == "relu":
        return torch.relu(gate)
    if kind == "relu2":
        return torch.relu(gate).square()
    if kind == "gelu":
        return F.gelu(gate)
    if kind == "gelu_tanh":
        return F.gelu(gate, approximate="tanh")
    if kind == "identity":
        return gate
    raise NotImplementedError(f"{act}: its gate has no formula of PyTorch's operations")


def _function_backward(act: Activation, grad: Tensor, gate: Tensor) -> Tensor:
    kind = act.gate
    if kind == "silu" and act.beta == 1.0:
        result: Tensor = _aten.silu_backward(grad, gate)
    elif kind == "silu":
        sigma = torch.sigmoid(act.beta * gate)
        result = grad * sigma + act.beta * _aten.sigmoid_backward(grad * gate, sigma)
    elif kind == "sigmoid":
        result = _aten.sigmoid_backward(grad, torch.sigmoid(gate))
    elif kind == "relu":
        result = _aten.threshold_backward(grad, gate, 0)
    elif kind == "relu2":
        result = _aten.threshold_backward(grad * (2 * torch.relu(gate)), gate, 0)
    elif kind in ("gelu", "gelu_tanh"):
        result = _aten.gelu_backward(grad, gate, approximate="tanh" if kind == "gelu_tanh" else "none")
    elif kind == "identity":
        result = grad
    else:
        raise NotImplementedError(f"{act}: its gate has no formula of PyTorch's operations")
    return result


def _clamped(act: Activation, gate: Tensor, up: Tensor) -> Tuple[Tensor, Tensor]:
    if act.limit is None:
        return gate, up + act.up_offset if act.up_offset else up
    if not act.limit_behind:
        gate = gate.clamp(max=act.limit)
    return gate, up.clamp(-act.limit, act.limit) + act.up_offset


def _limited(act: Activation, value: Tensor) -> Tensor:
    return value.clamp(max=act.limit) if act.limit is not None and act.limit_behind else value


def forward(act: Activation, numerics: Optional[str], gate: Tensor, up: Tensor) -> Tensor:
    """act(gate, up)."""
    dtype = gate.dtype
    g, u = _clamped(act, _wide(gate, numerics), _wide(up, numerics))
    return (_limited(act, _function(act, g)) * u).to(dtype)


def backward(
    act: Activation, numerics: Optional[str], grad: Tensor, gate: Tensor, up: Tensor
) -> Tuple[Tensor, Tensor]:
    """The gradients of gate and up. At a clamp they are those of PyTorch: passed on the bound, 0 beyond."""
    dtype = gate.dtype
    grad, gate, up = (_wide(t, numerics) for t in (grad, gate, up))
    g, u = _clamped(act, gate, up)
    value = _function(act, g)
    d_value, d_up = grad * u, grad * _limited(act, value)
    if act.limit is not None:
        bound, over = (value, gate) if act.limit_behind else (gate, gate)
        d_up = d_up.masked_fill(up.abs() > act.limit, 0)
        d_value = d_value.masked_fill(bound > act.limit, 0)
    d_gate = _function_backward(act, d_value, g)
    return d_gate.to(dtype), d_up.to(dtype)


def split(x: Tensor, layout: str) -> Tuple[Tensor, Tensor]:
    """Gate and up of a packed tensor, as views."""
    if layout in ("gate-first", "up-first"):
        first, second = x.chunk(2, -1)
        return (first, second) if layout == "gate-first" else (second, first)
    group = group_of(layout)
    pairs = x.unflatten(-1, (x.shape[-1] // (2 * group), 2, group))
    return pairs.select(-2, 0).flatten(-2), pairs.select(-2, 1).flatten(-2)


def join(gate: Tensor, up: Tensor, layout: str) -> Tensor:
    """The packed tensor of gate and up."""
    if layout in ("gate-first", "up-first"):
        return torch.cat((gate, up) if layout == "gate-first" else (up, gate), -1)
    group = group_of(layout)
    sizes = (gate.shape[-1] // group, group)
    return torch.stack((gate.unflatten(-1, sizes), up.unflatten(-1, sizes)), -2).flatten(-3)


def group_of(layout: str) -> int:
    """G of ``interleaved-G``; 1 of ``interleaved``."""
    return 1 if layout == "interleaved" else int(layout[len("interleaved-") :])
