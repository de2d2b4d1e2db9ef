"""A block that is trained on a CUDA device: gate and up leave the forward kernel, and their gradients the kernel of dy.

Autograd keeps x, the weights, gate and up, 4H bytes a token of 16-bit values besides x. The other products are PyTorch's.
"""

from __future__ import annotations

from typing import Any, List, Optional, Tuple

import torch
from torch import Tensor

from .._native import Layer, SwigluError
from . import _kernels, _main_grad
from ._formulas import HALVES
from ._kernels import Parts, _borrow, _described, _place
from ._once import once


def _scratch(size: int, like: Tensor) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=like.device)


def _layer(x: Tensor, arranged: Parts, activation: str) -> "Tuple[Tuple[int, int], Layer]":
    """The place of a call, and the layer over weights where they are now; the device of x is current."""
    return _place(x), _borrow(x, arranged, activation, None)


def _halves(both: Tensor) -> Tuple[Tensor, Tensor]:
    gate, up = both.chunk(2, -1)
    return gate, up


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: str, fused: bool, x: Tensor, *parts: Optional[Tensor]) -> Tensor:
        w_gate, w_up, w_down, b_gate, b_up, b_down = parts
        arranged = _kernels._arranged((w_gate, w_up, w_down, b_gate, b_up, b_down), "gate-first")  # type: ignore[arg-type]
        rows = _kernels._rows_adjacent(x.reshape(-1, x.shape[-1]))
        tokens = rows.shape[0]
        with _kernels._current(x):
            place, layer = _layer(x, arranged, activation)  # type: ignore[arg-type]
            kept = torch.empty((tokens, 2 * layer.intermediate), dtype=x.dtype, device=x.device)
            y = torch.empty((tokens, layer.out_features), dtype=x.dtype, device=x.device)
            scratch = _scratch(layer.training_bytes(tokens), x)
            gate, up = _halves(kept)
            layer.forward_saving_on(
                place, _described(rows), _described(y), _described(gate), _described(up),
                (scratch.data_ptr(), scratch.numel()),
            )  # fmt: skip
        ctx.save_for_backward(x, kept, w_gate, w_up, w_down)
        ctx.activation = activation
        # What is saved may come back as another tensor, without a parameter's attributes.
        ctx.main_grads = (w_gate, w_up, w_down) if fused else None
        return y.reshape(*x.shape[:-1], y.shape[1])

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        # Weights are those that autograd kept: they may lie elsewhere than in the forward pass.
        x, kept, w_gate, w_up, w_down = ctx.saved_tensors
        _, _, want_x, want_gate, want_up, want_down, want_b_gate, want_b_up, want_b_down = ctx.needs_input_grad
        arranged = _kernels._arranged((w_gate, w_up, w_down, None, None, None), "gate-first")
        dy = _main_grad.rows_apart(grad)
        rows, tokens = x.reshape(-1, x.shape[-1]), dy.shape[0]
        both = torch.empty_like(kept)
        d_gate, d_up = _halves(both)
        h = torch.empty((tokens, d_gate.shape[1]), dtype=x.dtype, device=x.device)
        with _kernels._current(x):
            place, layer = _layer(x, arranged, ctx.activation)  # type: ignore[arg-type]
            scratch = _scratch(layer.backward_bytes(tokens), x)
            gate, up = _halves(kept)
            layer.backward_gate_up_on(
                place, _described(dy), _described(gate), _described(up),
                _described(d_gate), _described(d_up), _described(h), (scratch.data_ptr(), scratch.numel()),
            )  # fmt: skip
        def of_weight(i: int, of_results: Tensor, inputs: Tensor) -> Optional[Tensor]:
            if ctx.main_grads is None:
                return of_results.t() @ inputs
            return _main_grad.add(_main_grad.WEIGHTS[i], ctx.main_grads[i], of_results, _main_grad.rows_apart(inputs))

        grads: List[Optional[Tensor]] = [None] * 9
        if want_x:
            dx = both @ w_gate if w_up is None else torch.addmm(d_gate @ w_gate, d_up, w_up)
            grads[2] = dx.reshape(x.shape)
        if w_up is None:
            grads[3] = of_weight(0, both, rows) if want_gate else None
            grads[6] = both.sum(0) if want_b_gate else None
        else:
            grads[3] = of_weight(0, d_gate, rows) if want_gate else None
            grads[4] = of_weight(1, d_up, rows) if want_up else None
            grads[6] = d_gate.sum(0) if want_b_gate else None
            grads[7] = d_up.sum(0) if want_b_up else None
        grads[5] = of_weight(2, dy, h) if want_down else None
        grads[8] = dy.sum(0) if want_b_down else None
        return tuple(grads)


def block(x: Tensor, parts: Parts, activation: str, layout: str, fused: bool) -> Optional[Tensor]:
    """The block with its gradient, of tensors that fit each other, or None where PyTorch's maps compute it. Gradients of weights
    go to their ``main_grad`` where they are ``fused``."""
    w_gate, w_up, w_down, b_gate, b_up, b_down = parts
    if not x.is_cuda or x.dtype not in HALVES or w_down is None or _kernels._no_kernels(x) is not None:
        return None
    if x.dim() == 0 or x.shape[-1] == 0:
        return None
    arranged = _kernels._arranged(parts, layout)
    if isinstance(arranged, str) or w_up is None and layout != "gate-first":
        return None
    try:
        y: Tensor = _Block.apply(activation, fused, x, w_gate, w_up, w_down, b_gate, b_up, b_down)
    except SwigluError as refused:
        if refused.kind != "unsupported":
            raise
        return None
    _kernels.note("mlp", "native cuda", "gate and up leave the forward kernel, their gradients that of the result's")
    return y
