"""Gated linear layer: h = act(x Wg^T) * (x Wu^T)."""

from __future__ import annotations

from typing import Callable

import torch
import torch.nn.functional as F

from common.torch_support import Way

from .allocation import Scratch, fresh_scratch
from .base import EAGER, PRE_ROUND, Request, packed_activation, with_orientation


def eager(request: Request) -> Way:
    """Two GEMMs and two element-wise kernels, as a model's code says it."""
    request, gate = with_orientation(request), request.gate()
    data = request.data
    copies = request.rotate(data.x, data.gate, data.up)

    def call(i: int) -> torch.Tensor:
        x, wg, wu = copies[i]
        return gate(F.linear(x, wg)) * F.linear(x, wu)

    return Way(len(copies), call, EAGER)


def eager_packed(request: Request) -> Way:
    """One GEMM on packed weights, then silu and product on views of its result."""
    gate = request.gate()
    copies = request.rotate(request.data.x, request.data.gate_up())

    def call(i: int) -> torch.Tensor:
        g, u = F.linear(*copies[i]).chunk(2, -1)
        return gate(g) * u

    return Way(len(copies), call, EAGER)


def compiled(request: Request) -> Way:
    """torch.compile of the eager form."""
    request, gate = with_orientation(request), request.gate()
    data = request.data
    copies = request.rotate(data.x, data.gate, data.up)
    fused = request.compiled(lambda x, wg, wu: gate(F.linear(x, wg)) * F.linear(x, wu))
    return Way(len(copies), lambda i: fused(*copies[i]), PRE_ROUND)


def cublas_packed_act(request: Request) -> Way:
    """The library's GEMM on weights packed once, and one pass over its result; nothing is allocated."""
    act, numerics = packed_activation(request)
    return _packed(request, act, numerics, Scratch(request), repack=False)


def alloc_each_call(request: Request) -> Way:
    """As cublas_packed_act, with memory for gate and up taken and given back within each call, past
    torch's cache: what a library pays that allocates its workspace synchronously."""
    act, numerics = packed_activation(request)
    return _packed(request, act, numerics, fresh_scratch(request), repack=False)


def pack_each_call(request: Request) -> Way:
    """As cublas_packed_act, with gate and up weights joined within each call: what a module pays that
    keeps two weights and fuses them on the fly."""
    act, numerics = packed_activation(request)
    return _packed(request, act, numerics, Scratch(request), repack=True)


def alloc_and_pack_each_call(request: Request) -> Way:
    """Both of them."""
    act, numerics = packed_activation(request)
    return _packed(request, act, numerics, fresh_scratch(request), repack=True)


def _packed(request: Request, act: Callable[..., object], numerics: str, scratch: Scratch,
            repack: bool) -> Way:
    data, outs = request.data, request.outputs()
    weights = (data.gate, data.up) if repack else (data.gate_up(), )
    copies = request.rotate(data.x, *weights)
    shape = (request.case.m, 2 * request.case.intermediate)

    def call(i: int) -> torch.Tensor:
        x, *w = copies[i]
        packed = torch.cat(w, 0) if repack else w[0]
        with scratch.take(i, shape) as between:
            torch.mm(x, packed.t(), out=between)
            act(between, outs[i])
        return outs[i]

    return Way(len(copies), call, numerics, scratch.notes)


def gemm_only(request: Request) -> Way:
    """The packed GEMM alone: what an unfused layer cannot go below. Not the layer's result."""
    copies = request.rotate(request.data.x, request.data.gate_up())
    between = request.outputs(2 * request.case.intermediate)
    return Way(len(copies), lambda i: torch.mm(copies[i][0], copies[i][1].t(), out=between[i]), None)


def two_gemms(request: Request) -> Way:
    """Both GEMMs alone. Not the layer's result."""
    request = with_orientation(request)
    data = request.data
    copies = request.rotate(data.x, data.gate, data.up)
    gates, ups = request.outputs(), request.outputs()

    def call(i: int) -> torch.Tensor:
        x, wg, wu = copies[i]
        torch.mm(x, wg.t(), out=gates[i])
        return torch.mm(x, wu.t(), out=ups[i])

    return Way(len(copies), call, None)


WAYS: dict[str, Callable[[Request], Way]] = {
    "eager": eager,
    "eager_packed": eager_packed,
    "compile": compiled,
    "cublas_packed_act": cublas_packed_act,
    "alloc_each_call": alloc_each_call,
    "pack_each_call": pack_each_call,
    "alloc_and_pack_each_call": alloc_and_pack_each_call,
    "gemm_only": gemm_only,
    "two_gemms": two_gemms,
}
