"""A block that is trained: gate and up leave the forward kernel, and their gradients the kernel of dy.

Autograd keeps x, the weights, gate and up, 4H bytes a token of 16-bit values besides x; or neither of these, and they are
computed again, to the same bits. Each pass is one call of the native module, and computing again another. Compiled code has the
kernels as operators of their own, and PyTorch's products.
"""

from __future__ import annotations

import math
from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .. import _native
from .._activation import activation_named
from .._errors import error, shape_error
from .._native import SwigluError
from . import _check, _door, _kernels, _main_grad, _ops
from ._formulas import HALVES
from ._kernels import Parts, _current, _described, _place
from ._once import once


def _given(t: Optional[Tensor]) -> Any:
    """A tensor as the native module takes it."""
    return t if t is None or _kernels.BY_TABLE and type(t) in _door.PLAIN else _described(t)


def _room(like: Tensor) -> Callable[[int], Tensor]:
    """What makes scratch memory, where a call has none of its own."""
    device = like.device
    return lambda size: torch.empty(size, dtype=torch.uint8, device=device)


def _like(t: Tensor) -> Tensor:
    """A new dense tensor of PyTorch's own type."""
    if type(t) in _door.PLAIN and t.is_contiguous():
        return torch.empty_like(t)
    # Whatever the default device is in a backward pass.
    return torch.empty(t.shape, dtype=t.dtype, device=t.device)


def _as_it_is(saved: Any) -> Any:
    """A saved tensor in memory as it reads: what autograd kept may come back as a view that negates."""
    return None if saved is None else saved.resolve_neg()


def _weight(what: str, saved: Any) -> Any:
    """A saved weight in rows: hooks may bring it back in another form."""
    if saved is None:
        return None
    if saved.dim() != 2:
        raise shape_error(f"saved {what}", "two dimensions, as it was saved", str(list(saved.shape)))
    t = _as_it_is(saved)
    return t if t.stride(1) == 1 else t.contiguous()


def _lying(t: Tensor) -> Tensor:
    """As rows that products over tokens read."""
    return t if t.is_contiguous() else _main_grad.rows_apart(t)


def _forward(x: Tensor, arranged: Parts, activation: str, y: Optional[Tensor], keeps: bool) -> Optional[Tensor]:
    """Computes y where it has a place, and gives gate and up of all tokens, one beside the other, where they are kept."""
    kept = None
    if keeps:
        w_gate, w_up = arranged[:2]
        features = w_gate.shape[0] * (1 if w_up is None else 2)
        kept = torch.empty((x.numel() // x.shape[-1], features), dtype=x.dtype, device=x.device)
    if x.is_cpu:
        _kernels.host_block(x, arranged, activation, y, kept)
        return kept
    rows = _kernels._rows_adjacent(x)
    with _current(x):
        _native.block_forward(
            _place(x), activation_named(activation), _given(rows), tuple(map(_given, arranged)), _given(y), _given(kept),
            _room(x),
        )  # fmt: skip
    return kept


def _backward_gate_up(dy: Tensor, arranged: Parts, activation: str, kept: Tensor) -> Tensor:
    """The gradients of gate and up, one beside the other as these are."""
    both = torch.empty(kept.shape, dtype=kept.dtype, device=kept.device)
    with _current(dy):
        _native.block_backward_gate_up(
            _place(dy), activation_named(activation), _given(dy), tuple(map(_given, arranged)), _given(kept), _given(both),
            _room(dy),
        )  # fmt: skip
    return both


def _maps_of(
    x: Tensor, w_gate: Tensor, w_up: Optional[Tensor], b_gate: Optional[Tensor], b_up: Optional[Tensor]
) -> Tensor:
    """Gate and up, one beside the other, by PyTorch's maps."""
    kept = torch.nn.functional.linear(x, w_gate, b_gate)
    return kept if w_up is None else torch.cat((kept, torch.nn.functional.linear(x, w_up, b_up)), -1)


def _of_factors(
    grad: Tensor, w_down: Tensor, b_down: Optional[Tensor], kept: Tensor, activation: str, row_scale: Tensor
) -> Tensor:
    """The gradients of the rows' factors, by operators: the sums of h·dh, and of what goes through the bias."""
    h: Tensor = torch.ops.swiglu.glu(kept, activation, "gate-first", None)
    sums = ((grad @ w_down).reshape(h.shape).float() * h.float()).sum(-1)
    if b_down is not None:
        sums = sums + (grad.float() @ b_down.float()).reshape(sums.shape)
    return sums.to(row_scale.dtype).view(grad.shape[:-1])


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, activation: str, fused: bool, keeps: bool, arranged: Parts, x: Tensor, *parts: Optional[Tensor]
    ) -> Tensor:
        w_gate, w_up, w_down, b_gate, b_up, b_down, row_scale = parts
        y = _like(x)
        kept = _forward(x, arranged, activation, y, keeps)
        if row_scale is not None:
            y.mul_(row_scale.unsqueeze(-1))
        again: Tuple[Optional[Tensor], ...] = (kept,) if keeps else (b_gate, b_up)
        # What the gradient of a row's factor goes through beside h.
        b_down = b_down if ctx.needs_input_grad[11] else None
        ctx.save_for_backward(x, w_gate, w_up, w_down, row_scale, b_down, *again)
        ctx.activation, ctx.keeps = activation, keeps
        # What is saved may come back as another tensor, without a parameter's attributes.
        ctx.main_grads = (w_gate, w_up, w_down) if fused else None
        return y

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        # Weights are those that autograd kept: they may lie elsewhere than in the forward pass.
        x, *rest = ctx.saved_tensors
        x, row_scale, b_down, *again = map(_as_it_is, (x, *rest[3:]))
        w_gate, w_up, w_down = map(_weight, _main_grad.WEIGHTS, rest[:3])
        want_x, want_gate, want_up, want_down, *want_biases, want_scale = ctx.needs_input_grad[4:]
        weights, wanted = (w_gate, w_up, w_down), (want_gate, want_up, want_down)
        if ctx.main_grads is not None:
            _main_grad.expect_plain(grad)
        elif not (_door.nothing_in_force() and _door.plain(grad, x, *weights, row_scale, b_down, *again)):
            # A backward pass may be seen by more than its forward pass was.
            every = ctx.needs_input_grad[4:-1]
            # The forward pass was under no autocast.
            with torch.autocast(x.device.type, enabled=False):
                both = again[0] if ctx.keeps else _maps_of(x, w_gate, w_up, *again)
                d_scale = _of_factors(grad, w_down, b_down, both, ctx.activation, row_scale) if want_scale else None
                dy = grad if row_scale is None else (grad * row_scale.reshape(grad.shape[:-1]).unsqueeze(-1)).to(grad.dtype)
                return None, None, None, None, *_by_operators(dy, x, weights, both, ctx.activation, every), d_scale
        if ctx.keeps:
            (kept,) = again
        else:
            arranged: Any = _kernels._arranged((*weights, *again, None), "gate-first")
            if isinstance(arranged, str):
                raise error("unsupported", "saved weights", f"{arranged}; they came back in other shapes")
            kept = _forward(x, arranged, ctx.activation, None, True)
        dx = _like(x) if want_x else None
        d_weights: List[Optional[Tensor]]
        if ctx.main_grads is None:
            d_weights, adds = [_like(w) if want else None for w, want in zip(weights, wanted)], False
        else:
            d_weights, adds = _main_grad.places(ctx.main_grads, wanted, x.dtype)
        # As sums of all tokens, which are rounded once.
        features = w_gate.shape[0], w_gate.shape[0], w_down.shape[0]
        zeros = torch.zeros if adds else torch.empty
        biases = [
            zeros(n, dtype=torch.float32, device=x.device) if want else None for n, want in zip(features, want_biases)
        ]
        # Copies live until the call is made.
        rows, dy, pre_activations = _lying(x), _lying(grad.resolve_neg()), _lying(kept)
        factors = None if row_scale is None else row_scale.reshape(-1).to(torch.float32).contiguous()
        of_factors = torch.empty_like(factors) if factors is not None and want_scale else None
        given = _kernels.here if x.is_cpu else _given
        act, parts = activation_named(ctx.activation), (*map(given, weights), None, None, given(b_down))
        inputs = act, given(rows), given(dy), parts, given(pre_activations)
        into = (given(dx), *map(given, d_weights)), tuple(map(given, biases)), (given(factors), given(of_factors)), adds
        if x.is_cpu:
            _native.host_block_backward(*inputs, *into)
        else:
            with _current(x):
                _native.block_backward(_place(x), *inputs, not ctx.keeps, *into, _room(x))
        if ctx.main_grads is not None:
            d_weights = _main_grad.added(ctx.main_grads, d_weights)
        d_biases = (None if b is None else b.to(x.dtype) for b in biases)
        d_scale = None if of_factors is None else of_factors.to(row_scale.dtype).view(grad.shape[:-1])
        return (None, None, None, None, dx, *d_weights, *d_biases, d_scale)


def takes(x: Tensor) -> bool:
    """Whether our kernels compute the products of blocks over such tensors."""
    return x.is_cuda and x.dtype in HALVES or _kernels.packs(x)


def block(
    x: Tensor,
    parts: Parts,
    activation: str,
    layout: str,
    fused: bool,
    keeps: bool,
    row_scale: Optional[Tensor] = None,
) -> Optional[Tensor]:
    """The block with its gradient, of tensors that fit each other, or None where PyTorch's maps compute it. Gradients of weights
    go to their ``main_grad`` where they are ``fused``; gate and up are computed again where it does not keep them. Rows of the
    result are multiplied with their factor, where they have one."""
    w_gate, w_up, w_down, _, _, _ = parts
    if not takes(x) or w_down is None or _kernels._no_kernels(x) is not None:
        return None
    if x.dim() == 0 or x.shape[-1] == 0:
        return None
    # On a CPU their gradients are PyTorch's, and one weight in two places has one main_grad, to which maps add in turn.
    tied = fused and (w_gate is w_up or w_down is w_gate or w_down is w_up)
    if x.is_cpu and (tied or activation_named(activation).gate in _kernels.CUT_OFF):
        return None
    arranged = _kernels._arranged(parts, layout)
    if isinstance(arranged, str) or w_up is None and layout != "gate-first":
        return None
    try:
        y: Tensor = _Block.apply(activation, fused, keeps, arranged, x, *parts, row_scale)
    except SwigluError as refused:
        if refused.kind != "unsupported":
            raise
        return None
    kept = "gate and up leave the forward kernel" if keeps else "gate and up are computed again"
    way = "native cuda" if x.is_cuda else "native cpu"
    _kernels.note("mlp", way, f"{kept}, their gradients leave that of the result's")
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
            y = _like(x)
            kept = _forward(x, arranged, activation, y, True)  # type: ignore[arg-type]
            _kernels.note("mlp_saving", "native cuda", "gate and up leave the forward kernel")
            return y, kept.view(*x.shape[:-1], kept.shape[1])  # type: ignore[union-attr]
        except SwigluError as refused:
            if refused.kind != "unsupported":
                raise
            why = str(refused)
    kept = _maps_of(x, w_gate, w_up, b_gate, b_up)
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
            both = _backward_gate_up(_lying(grad), arranged, activation, rows)  # type: ignore[arg-type]
            _kernels.note("mlp_saving_backward", "native cuda", "gradients of gate and up leave that of the result's")
            return both.view(kept.shape)
        except SwigluError as refused:
            if refused.kind != "unsupported":
                raise
            why = str(refused)
    both, _ = _kernels.activation_backward("", grad @ w_down, kept, None, "gate-first", activation, None)
    _kernels.note("mlp_saving_backward", "composed", why)
    return both


def _of_rows(
    x: Tensor, w_gate: Tensor, w_up: Optional[Tensor], both: Tensor, wanted: Sequence[bool]
) -> List[Optional[Tensor]]:
    """The gradients of x, the weights and the biases of gate and up, those that are wanted, from those of gate and up."""
    rows = _ops._rows(x)
    grads: List[Optional[Tensor]] = [None] * 5
    want_x, *of_weights, want_b_gate, want_b_up = wanted
    d_gate, d_up = both.chunk(2, -1)
    if want_x:
        dx = both @ w_gate if w_up is None else torch.addmm(d_gate @ w_gate, d_up, w_up)
        grads[0] = dx.reshape(x.shape)
    parts = (both, None) if w_up is None else (d_gate, d_up)
    for i, (want, part) in enumerate(zip(of_weights, parts)):
        grads[1 + i] = part.t() @ rows if want and part is not None else None
    for i, (want, part) in enumerate(zip((want_b_gate, want_b_up), parts)):
        grads[3 + i] = part.sum(0) if want and part is not None else None
    return grads


def _by_operators(
    grad: Tensor, x: Tensor, weights: Sequence[Optional[Tensor]], kept: Tensor, activation: str, wanted: Sequence[bool]
) -> Tuple[Optional[Tensor], ...]:
    """The gradients of x, the weights and the biases that are wanted, by operators: modes, batches of gradients and compiled
    code know them."""
    w_gate, w_up, w_down = weights
    want_x, want_gate, want_up, want_down, want_b_gate, want_b_up, want_b_down = wanted
    ops = torch.ops.swiglu
    tokens = math.prod(kept.shape[:-1])
    dy, rows = (t.reshape(tokens, t.shape[-1]) for t in (grad, kept))
    d_down = dy.t() @ ops.glu(rows, activation, "gate-first", None) if want_down else None
    inner = want_x, want_gate, want_up, want_b_gate, want_b_up
    grads: List[Optional[Tensor]] = [None] * 5
    if any(inner):
        both = ops.mlp_saving_backward(dy, w_gate, w_up, w_down, rows, activation)
        grads = _of_rows(x, w_gate, w_up, both, inner)  # type: ignore[arg-type]
    dx, d_w_gate, d_w_up, d_b_gate, d_b_up = grads
    return dx, d_w_gate, d_w_up, d_down, d_b_gate, d_b_up, dy.sum(0) if want_b_down else None


def _saving_gradient(ctx: Any, grad: Tensor, _: Any) -> Tuple[Optional[Tensor], ...]:
    x, w_gate, w_up, w_down, _, _, _, _, kept = ctx.saved_tensors
    (activation,), _ = ctx.how
    wanted = ctx.needs_input_grad[:7]
    return *_by_operators(grad, x, (w_gate, w_up, w_down), kept, activation, wanted), None


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
