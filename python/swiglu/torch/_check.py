"""What is refused before anything is computed, alike for kernels and for tensors without values."""

from __future__ import annotations

import re
from typing import Optional, Sequence

from torch import Tensor

from .._native import ShapeError, SwigluError


def shape_error(what: str, expected: str, given: str) -> ShapeError:
    error = ShapeError(f"{what}: expected {expected}, given {given}")
    error.kind, error.what, error.expected, error.given = "shape", what, expected, given
    return error


def error(kind: str, what: str, text: str) -> SwigluError:
    made = SwigluError(f"{what}: {text}")
    made.kind, made.what, made.expected, made.given = kind, what, None, None
    return made


def expect_shape(what: str, tensor: Tensor, expected: Sequence[object]) -> None:
    shape = tuple(tensor.shape)
    if len(shape) != len(expected) or any(a != b for a, b in zip(shape, expected)):
        raise shape_error(what, str(list(expected)), str(list(shape)))


def expect_alike(what: str, tensor: Tensor, other: Tensor) -> None:
    """One element type and one device."""
    if tensor.dtype != other.dtype:
        raise error("dtype", what, f"expected {other.dtype} elements, given {tensor.dtype}")
    if tensor.device != other.device:
        raise error("layout", what, f"expected a tensor on {other.device}, given one on {tensor.device}")


def expect_floats(what: str, tensor: Tensor) -> None:
    if not tensor.dtype.is_floating_point:
        raise error("dtype", what, f"expected floating point elements, given {tensor.dtype}")


_LAYOUT = re.compile(r"gate-first|up-first|interleaved|interleaved-[1-9][0-9]*")


def half_of(what: str, tensor: Tensor, dim: int, layout: str) -> int:
    """H, for a tensor with 2H gate and up features along a dimension."""
    if not _LAYOUT.fullmatch(layout):
        choices = "gate-first, up-first, interleaved, interleaved-G"
        raise error("argument", "layout", f"unknown `{layout}`; choose one of: {choices}")
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
        if gate.dtype.is_floating_point and gate.dim() > 0:
            return gate.shape
    expect_floats("gate", gate)
    if gate.dim() == 0:
        raise shape_error("gate", "[..., H]", "a scalar")
    if up is not None:
        expect_alike("up", up, gate)
        expect_shape("up", up, gate.shape)
        return gate.shape
    assert layout is not None
    return (*gate.shape[:-1], half_of("x", gate, -1, layout))


def weights(
    x: Tensor,
    w_gate: Tensor,
    w_up: Optional[Tensor],
    b_gate: Optional[Tensor],
    b_up: Optional[Tensor],
    layout: str,
) -> int:
    """H, where weights and biases fit each other and x."""
    expect_floats("x", x)
    if x.dim() == 0:
        raise shape_error("x", "[..., K]", "a scalar")
    if w_gate.dim() != 2:
        raise shape_error("w_gate", "[features, K]", str(list(w_gate.shape)))
    features, hidden = w_gate.shape
    if x.shape[-1] != hidden:
        raise shape_error("x", f"[..., {hidden}]", str(list(x.shape)))
    for what, tensor in (("w_gate", w_gate), ("w_up", w_up), ("b_gate", b_gate), ("b_up", b_up)):
        if tensor is not None:
            expect_alike(what, tensor, x)
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


def down(x: Tensor, intermediate: int, w_down: Tensor, b_down: Optional[Tensor]) -> int:
    """Features of the block's output."""
    expect_alike("w_down", w_down, x)
    if w_down.dim() != 2 or w_down.shape[1] != intermediate:
        raise shape_error("w_down", f"[features, {intermediate}]", str(list(w_down.shape)))
    if b_down is not None:
        expect_alike("b_down", b_down, x)
        expect_shape("b_down", b_down, (w_down.shape[0],))
    return w_down.shape[0]


def expect_out(out: Tensor, like: Tensor, shape: Sequence[int]) -> None:
    expect_alike("out", out, like)
    expect_shape("out", out, shape)


