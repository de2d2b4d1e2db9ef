"""A block that is trained on a CUDA device: gate and up leave the forward kernel, and their gradients the kernel of dy.

Autograd keeps x, the weights, gate and up, 4H bytes a token of 16-bit values besides x; or neither of these, and they are
computed again, to the same bits. The other products are PyTorch's.
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


def _as_it_is(saved: Any) -> Any:
    """A saved tensor in memory as it reads: what autograd kept may come back as a view that negates."""
    return None if saved is None else saved.resolve_neg()


def _halves(both: Tensor) -> Tuple[Tensor, Tensor]:
    gate, up = both.chunk(2, -1)
    return gate, up


def _both(layer: Layer, rows: Tensor) -> Tensor:
    """Where gate and up go, one beside the other."""
    return torch.empty((rows.shape[0], 2 * layer.intermediate), dtype=rows.dtype, device=rows.device)


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: str, fused: bool, keeps: bool, x: Tensor, *parts: Optional[Tensor]) -> Tensor:
        w_gate, w_up, w_down, b_gate, b_up, b_down = parts
        arranged = _kernels._arranged((w_gate, w_up, w_down, b_gate, b_up, b_down), "gate-first")  # type: ignore[arg-type]
        rows = _kernels._rows_adjacent(x.reshape(-1, x.shape[-1]))
        tokens = rows.shape[0]
        with _kernels._current(x):
            place, layer = _layer(x, arranged, activation)  # type: ignore[arg-type]
            y = torch.empty((tokens, layer.out_features), dtype=x.dtype, device=x.device)
            scratch = _scratch(layer.training_bytes(tokens, keeps), x)
            lent = scratch.data_ptr(), scratch.numel()
            if keeps:
                kept = _both(layer, rows)
                gate, up = _halves(kept)
                layer.forward_saving_on(place, _described(rows), _described(y), _described(gate), _described(up), lent)
                again: Tuple[Optional[Tensor], ...] = (kept,)
            else:
                layer.forward_on(place, _described(rows), _described(y), lent)
                again = b_gate, b_up
        ctx.save_for_backward(x, w_gate, w_up, w_down, *again)
        ctx.activation, ctx.keeps = activation, keeps
        # What is saved may come back as another tensor, without a parameter's attributes.
        ctx.main_grads = (w_gate, w_up, w_down) if fused else None
        return y.reshape(*x.shape[:-1], y.shape[1])

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        # Weights are those that autograd kept: they may lie elsewhere than in the forward pass.
        x, w_gate, w_up, w_down, *again = map(_as_it_is, ctx.saved_tensors)
        _, _, _, want_x, want_gate, want_up, want_down, want_b_gate, want_b_up, want_b_down = ctx.needs_input_grad
        b_gate, b_up = (None, None) if ctx.keeps else again
        arranged = _kernels._arranged((w_gate, w_up, w_down, b_gate, b_up, None), "gate-first")
        dy = _main_grad.rows_apart(grad.resolve_neg())
        rows, tokens = x.reshape(-1, x.shape[-1]), dy.shape[0]
        with _kernels._current(x):
            place, layer = _layer(x, arranged, ctx.activation)  # type: ignore[arg-type]
            if ctx.keeps:
                (kept,) = again
                gate, up = _halves(kept)
            else:
                given = _kernels._rows_adjacent(rows)
                gate, up = _halves(_both(layer, given))
                before = _scratch(layer.training_bytes(tokens, False), x)
                layer.pre_activations_on(
                    place, _described(given), _described(gate), _described(up), (before.data_ptr(), before.numel())
                )
            both = _both(layer, rows)
            d_gate, d_up = _halves(both)
            h = torch.empty((tokens, layer.intermediate), dtype=x.dtype, device=x.device)
            scratch = _scratch(layer.backward_bytes(tokens), x)
            layer.backward_gate_up_on(
                place, _described(dy), _described(gate), _described(up),
                _described(d_gate), _described(d_up), _described(h), (scratch.data_ptr(), scratch.numel()),
            )  # fmt: skip
            del gate, up

        def of_weight(i: int, of_results: Tensor, inputs: Tensor) -> Optional[Tensor]:
            if ctx.main_grads is None:
                return of_results.t() @ inputs
            return _main_grad.add(_main_grad.WEIGHTS[i], ctx.main_grads[i], of_results, _main_grad.rows_apart(inputs))

        grads: List[Optional[Tensor]] = [None] * 10
        if want_x:
            dx = both @ w_gate if w_up is None else torch.addmm(d_gate @ w_gate, d_up, w_up)
            grads[3] = dx.reshape(x.shape)
        if w_up is None:
            grads[4] = of_weight(0, both, rows) if want_gate else None
            grads[7] = both.sum(0) if want_b_gate else None
        else:
            grads[4] = of_weight(0, d_gate, rows) if want_gate else None
            grads[5] = of_weight(1, d_up, rows) if want_up else None
            grads[7] = d_gate.sum(0) if want_b_gate else None
            grads[8] = d_up.sum(0) if want_b_up else None
        grads[6] = of_weight(2, dy, h) if want_down else None
        grads[9] = dy.sum(0) if want_b_down else None
        return tuple(grads)


def block(x: Tensor, parts: Parts, activation: str, layout: str, fused: bool, keeps: bool) -> Optional[Tensor]:
    """The block with its gradient, of tensors that fit each other, or None where PyTorch's maps compute it. Gradients of weights
    go to their ``main_grad`` where they are ``fused``; gate and up are computed again where it does not keep them."""
    w_gate, w_up, w_down, b_gate, b_up, b_down = parts
    if not x.is_cuda or x.dtype not in HALVES or w_down is None or _kernels._no_kernels(x) is not None:
        return None
    if x.dim() == 0 or x.shape[-1] == 0:
        return None
    arranged = _kernels._arranged(parts, layout)
    if isinstance(arranged, str) or w_up is None and layout != "gate-first":
        return None
    try:
        y: Tensor = _Block.apply(activation, fused, keeps, x, w_gate, w_up, w_down, b_gate, b_up, b_down)
    except SwigluError as refused:
        if refused.kind != "unsupported":
            raise
        return None
    kept = "gate and up leave the forward kernel" if keeps else "gate and up are computed again"
    _kernels.note("mlp", "native cuda", f"{kept}, their gradients leave that of the result's")
    return y
