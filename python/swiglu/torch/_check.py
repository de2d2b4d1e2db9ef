"""What is refused before anything is computed, alike for kernels and for tensors without values."""

from __future__ import annotations

from typing import Any, NoReturn, Optional, Sequence

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from .._arrays import is_numpy
from .._errors import error, expect_layout, said, shape_error, wrong

#: What the operators compute with; float64 by PyTorch's operations.
COMPUTED = frozenset((torch.float32, torch.float16, torch.bfloat16, torch.float64))


_NONE = type(None)
_KINDS = (Tensor, nn.Parameter, _NONE)


def expect_tensors(names: Sequence[str], tensors: Sequence[Any], needed: int) -> None:
    """The first so many have to be there."""
    # What is right is found right at once.
    for i, t in enumerate(tensors):
        kind = type(t)
        if kind not in _KINDS or kind is _NONE and i < needed:
            break
    else:
        return
    for i, t in enumerate(tensors):
        if not isinstance(t, Tensor) and (t is not None or i < needed):
            advice = "torch.from_numpy makes one; swiglu.silu_mul and swiglu.glu take arrays of numpy too"
            raise wrong(names[i], "a torch.Tensor", said(t), advice if is_numpy(t) else None)


def expect_name(what: str, name: Any) -> None:
    """A name or None; which names there are is known where they are used."""
    if name is not None and not isinstance(name, str):
        raise wrong(what, "a name", said(name))


def hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def changed(children: Any, name: str) -> Optional[str]:
    """Why a linear map has to be called, and its weights not read instead; None of a plain one."""
    linear: Any = children.get(name)
    if type(linear) is not nn.Linear:
        return f"{name} is no longer a plain torch.nn.Linear"
    if hooked(linear):
        return f"{name} has hooks"
    return f"{name} has a forward of its own" if "forward" in linear.__dict__ else None


def expect_module(what: str, module: Any) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise wrong(what, "a torch.nn.Module", said(module))
    return module


def expect_shape(what: str, tensor: Tensor, expected: Sequence[object]) -> None:
    shape = tuple(tensor.shape)
    if len(shape) != len(expected) or any(a != b for a, b in zip(shape, expected)):
        raise shape_error(what, str(list(expected)), str(list(shape)))


def expect_alike(what: str, tensor: Tensor, other: Tensor, cast: bool = False) -> None:
    """One element type, unless it will be ``cast``, one device and dense memory."""
    expect_dense(what, tensor)
    if tensor.dtype != other.dtype and not cast:
        advice = f"convert one: .to({other.dtype}) or .to({tensor.dtype})"
        raise wrong(what, f"{other.dtype} elements", str(tensor.dtype), advice, "dtype")
    if tensor.device != other.device:
        raise wrong(what, f"a tensor on {other.device}", f"one on {tensor.device}", "move one", "layout")


def row_scale(factors: Any, x: Tensor) -> None:
    """A factor for each row of x: floating point values of any type."""
    expect_tensors(("row_scale",), (factors,), 1)
    expect_computed("row_scale", factors)
    expect_dense("x", x)
    if x.dim() == 0:
        # The block says so.
        return
    expect_shape("row_scale", factors, tuple(x.shape[:-1]))
    if factors.device != x.device:
        raise wrong("row_scale", f"a tensor on {x.device}", f"one on {factors.device}", "move one", "layout")


def expect_dense(what: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_nested:
        given = "a nested one" if tensor.is_nested else str(tensor.layout)
        advice = "torch.nested.to_padded_tensor or unbind makes dense ones" if tensor.is_nested else "to_dense() makes one"
        raise wrong(what, "a dense tensor", given, advice, "layout")


def expect_written(out: Tensor) -> None:
    """Refuses memory whose values are read with another sign. Under a trace it is another tensor's question."""
    if not torch.compiler.is_compiling() and out.is_neg():
        raise wrong("out", "memory that can be written", "a view that negates it", "out.resolve_neg() copies", "layout")


def expect_computed(what: str, tensor: Tensor) -> None:
    expect_dense(what, tensor)
    if tensor.dtype not in COMPUTED:
        expected = "floating point elements: float32, float16, bfloat16 or float64"
        raise wrong(what, expected, str(tensor.dtype), "convert it, for example .to(torch.bfloat16)", "dtype")


def no_forward_mode() -> NoReturn:
    text = "kernels have none; take the reverse mode (backward, torch.func.grad, vjp, jacrev), or PyTorch's operations"
    raise error("unsupported", "forward-mode derivative (jvp)", text)


def expect_no_tangent(*tensors: Any) -> None:
    """Refuses a derivative of forward mode, which results would silently lose."""
    if forward_ad._current_level >= 0:
        if any(isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
            no_forward_mode()


def expect_layout_of(up: Optional[Tensor], layout: Any) -> None:
    """Refuses the layout of one tensor with gate and up where they are two."""
    if expect_layout(layout) != "gate-first" and up is not None:
        advice = "a layout is that of both in one: give this and no other, or leave layout away"
        raise wrong("layout", "gate-first where gate and up are two tensors", layout, advice)


def half_of(what: str, tensor: Tensor, dim: int, layout: str) -> int:
    """H, for a tensor with 2H gate and up features along a dimension."""
    expect_layout(layout)
    both = tensor.shape[dim]
    if both % 2 != 0:
        raise shape_error(what, "an even number of features", str(list(tensor.shape)))
    if layout.startswith("interleaved-"):
        group = int(layout[len("interleaved-") :])
        if (both // 2) % group != 0:
            raise shape_error(what, f"a multiple of {2 * group} features ({layout})", str(list(tensor.shape)))
    return int(both // 2) if isinstance(both, int) else both // 2


def activation_inputs(gate: Tensor, up: Optional[Tensor], layout: Optional[str]) -> Sequence[int]:
    """The shape of the result."""
    # What is right is found right in one comparison each.
    if up is not None and up.shape == gate.shape and up.dtype == gate.dtype and up.device == gate.device:
        if gate.dtype in COMPUTED and gate.dim() > 0 and gate.layout == up.layout == torch.strided:
            return gate.shape
    first = "x" if up is None else "gate"
    expect_computed(first, gate)
    if gate.dim() == 0:
        raise shape_error(first, "[..., H]", "a scalar")
    if up is not None:
        expect_alike("up", up, gate)
        expect_shape("up", up, gate.shape)
        return gate.shape
    return (*gate.shape[:-1], half_of("x", gate, -1, expect_layout(layout)))


def _alike(x: Tensor, *weights: Tensor) -> bool:
    """Dense tensors of one type that is computed, on one device."""
    dtype, device = x.dtype, x.device
    for t in (x, *weights):
        if t.dtype != dtype or t.device != device or t.layout is not torch.strided or t.is_nested:
            return False
    return dtype in COMPUTED


def layer(
    x: Tensor, parts: Sequence[Optional[Tensor]], layout: str, cast: bool = False, alike: bool = False
) -> int:
    """Output features of a gated linear layer, or of a block, whose tensors fit each other and x. They may be known to be alike."""
    w_gate, w_up, w_down, b_gate, b_up, b_down = parts
    assert w_gate is not None
    if layout != "gate-first":
        expect_layout_of(w_up, layout)
    # What is right is found right in few comparisons.
    if w_up is not None and w_down is not None and b_gate is b_up is b_down is None:
        if x.dim() > 0 and w_down.dim() == 2 and (alike or _alike(x, w_gate, w_up, w_down)):
            shape = w_gate.shape
            if len(shape) == 2 and w_up.shape == shape and x.shape[-1] == shape[1] and w_down.shape[1] == shape[0]:
                return w_down.shape[0]
    intermediate = _weights(x, w_gate, w_up, b_gate, b_up, layout, cast)
    if w_down is None:
        return intermediate
    expect_alike("w_down", w_down, x, cast)
    if w_down.dim() != 2 or w_down.shape[1] != intermediate:
        raise shape_error("w_down", f"[features, {intermediate}]", str(list(w_down.shape)))
    if b_down is not None:
        expect_alike("b_down", b_down, x, cast)
        expect_shape("b_down", b_down, (w_down.shape[0],))
    return w_down.shape[0]


def _weights(
    x: Tensor,
    w_gate: Tensor,
    w_up: Optional[Tensor],
    b_gate: Optional[Tensor],
    b_up: Optional[Tensor],
    layout: str,
    cast: bool,
) -> int:
    """H, where weights and biases fit each other and x."""
    expect_computed("x", x)
    if x.dim() == 0:
        raise shape_error("x", "[..., K]", "a scalar")
    expect_computed("w_gate", w_gate)
    if w_gate.dim() != 2:
        raise shape_error("w_gate", "[features, K]", str(list(w_gate.shape)))
    features, hidden = w_gate.shape
    if x.shape[-1] != hidden:
        raise shape_error("x", f"[..., {hidden}]", str(list(x.shape)))
    for what, tensor in (("x", x), ("w_up", w_up), ("b_gate", b_gate), ("b_up", b_up)):
        if tensor is not None:
            expect_alike(what, tensor, w_gate, cast)
    if w_up is not None:
        expect_shape("w_up", w_up, w_gate.shape)
        intermediate = features
    else:
        intermediate = half_of("w_gate", w_gate, 0, layout)
        if b_up is not None:
            raise error("argument", "b_up", "packed weights have one bias of all features: b_gate")
    for what, bias in (("b_gate", b_gate), ("b_up", b_up)):
        if bias is not None:
            expect_shape(what, bias, (features,))
    return intermediate


def expect_out(out: Tensor, like: Tensor, shape: Sequence[int]) -> None:
    expect_alike("out", out, like)
    expect_shape("out", out, shape)
