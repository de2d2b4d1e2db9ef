"""Element-wise: h = act(gate) * up on [m, intermediate]."""

from __future__ import annotations

from typing import Callable

import torch

from common.problem import Unsupported
from common.torch_support import Way

from .base import EAGER, PRE_ROUND, Request

Pair = tuple[torch.Tensor, torch.Tensor]


def halves(packed: torch.Tensor) -> Pair:
    """Gate and up as views of [m, 2 * intermediate]."""
    half = packed.shape[1] // 2
    return packed[:, :half], packed[:, half:]


def _pairs(request: Request) -> list[Pair]:
    """Gate and up per copy: two tensors, or two views of one."""
    if request.case.packed_inputs:
        return [halves(packed) for (packed,) in request.rotate(request.data.packed)]
    return [(g, u) for g, u in request.rotate(request.data.gate, request.data.up)]


def eager(request: Request) -> Way:
    """Two kernels, the gate's value in memory between them; every result is allocated."""
    pairs, gate = _pairs(request), request.gate()
    return Way(len(pairs), lambda i: gate(pairs[i][0]) * pairs[i][1], EAGER)


def eager_composed(request: Request) -> Way:
    """x * sigmoid(x) * y: what people write without silu. Three kernels."""
    if request.case.activation != "swiglu":
        raise Unsupported("eager_composed is x * sigmoid(x) * y: swiglu alone")
    pairs = _pairs(request)

    def call(i: int) -> torch.Tensor:
        x, y = pairs[i]
        return x * torch.sigmoid(x) * y

    # sigma(x) and x * sigma(x) are both rounded: one rounding more than the eager mode bounds.
    return Way(len(pairs), call, EAGER, ["rounds after the sigmoid too"])


def eager_into(request: Request) -> Way:
    """As eager, into results that exist: no page faults on the CPU."""
    if request.case.activation != "swiglu":
        raise Unsupported("eager_into has silu alone")
    pairs, outs = _pairs(request), request.outputs()

    def call(i: int) -> torch.Tensor:
        (gate, up), out = pairs[i], outs[i]
        torch.ops.aten.silu.out(gate, out=out)
        return torch.mul(out, up, out=out)

    return Way(len(pairs), call, EAGER)


def compiled(request: Request) -> Way:
    """torch.compile of the eager form; it allocates its result."""
    pairs, gate = _pairs(request), request.gate()
    fused: Callable[..., torch.Tensor] = request.compiled(lambda g, u: gate(g) * u)
    return Way(len(pairs), lambda i: fused(*pairs[i]), PRE_ROUND)


def compiled_into(request: Request) -> Way:
    """torch.compile into results that exist."""
    pairs, outs, gate = _pairs(request), request.outputs(), request.gate()
    fused = request.compiled(lambda g, u, out: out.copy_(gate(g) * u))
    return Way(len(pairs), lambda i: fused(*pairs[i], outs[i]), PRE_ROUND)


WAYS: dict[str, Callable[[Request], Way]] = {
    "eager": eager,
    "eager_composed": eager_composed,
    "eager_into": eager_into,
    "compile": compiled,
    "compile_into": compiled_into,
}
