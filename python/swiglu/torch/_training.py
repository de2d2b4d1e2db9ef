"""A block that is trained on a CUDA device: gate and up leave the forward kernel, and their gradients the kernel of dy.

Autograd keeps x, the weights, gate and up, 4H bytes a token of 16-bit values besides x; or neither of these, and they are
computed again, to the same bits. The other products are PyTorch's, but for gradients of weights that another algorithm was measured to
compute faster (``_main_grad``). Compiled code has the kernels as operators of their own, and PyTorch's products.
"""

from __future__ import annotations

import math
from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .._native import Layer, SwigluError
from . import _check, _door, _kernels, _main_grad, _ops
from ._formulas import HALVES
from ._kernels import Parts, _borrow, _described, _place
from ._once import once

#: A product over tokens, of the weight of this number.
OfWeight = Callable[[int, Tensor, Tensor], Optional[Tensor]]


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


def _forward(x: Tensor, arranged: Parts, activation: str, keeps: bool) -> Tuple[Tensor, Optional[Tensor]]:
    """y, and gate and up of all tokens where they are kept."""
    rows = _kernels._rows_adjacent(_ops._rows(x))
    tokens = rows.shape[0]
    kept = None
    with _kernels._current(x):
        place, layer = _layer(x, arranged, activation)
        y = torch.empty((tokens, layer.out_features), dtype=x.dtype, device=x.device)
        scratch = _scratch(layer.training_bytes(tokens, keeps), x)
        lent = scratch.data_ptr(), scratch.numel()
        if keeps:
            kept = _both(layer, rows)
            gate, up = _halves(kept)
            layer.forward_saving_on(place, _described(rows), _described(y), _described(gate), _described(up), lent)
        else:
            layer.forward_on(place, _described(rows), _described(y), lent)
    return y.reshape(*x.shape[:-1], y.shape[1]), kept


def _again(x: Tensor, arranged: Parts, activation: str) -> Tensor:
    """Gate and up of all tokens, computed again."""
    rows = _kernels._rows_adjacent(_ops._rows(x))
    with _kernels._current(x):
        place, layer = _layer(x, arranged, activation)
        kept = _both(layer, rows)
        gate, up = _halves(kept)
        scratch = _scratch(layer.training_bytes(rows.shape[0], False), x)
        lent = scratch.data_ptr(), scratch.numel()
        layer.pre_activations_on(place, _described(rows), _described(gate), _described(up), lent)
    return kept


def _backward(
    dy: Tensor, arranged: Parts, activation: str, kept: Tensor, wants_h: bool
) -> Tuple[Tensor, Optional[Tensor]]:
    """The gradients of gate and up, one beside the other as these are, and h where it is wanted."""
    tokens = dy.shape[0]
    with _kernels._current(dy):
        place, layer = _layer(dy, arranged, activation)
        both = torch.empty(kept.shape, dtype=kept.dtype, device=kept.device)
        h = None
        if wants_h:
            h = torch.empty((tokens, layer.intermediate), dtype=dy.dtype, device=dy.device)
        scratch = _scratch(layer.backward_bytes(tokens), dy)
        (gate, up), (d_gate, d_up) = _halves(kept), _halves(both)
        layer.backward_gate_up_on(
            place, _described(dy), _described(gate), _described(up), _described(d_gate), _described(d_up),
            _kernels._described_if(h), (scratch.data_ptr(), scratch.numel()),
        )  # fmt: skip
    return both, h


def _of_rows(
    x: Tensor, w_gate: Tensor, w_up: Optional[Tensor], both: Tensor, wanted: Sequence[bool], of_weight: OfWeight
) -> List[Optional[Tensor]]:
    """The gradients of x, the weights and the biases of gate and up, those that are wanted, from those of gate and up."""
    rows = _ops._rows(x)
    grads: List[Optional[Tensor]] = [None] * 5
    want_x, *of_weights, want_b_gate, want_b_up = wanted
    d_gate, d_up = _halves(both)
    if want_x:
        dx = both @ w_gate if w_up is None else torch.addmm(d_gate @ w_gate, d_up, w_up)
        grads[0] = dx.reshape(x.shape)
    parts = (both, None) if w_up is None else (d_gate, d_up)
    for i, (want, part) in enumerate(zip(of_weights, parts)):
        grads[1 + i] = of_weight(i, part, rows) if want and part is not None else None
    for i, (want, part) in enumerate(zip((want_b_gate, want_b_up), parts)):
        grads[3 + i] = part.sum(0) if want and part is not None else None
    return grads


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: str, fused: bool, keeps: bool, x: Tensor, *parts: Optional[Tensor]) -> Tensor:
        w_gate, w_up, w_down, b_gate, b_up, b_down = parts
        arranged = _kernels._arranged((w_gate, w_up, w_down, b_gate, b_up, b_down), "gate-first")  # type: ignore[arg-type]
        y, kept = _forward(x, arranged, activation, keeps)  # type: ignore[arg-type]
        again: Tuple[Optional[Tensor], ...] = (kept,) if keeps else (b_gate, b_up)
        ctx.save_for_backward(x, w_gate, w_up, w_down, *again)
        ctx.activation, ctx.keeps = activation, keeps
        # What is saved may come back as another tensor, without a parameter's attributes.
        ctx.main_grads = (w_gate, w_up, w_down) if fused else None
        return y

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        # Weights are those that autograd kept: they may lie elsewhere than in the forward pass.
        x, w_gate, w_up, w_down, *again = map(_as_it_is, ctx.saved_tensors)
        _, _, _, want_x, want_gate, want_up, want_down, want_b_gate, want_b_up, want_b_down = ctx.needs_input_grad
        b_gate, b_up = (None, None) if ctx.keeps else again
        arranged: Any = _kernels._arranged((w_gate, w_up, w_down, b_gate, b_up, None), "gate-first")
        dy = _main_grad.rows_apart(grad.resolve_neg())
        kept = again[0] if ctx.keeps else _again(x, arranged, ctx.activation)
        both, h = _backward(dy, arranged, ctx.activation, kept, want_down)
        del kept, again

        def of_weight(i: int, of_results: Tensor, inputs: Tensor) -> Optional[Tensor]:
            if ctx.main_grads is None:
                return _main_grad.of_tokens(of_results, inputs)
            return _main_grad.add(_main_grad.WEIGHTS[i], ctx.main_grads[i], of_results, _main_grad.rows_apart(inputs))

        wanted = want_x, want_gate, want_up, want_b_gate, want_b_up
        dx, d_w_gate, d_w_up, d_b_gate, d_b_up = _of_rows(x, w_gate, w_up, both, wanted, of_weight)
        d_down = None if h is None else of_weight(2, dy, h)
        d_b_down = dy.sum(0) if want_b_down else None
        return None, None, None, dx, d_w_gate, d_w_up, d_down, d_b_gate, d_b_up, d_b_down


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


# The operators that compiled code calls. Of the gradients' products it sees each, and lets go of gate and up between: so h,
# which the product with dy alone needs, is computed before, and is gone when gradients of gate and up are there.


def _composed_because(x: Tensor, arranged: "Parts | str") -> Optional[str]:
    if not x.is_cuda or x.dtype not in HALVES:
        return "kernels for training are of 16-bit values on a CUDA device"
    if isinstance(arranged, str):
        return arranged
    return _kernels._no_kernels(x)


def _saving(
    x: Tensor,
    w_gate: Tensor,
    w_up: Optional[Tensor],
    w_down: Tensor,
    b_gate: Optional[Tensor],
    b_up: Optional[Tensor],
    b_down: Optional[Tensor],
    activation: str,
) -> Tuple[Tensor, Tensor]:
    parts: Parts = (w_gate, w_up, w_down, b_gate, b_up, b_down)
    _check.layer(x, parts, "gate-first")
    arranged = _kernels._arranged(parts, "gate-first")
    why = _composed_because(x, arranged)
    if why is None:
        try:
            y, kept = _forward(x, arranged, activation, True)  # type: ignore[arg-type]
            _kernels.note("mlp_saving", "native cuda", "gate and up leave the forward kernel")
            return y, kept.view(*x.shape[:-1], kept.shape[1])  # type: ignore[union-attr]
        except SwigluError as refused:
            if refused.kind != "unsupported":
                raise
            why = str(refused)
    kept = torch.nn.functional.linear(x, w_gate, b_gate)
    if w_up is not None:
        kept = torch.cat((kept, torch.nn.functional.linear(x, w_up, b_up)), -1)
    h = _kernels.activation_into("", kept, None, "gate-first", activation, None, None)
    _kernels.note("mlp_saving", "composed", why)
    return torch.nn.functional.linear(h, w_down, b_down), kept


def _fake_saving(
    x: Tensor, w_gate: Tensor, w_up: Optional[Tensor], w_down: Tensor, *rest: Any
) -> Tuple[Tensor, Tensor]:
    features = _check.layer(x, (w_gate, w_up, w_down, *rest[:3]), "gate-first")
    both = w_gate.shape[0] * (1 if w_up is None else 2)
    return x.new_empty((*x.shape[:-1], features)), x.new_empty((*x.shape[:-1], both))


def _saving_backward(
    grad: Tensor, w_gate: Tensor, w_up: Optional[Tensor], w_down: Tensor, kept: Tensor, activation: str
) -> Tensor:
    _expect_grad(grad, kept, w_down)
    arranged = _kernels._arranged((w_gate, w_up, w_down, None, None, None), "gate-first")
    why = _composed_because(grad, arranged)
    if why is None:
        rows = _main_grad.rows_apart(kept)
        try:
            both, _ = _backward(_main_grad.rows_apart(grad), arranged, activation, rows, False)  # type: ignore[arg-type]
            _kernels.note("mlp_saving_backward", "native cuda", "gradients of gate and up leave that of the result's")
            return both.view(kept.shape)
        except SwigluError as refused:
            if refused.kind != "unsupported":
                raise
            why = str(refused)
    both, _ = _kernels.activation_backward("", grad @ w_down, kept, None, "gate-first", activation, None)
    _kernels.note("mlp_saving_backward", "composed", why)
    return both


def _saving_gradient(ctx: Any, grad: Tensor, _: Any) -> Tuple[Optional[Tensor], ...]:
    x, w_gate, w_up, w_down, _, _, _, _, kept = ctx.saved_tensors
    (activation,), _ = ctx.how
    want_x, want_gate, want_up, want_down, want_b_gate, want_b_up, want_b_down, *_ = ctx.needs_input_grad
    ops = torch.ops.swiglu
    tokens = math.prod(kept.shape[:-1])
    dy, rows = (t.reshape(tokens, t.shape[-1]) for t in (grad, kept))
    d_down = dy.t() @ ops.glu(rows, activation, "gate-first", None) if want_down else None
    wanted = want_x, want_gate, want_up, want_b_gate, want_b_up
    grads: List[Optional[Tensor]] = [None] * 5
    if any(wanted):
        both = ops.mlp_saving_backward(dy, w_gate, w_up, w_down, rows, activation)
        grads = _of_rows(x, w_gate, w_up, both, wanted, lambda _, of_results, inputs: of_results.t() @ inputs)
    dx, d_w_gate, d_w_up, d_b_gate, d_b_up = grads
    return dx, d_w_gate, d_w_up, d_down, d_b_gate, d_b_up, dy.sum(0) if want_b_down else None, None


def _expect_grad(grad: Tensor, kept: Tensor, w_down: Tensor) -> None:
    _check.expect_alike("grad", grad, kept)
    _check.expect_shape("grad", grad, (*kept.shape[:-1], w_down.shape[0]))
    _check.expect_shape("kept", kept, (*kept.shape[:-1], 2 * w_down.shape[1]))


def _fake_saving_backward(
    grad: Tensor, w_gate: Tensor, w_up: Optional[Tensor], w_down: Tensor, kept: Tensor, activation: str
) -> Tensor:
    _expect_grad(grad, kept, w_down)
    return kept.new_empty(kept.shape)


def _vmap_backward(info: Any, in_dims: Tuple[Optional[int], ...], *args: Any) -> Any:
    """The gradient of the result and what was kept are rows; weights with a batch of their own are taken one by one."""
    grad, w_gate, w_up, w_down, kept, activation = args
    of_grad, *of_weights, of_kept, _ = in_dims
    if any(dim is not None for dim in of_weights):
        return _ops.vmap_layer("mlp_saving_backward")(info, in_dims, *args)
    grad, kept = (_ops.front(t, dim, info.batch_size) for t, dim in ((grad, of_grad), (kept, of_kept)))
    return torch.ops.swiglu.mlp_saving_backward(grad, w_gate, w_up, w_down, kept, activation), 0


_HOW = "str activation"
_ops.define(
    "mlp_saving", f"{_ops.BLOCK}, {_HOW}", "(Tensor, Tensor)", _saving, _fake_saving, _saving_gradient, keeps=True
)
_ops.autocast("mlp_saving", "default")
_GRADS = f"Tensor grad, Tensor w_gate, Tensor? w_up, Tensor w_down, Tensor kept, {_HOW}"
_ops.define(
    "mlp_saving_backward", _GRADS, "Tensor", _saving_backward, _fake_saving_backward, _ops.no_second_gradient
)
torch.library.register_vmap("swiglu::mlp_saving", _ops.vmap_layer("mlp_saving"), lib=_ops.LIBRARY)
torch.library.register_vmap("swiglu::mlp_saving_backward", _vmap_backward, lib=_ops.LIBRARY)


def in_graph(x: Tensor, parts: Parts, activation: str, layout: str) -> Optional[Tensor]:
    """The block in code that is compiled, of tensors that fit each other, or None where PyTorch's maps compute it: they take
    sub-classes that know linear maps alone, and lie open to the compiler."""
    w_gate, w_up, w_down, b_gate, b_up, b_down = parts
    casts = torch.is_autocast_enabled("cuda") and x.dtype != torch.float64
    dtype = torch.get_autocast_dtype("cuda") if casts else x.dtype
    if not x.is_cuda or dtype not in HALVES or w_down is None or torch.version.hip is not None:
        return None
    if not all(t is None or type(t) in _door.PLAIN for t in (x, *parts)):
        return None
    if x.dim() == 0 or x.shape[-1] == 0 or w_gate.shape[0] == 0 or w_up is None and layout != "gate-first":
        return None
    if isinstance(_kernels._arranged(parts, layout), str):
        return None
    y: Tensor = torch.ops.swiglu.mlp_saving(x, w_gate, w_up, w_down, b_gate, b_up, b_down, activation)[0]
    return y
