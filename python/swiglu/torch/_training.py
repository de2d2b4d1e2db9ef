"""A block that is trained on a CUDA device: gate and up leave the forward kernel, and their gradients the kernel of dy.

Autograd keeps x, the weights, gate and up, 4H bytes a token of 16-bit values besides x. The other products are PyTorch's.
"""

from __future__ import annotations

from typing import Any, List, Optional, Tuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._native import Layer, SwigluError
from . import _check, _kernels
from ._formulas import HALVES
from ._kernels import Parts, _borrow, _described, _place


def _scratch(layer: Layer, tokens: int, like: Tensor) -> Tensor:
    return torch.empty(layer.training_bytes(tokens), dtype=torch.uint8, device=like.device)


def _halves(both: Tensor) -> Tuple[Tensor, Tensor]:
    gate, up = both.chunk(2, -1)
    return gate, up


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: Layer, x: Tensor, *parts: Optional[Tensor]) -> Tensor:
        rows = _kernels._rows_adjacent(x.reshape(-1, x.shape[-1]))
        tokens = rows.shape[0]
        kept = torch.empty((tokens, 2 * layer.intermediate), dtype=x.dtype, device=x.device)
        y = torch.empty((tokens, layer.out_features), dtype=x.dtype, device=x.device)
        with torch.cuda.device(x.device):
            scratch = _scratch(layer, tokens, x)
            gate, up = _halves(kept)
            layer.forward_saving_on(
                _place(x), _described(rows), _described(y), _described(gate), _described(up),
                (scratch.data_ptr(), scratch.numel()),
            )  # fmt: skip
        ctx.save_for_backward(x, kept, *parts)
        ctx.layer = layer
        return y.reshape(*x.shape[:-1], layer.out_features)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        x, kept, w_gate, w_up, w_down, b_gate, b_up, b_down = ctx.saved_tensors
        layer: Layer = ctx.layer
        _, want_x, want_gate, want_up, want_down, want_b_gate, want_b_up, want_b_down = ctx.needs_input_grad
        dy = grad.reshape(-1, grad.shape[-1])
        if dy.stride(-1) != 1 or dy.shape[0] > 1 and dy.stride(0) < dy.shape[1]:
            dy = dy.contiguous()
        rows, tokens = x.reshape(-1, x.shape[-1]), dy.shape[0]
        both = torch.empty_like(kept)
        h = torch.empty((tokens, layer.intermediate), dtype=x.dtype, device=x.device)
        d_gate, d_up = _halves(both)
        with torch.cuda.device(x.device):
            scratch = _scratch(layer, tokens, x)
            gate, up = _halves(kept)
            layer.backward_gate_up_on(
                _place(x), _described(dy), _described(gate), _described(up),
                _described(d_gate), _described(d_up), _described(h), (scratch.data_ptr(), scratch.numel()),
            )  # fmt: skip
        grads: List[Optional[Tensor]] = [None] * 8
        if want_x:
            dx = both @ w_gate if w_up is None else torch.addmm(d_gate @ w_gate, d_up, w_up)
            grads[1] = dx.reshape(x.shape)
        if w_up is None:
            grads[2] = both.t() @ rows if want_gate else None
            grads[5] = both.sum(0) if want_b_gate else None
        else:
            grads[2] = d_gate.t() @ rows if want_gate else None
            grads[3] = d_up.t() @ rows if want_up else None
            grads[5] = d_gate.sum(0) if want_b_gate else None
            grads[6] = d_up.sum(0) if want_b_up else None
        grads[4] = dy.t() @ h if want_down else None
        grads[7] = dy.sum(0) if want_b_down else None
        return tuple(grads)


def block(x: Tensor, parts: Parts, activation: str, layout: str) -> Optional[Tensor]:
    """The block with its gradient, or None where PyTorch's maps compute it."""
    w_gate, w_up, w_down, b_gate, b_up, b_down = parts
    if not x.is_cuda or x.dtype not in HALVES or w_down is None or _kernels._no_kernels(x) is not None:
        return None
    features = _check.weights(x, w_gate, w_up, b_gate, b_up, layout)
    _check.down(x, features, w_down, b_down)
    arranged = _kernels._arranged(parts, layout)
    if isinstance(arranged, str) or w_up is None and layout != "gate-first":
        return None
    try:
        layer = _borrow(x, arranged, activation, None)
        y: Tensor = _Block.apply(layer, x, w_gate, w_up, w_down, b_gate, b_up, b_down)
    except SwigluError as refused:
        if refused.kind != "unsupported":
            raise
        return None
    _kernels.note("mlp", "native cuda", "gate and up leave the forward kernel, their gradients that of the result's")
    return y
