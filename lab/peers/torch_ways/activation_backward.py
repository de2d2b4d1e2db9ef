"""Backward pass of the element-wise activation: d_gate and d_up from d_out, gate and up, all
[m, intermediate]; gate and up, and so their gradients, are two tensors or the halves of one."""

from __future__ import annotations

from typing import Callable

import torch
import torch.nn.functional as F

from common.torch_support import Result, Way, swiglu_only

from .activation import Pair, halves
from .base import EAGER, Request

#: As the kernel rounds: once, from float32.
FUSED = "fused+precise"


def inputs(request: Request) -> list[tuple[torch.Tensor, ...]]:
    """d_out, gate and up per copy."""
    data = request.data
    if request.case.packed_inputs:
        return [(d_out, *halves(packed)) for d_out, packed in request.rotate(data.out_grad, data.packed)]
    return request.rotate(data.out_grad, data.gate, data.up)


def gradients(request: Request) -> tuple[list[Pair], list[Result]]:
    """Where d_gate and d_up of each copy go, and what a call returns."""
    if request.case.packed_inputs:
        packed = request.outputs()
        return [halves(out) for out in packed], list(packed)
    half = request.case.intermediate
    pairs = list(zip(request.outputs(half), request.outputs(half), strict=True))
    return pairs, list(pairs)


def eager_into(request: Request) -> Way:
    """What autograd runs for silu(gate) * up, into results that exist: three kernels. silu(gate) comes
    from the forward pass, where autograd keeps it; nine tensors move instead of five."""
    swiglu_only(request.case)
    copies, (grads, results) = inputs(request), gradients(request)
    kept = [F.silu(gate) for _, gate, _ in copies]

    def call(i: int) -> Result:
        (d_out, gate, up), (d_gate, d_up) = copies[i], grads[i]
        torch.mul(d_out, up, out=d_gate)
        torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)
        torch.mul(d_out, kept[i], out=d_up)
        return results[i]

    return Way(len(copies), call, EAGER, ["silu(gate) is kept from the forward pass"])


def _formula(d_out: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, d_gate: torch.Tensor,
             d_up: torch.Tensor) -> torch.Tensor:
    d, g, u = d_out.float(), gate.float(), up.float()
    sigmoid = torch.sigmoid(g)
    d_gate.copy_(d * u * sigmoid * (1 + g * (1 - sigmoid)))
    return d_up.copy_(d * g * sigmoid)


def compiled_into(request: Request) -> Way:
    """torch.compile of the formula in float32, into results that exist: one kernel."""
    swiglu_only(request.case)
    copies, (grads, results) = inputs(request), gradients(request)
    fused = request.compiled(_formula)

    def call(i: int) -> Result:
        fused(*copies[i], *grads[i])
        return results[i]

    return Way(len(copies), call, FUSED)


WAYS: dict[str, Callable[[Request], Way]] = {
    "eager_into": eager_into,
    "compile_into": compiled_into,
}
