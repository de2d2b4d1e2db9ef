"""The ways, and the peer that offers them."""

from __future__ import annotations

from typing import Callable, Mapping

import torch
import torch.nn.functional as F

from common import torch_server
from common.problem import Unsupported
from common.torch_support import Way, swiglu_only
from torch_ways.base import PRE_ROUND, Request, packed_activation

from . import kernels
from .data import GROUP, Block, Quantized, Source, nibbles_in_order

#: As Triton's kernels round: once, from float32.
FUSED = "fused+precise"
ROUNDED = "decoded weights are rounded to the case's dtype"


def _matrices(request: Request) -> tuple[Quantized, Quantized, Quantized]:
    block: Block = request.data
    if block.gate is None or block.up is None or block.down is None:
        raise Unsupported("a case without weights")
    return block.gate, block.up, block.down


def _parts(request: Request) -> list[torch.Tensor]:
    """Values and scales of gate, of up and of down."""
    return [part for q in _matrices(request) for part in (q.values, q.scales)]


def _copies(request: Request, *parts: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """x and the parts of weights, for each copy."""
    return request.rotate(request.data.x, *parts)


def _packed_block(request: Request, gate_up: tuple[torch.Tensor, ...], down: tuple[torch.Tensor, ...],
                  product: Callable[..., torch.Tensor], notes: list[str]) -> Way:
    """Gate and up in one product, one pass, the down product."""
    act, numerics = packed_activation(request)
    hidden, split = request.outputs(request.case.intermediate), 1 + len(gate_up)
    copies = _copies(request, *gate_up, *down)

    def call(i: int) -> torch.Tensor:
        x, *weights = copies[i]
        act(product(x, *weights[:split - 1]), hidden[i])
        return product(hidden[i], *weights[split - 1:])

    return Way(len(copies), call, numerics, notes)


def decoded(request: Request) -> Way:
    """Decoded once: the library's two GEMMs and one pass, and as many bytes as elements have."""
    gate, up, down = _matrices(request)
    dtype = request.data.x.dtype

    def dense(q: Quantized) -> torch.Tensor:
        return _dense(q.values, q.scales, torch.float32).to(dtype)

    weights = (torch.cat([dense(gate), dense(up)]), ), (dense(down), )
    return _packed_block(request, *weights, lambda x, w: torch.mm(x, w.t()), [ROUNDED])


def int4pack(request: Request) -> Way:
    """PyTorch's product of bfloat16 and packed 4-bit weights, scales rounded to bfloat16, gate and up in one."""
    matrices = _matrices(request)
    if not matrices[0].nibbles or request.case.dtype != "bf16" or not request.on_cuda:
        raise Unsupported("PyTorch's packed 4-bit weights are Q4_0 with bf16 on a GPU")
    gate, up, down = matrices

    def packed(*parts: Quantized) -> tuple[torch.Tensor, torch.Tensor]:
        nibbles = torch.cat([nibbles_in_order(q.values) for q in parts]).to(torch.uint8)
        pairs = (nibbles[:, ::2] << 4 | nibbles[:, 1::2]).contiguous()
        scales = torch.cat([q.scales for q in parts]).to(torch.bfloat16).t().contiguous()
        both = torch.stack([scales, torch.zeros_like(scales)], -1).contiguous()
        return torch.ops.aten._convert_weight_to_int4pack(pairs, 8), both

    product = lambda x, w, scales: torch.ops.aten._weight_int4pack_mm(x, w, GROUP, scales)
    return _packed_block(request, packed(gate, up), packed(down), product, ["scales are rounded to bf16"])


def _dense(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A decoded matrix, in operations that a compiler can fuse."""
    integers = Quantized(values, scales).integers().view(values.shape[0], -1, GROUP)
    return (integers.to(dtype) * scales.to(dtype).unsqueeze(-1)).view(values.shape[0], -1)


def compiled(request: Request) -> Way:
    """torch.compile of decoding and products: with one token loops that never store a weight."""
    act = request.gate()

    def block(x: torch.Tensor, gq: torch.Tensor, gs: torch.Tensor, uq: torch.Tensor, us: torch.Tensor,
              dq: torch.Tensor, ds: torch.Tensor) -> torch.Tensor:
        h = act(F.linear(x, _dense(gq, gs, x.dtype))) * F.linear(x, _dense(uq, us, x.dtype))
        return F.linear(h, _dense(dq, ds, x.dtype))

    copies = _copies(request, *_parts(request))
    fused = request.compiled(block)
    return Way(len(copies), lambda i: fused(*copies[i]), PRE_ROUND, [ROUNDED])


def triton(request: Request) -> Way:
    """A kernel for gate, up and the activation, and one for the down product."""
    swiglu_only(request.case)
    if request.case.m > kernels.MOST_TOKENS:
        raise Unsupported(f"{request.case.m} tokens; these kernels are for up to {kernels.MOST_TOKENS}")
    outs, hidden = request.outputs(), request.outputs(request.case.intermediate)
    copies = _copies(request, *_parts(request))

    def call(i: int) -> torch.Tensor:
        x, gq, gs, uq, us, dq, ds = copies[i]
        kernels.gated(x, Quantized(gq, gs), Quantized(uq, us), hidden[i])
        return kernels.plain(hidden[i], Quantized(dq, ds), outs[i])

    return Way(len(copies), call, FUSED, [ROUNDED])


WAYS: dict[str, Callable[[Request], Way]] = {
    "mlp:decoded": decoded,
    "mlp:int4pack": int4pack,
    "mlp:compile": compiled,
    "mlp:triton": triton,
}


class WeightOnlyPeer(torch_server.TorchPeer):
    """As the torch peer, with blocks of quantised weights as data."""

    quantized = True

    def __init__(self, versions: Mapping[str, str]) -> None:
        super().__init__("weight-only", WAYS, frozenset({"act", "mode"}), versions)
        self._source = Source()
