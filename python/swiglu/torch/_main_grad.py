"""Gradients of weights, added to ``weight.main_grad`` by the product that computes them: Megatron's protocol.

As in Megatron-Core and Transformer Engine: a weight's gradient goes to its ``main_grad``, in place of what that holds where
``overwrite_main_grad`` is true, and for parameters of Megatron's FSDP (``__fsdp_param__``) unless that is false. Where a weight
has the attribute ``grad_added_to_main_grad``, it becomes true and autograd is given a tensor of the weight's shape without
meaning, zeros where ``zero_out_wgrad`` is true, so that hooks are called; a weight without the attribute gets no gradient.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import functional as F

from .. import _native
from .._errors import error, said, shape_error, wrong
from . import _check, _door, _kernels, _ops
from ._kernels import Parts, _current, _described, _place
from ._once import once

WEIGHTS = ("w_gate", "w_up", "w_down")


def _of_fsdp(weight: Tensor) -> bool:
    return hasattr(weight, "__fsdp_param__")


def _expect_place(what: str, weight: Tensor, main: Any, computed: torch.dtype) -> Tensor:
    what = f"{what}.main_grad"
    if not isinstance(main, Tensor):
        advice = "Megatron-Core's DistributedDataParallel makes one; without it leave gradient_accumulation_fusion away"
        raise wrong(what, "a tensor that gradients are added to", said(main), advice)
    if main.shape != weight.shape:
        raise shape_error(what, str(list(weight.shape)), str(list(main.shape)))
    sums = computed if computed == torch.float64 else torch.float32
    if main.dtype not in (sums, computed):
        expected = f"{computed} elements" if sums == computed else f"{sums} or {computed} elements"
        raise wrong(what, expected, str(main.dtype), f"make it of {sums}", "dtype")
    if main.device != weight.device:
        raise wrong(what, f"a tensor on {weight.device}", f"one on {main.device}", "make it where the weight is", "layout")
    _check.expect_dense(what, main)
    if main.requires_grad or not _door.plain(main):
        given = "one that requires a gradient" if main.requires_grad else f"{said(main)} that another wraps"
        raise wrong(what, "a plain tensor without a gradient", given, "detach() gives one", "unsupported")
    rows, columns = main.shape
    if (columns > 1 and main.stride(1) != 1) or (rows > 1 and main.stride(0) < columns):
        given = f"strides {list(main.stride())}"
        raise wrong(what, "rows of adjacent elements that are apart", given, "make it contiguous()", "layout")
    if main.data_ptr() == weight.data_ptr() != 0:
        raise wrong(what, "memory of its own", "that of the weight", "torch.zeros_like() makes some", "layout")
    return main


def expect(x: Tensor, parts: Parts, computed: torch.dtype) -> None:
    """Refuses weights whose gradients could not be added, before anything is computed."""
    for what, weight in zip(WEIGHTS, parts):
        if weight is None or not weight.requires_grad:
            continue
        if not weight.is_leaf:
            advice = "give the parameter itself, or leave gradient_accumulation_fusion away"
            raise wrong(what, "a parameter, which has a main_grad", "a tensor that is computed from others", advice)
        # Those of FSDP get it in the backward pass.
        if not _of_fsdp(weight):
            _expect_place(what, weight, getattr(weight, "main_grad", None), computed)
    if _door.transformed() or not _door.plain(x, *parts):
        text = "with gradient_accumulation_fusion tensors are PyTorch's own, outside of torch.func's transforms; leave it away"
        raise error("unsupported", "main_grad", text)


def expect_plain(grad: Tensor) -> None:
    """Refuses gradients that are no values to add, such as a batch of them."""
    if not _door.plain(grad.resolve_neg()):
        text = "with gradient_accumulation_fusion gradients are PyTorch's own tensors, one at a time; leave it away"
        raise error("unsupported", "main_grad", text)


#: Memory of gradients without meaning, which those of one type and device share.
_dummies: Dict[Tuple[torch.dtype, torch.device], Tensor] = {}


def _dummy(weight: Any) -> Optional[Tensor]:
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    key = weight.dtype, weight.device
    there = _dummies.get(key)
    if there is None or there.numel() < weight.numel():
        there = _dummies[key] = torch.empty(weight.numel(), dtype=weight.dtype, device=weight.device)
    made = there[: weight.numel()].view(weight.shape).detach()
    return made.zero_() if getattr(weight, "zero_out_wgrad", False) else made


def rows_apart(t: Tensor) -> Tensor:
    """As ``[tokens, features]``, in rows that products over tokens read."""
    rows = _ops._rows(t)
    apart = rows.stride(1) == 1 and (rows.shape[0] <= 1 or rows.stride(0) >= rows.shape[1])
    return rows if apart else rows.contiguous()


def _place_of(what: str, weight: Any, computed: torch.dtype) -> Tuple[Tensor, bool]:
    """Where a weight's gradient goes, and whether it replaces what is there."""
    if _of_fsdp(weight):
        weight.main_grad = weight.get_main_grad()
    main = _expect_place(what, weight, getattr(weight, "main_grad", None), computed)
    return main, bool(getattr(weight, "overwrite_main_grad", _of_fsdp(weight)))


def places(
    weights: Sequence[Any], wanted: Sequence[bool], computed: torch.dtype
) -> Tuple[List[Optional[Tensor]], bool]:
    """Where gradients of a block's weights go, and whether they are added to what is there."""
    asked = zip(WEIGHTS, weights, wanted)
    found = [_place_of(what, weight, computed) if want else None for what, weight, want in asked]
    adds = any(place is not None and not place[1] for place in found)
    for place in found:
        if adds and place is not None and place[1]:
            place[0].zero_()
    return [None if place is None else place[0] for place in found], adds


def added(weights: Sequence[Any], mains: Sequence[Optional[Tensor]]) -> List[Optional[Tensor]]:
    """What autograd is given for weights whose gradients were written to these."""
    for main in mains:
        if main is not None:
            increment_version(main)
    return [None if main is None else _dummy(weight) for weight, main in zip(weights, mains)]


def add(what: str, weight: Any, grads: Tensor, inputs: Tensor) -> Optional[Tensor]:
    """Adds gradsᵀ·inputs, of rows, to the weight's ``main_grad``; what autograd is given for it."""
    main, overwrite = _place_of(what, weight, grads.dtype)
    if _kernels._no_kernels(grads) is not None:
        # Products of 16-bit values are exact in float32.
        factors = (t.to(main.dtype) for t in (grads.t(), inputs))
        main.addmm_(*factors, beta=0 if overwrite else 1)
        return _dummy(weight)
    if grads.is_cpu:
        _native.weight_gradient(_described(grads), _described(inputs), _described(main), overwrite)
    else:
        _enqueue(grads, inputs, main, overwrite)
    increment_version(main)
    return _dummy(weight)


def _enqueue(grads: Tensor, inputs: Tensor, into: Tensor, overwrite: bool) -> None:
    with _current(grads):
        place = _place(grads)
        scratch = torch.empty(_native.cuda_weight_gradient_bytes(place[0]), dtype=torch.uint8, device=grads.device)
        described = _described(grads), _described(inputs), _described(into)
        _native.cuda_weight_gradient(place, *described, overwrite, (scratch.data_ptr(), scratch.numel()))


class _Linear(torch.autograd.Function):
    """A linear map whose weight's gradient goes to ``main_grad``."""

    @staticmethod
    def forward(ctx: Any, what: str, x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
        ctx.save_for_backward(x, weight)
        # What is saved may come back as another tensor, without the attributes.
        ctx.what, ctx.weight = what, weight
        return F.linear(x, weight.to(x.dtype), bias)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        x, weight = ctx.saved_tensors
        _, want_x, want_weight, want_bias = ctx.needs_input_grad
        expect_plain(grad)
        rows = rows_apart(grad)
        dx = (rows @ weight.to(grad.dtype)).reshape(x.shape) if want_x else None
        dw = add(ctx.what, ctx.weight, rows, rows_apart(x)) if want_weight else None
        return None, dx, dw, rows.sum(0) if want_bias else None


def linear(what: str, x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
    """As ``torch.nn.functional.linear``, for a parameter with a ``main_grad``."""
    if not weight.requires_grad:
        return F.linear(x, weight, bias)
    if _door.autocasts() and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
    y: Tensor = _Linear.apply(what, x, weight, bias)
    return y
