"""Feed-forward block: y = (act(x Wg^T) * (x Wu^T)) Wd^T."""

from __future__ import annotations

from typing import Callable

import torch
import torch.nn.functional as F

from common.torch_support import Way

from .base import EAGER, PRE_ROUND, Request, packed_activation, with_orientation


def eager(request: Request) -> Way:
    """Three GEMMs and two element-wise kernels, as Hugging Face's LlamaMLP."""
    request, gate = with_orientation(request), request.gate()
    data = request.data
    copies = request.rotate(data.x, data.gate, data.up, data.down)

    def call(i: int) -> torch.Tensor:
        x, wg, wu, wd = copies[i]
        return F.linear(gate(F.linear(x, wg)) * F.linear(x, wu), wd)

    return Way(len(copies), call, EAGER)


def eager_packed(request: Request) -> Way:
    """Gate and up weights packed once, two GEMMs."""
    gate = request.gate()
    copies = request.rotate(request.data.x, request.data.gate_up(), request.data.down)

    def call(i: int) -> torch.Tensor:
        x, wgu, wd = copies[i]
        g, u = F.linear(x, wgu).chunk(2, -1)
        return F.linear(gate(g) * u, wd)

    return Way(len(copies), call, EAGER)


def compiled(request: Request) -> Way:
    """torch.compile of eager_packed: two GEMMs and one generated pass, or what its mode finds."""
    gate = request.gate()
    copies = request.rotate(request.data.x, request.data.gate_up(), request.data.down)

    def block(x: torch.Tensor, wgu: torch.Tensor, wd: torch.Tensor) -> torch.Tensor:
        g, u = F.linear(x, wgu).chunk(2, -1)
        return F.linear(gate(g) * u, wd)

    fused = request.compiled(block)
    return Way(len(copies), lambda i: fused(*copies[i]), PRE_ROUND)


def cublas_packed_act(request: Request) -> Way:
    """The library's two GEMMs with one pass between them; nothing is allocated."""
    act, numerics = packed_activation(request)
    case, outs = request.case, request.outputs()
    copies = request.rotate(request.data.x, request.data.gate_up(), request.data.down)
    between, hidden = request.outputs(2 * case.intermediate), request.outputs(case.intermediate)

    def call(i: int) -> torch.Tensor:
        x, wgu, wd = copies[i]
        torch.mm(x, wgu.t(), out=between[i])
        act(between[i], hidden[i])
        return torch.mm(hidden[i], wd.t(), out=outs[i])

    return Way(len(copies), call, numerics)


WAYS: dict[str, Callable[[Request], Way]] = {
    "eager": eager,
    "eager_packed": eager_packed,
    "compile": compiled,
    "cublas_packed_act": cublas_packed_act,
}
