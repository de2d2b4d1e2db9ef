"""What the triton peer offers for each operation."""

from __future__ import annotations

from typing import Callable

import torch

from common.problem import Unsupported
from common.torch_support import Result, Way, swiglu_only
from torch_ways.activation_backward import FUSED, gradients, inputs
from torch_ways.base import PRE_ROUND, Request, with_orientation

from . import kernels


def activation(request: Request) -> Way:
    """One pass over gate and up, separate or packed."""
    swiglu_only(request.case)
    outs = request.outputs()
    if request.case.packed_inputs:
        packed = request.rotate(request.data.packed)
        return Way(len(packed), lambda i: kernels.packed_swiglu(*packed[i], outs[i]), PRE_ROUND)
    pairs = request.rotate(request.data.gate, request.data.up)
    return Way(len(pairs), lambda i: kernels.swiglu(*pairs[i], outs[i]), PRE_ROUND)


def activation_backward(request: Request) -> Way:
    """One pass over the gradient of the result, gate and up, separate or packed."""
    swiglu_only(request.case)
    grads, results = gradients(request)
    if request.case.packed_inputs:
        packed = request.rotate(request.data.out_grad, request.data.packed)
        run = lambda i: kernels.packed_swiglu_backward(*packed[i], results[i])
    else:
        copies = inputs(request)
        run = lambda i: kernels.swiglu_backward(*copies[i], *grads[i])

    def call(i: int) -> Result:
        run(i)
        return results[i]

    return Way(request.copies, call, FUSED)


def _refuse_tensor_cores_of_f32(request: Request) -> None:
    if request.case.dtype == "f32" and not kernels.INTERPRETED:
        raise Unsupported("float32 products without tensor cores are not what a Triton user runs")


def _dual_by(kernel: Callable[..., torch.Tensor], request: Request) -> Way:
    swiglu_only(request.case)
    _refuse_tensor_cores_of_f32(request)
    request = with_orientation(request)
    data, outs = request.data, request.outputs()
    copies = request.rotate(data.x, data.gate, data.up)
    return Way(len(copies), lambda i: kernel(*copies[i], outs[i]), FUSED)


def dual(request: Request) -> Way:
    """Both GEMMs in one kernel, the activation on the accumulators."""
    return _dual_by(kernels.dual_gemm, request)


def dual_mma_sync(request: Request) -> Way:
    """The same with the instructions that every GPU from sm_80 has."""
    return _dual_by(kernels.dual_gemm_mma_sync, request)


def dual_then_down(request: Request) -> Way:
    """The dual GEMM, then the library's GEMM for the down projection."""
    swiglu_only(request.case)
    _refuse_tensor_cores_of_f32(request)
    request = with_orientation(request)
    data, outs = request.data, request.outputs()
    hidden = request.outputs(request.case.intermediate)
    copies = request.rotate(data.x, data.gate, data.up, data.down)

    def call(i: int) -> torch.Tensor:
        x, wg, wu, wd = copies[i]
        kernels.dual_gemm(x, wg, wu, hidden[i])
        return torch.mm(hidden[i], wd.t(), out=outs[i])

    return Way(len(copies), call, FUSED)


def sequential(request: Request) -> Way:
    """The fused kernel that nobody should write; see kernels.sequential_mlp."""
    swiglu_only(request.case)
    _refuse_tensor_cores_of_f32(request)
    data, outs, case = request.data, request.outputs(), request.case
    sums = torch.zeros(case.m, case.hidden, dtype=torch.float32, device=outs[0].device)
    copies = request.rotate(data.x, data.gate, data.up, data.down)
    return Way(len(copies), lambda i: kernels.sequential_mlp(*copies[i], sums, outs[i]), FUSED,
               ["one thread block per 16 tokens"])


WAYS: dict[str, Callable[[Request], Way]] = {
    "activation:fused": activation,
    "activation-backward:fused": activation_backward,
    "gated-linear:dual": dual,
    "gated-linear:dual_mma_sync": dual_mma_sync,
    "mlp:dual": dual_then_down,
    "mlp:sequential": sequential,
}
