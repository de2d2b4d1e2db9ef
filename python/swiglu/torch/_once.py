"""Second derivatives, which kernels have none of: refused by an error that says so, wherever a gradient is differentiated."""

from __future__ import annotations

import functools
from typing import Any, Callable, NoReturn, Optional, Tuple

import torch
from torch import Tensor

from .._errors import error


def no_second_derivative() -> NoReturn:
    raise error(
        "unsupported",
        "second derivative",
        "the gradient of the activation has no gradient of its own; compose the block of PyTorch's operations for it",
    )


class _Refused(torch.autograd.Function):
    """The gradients as they are, and in the place of theirs the error."""

    @staticmethod
    def forward(ctx: Any, differentiable: Tensor, *grads: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        return tuple(None if grad is None else grad.detach() for grad in grads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        no_second_derivative()


def once(backward: Callable[..., Tuple[Optional[Tensor], ...]]) -> Callable[..., Tuple[Optional[Tensor], ...]]:
    """A backward pass that is none of PyTorch's operations: what differentiates its results is refused."""

    @functools.wraps(backward)
    def first(ctx: Any, *grads: Tensor) -> Tuple[Optional[Tensor], ...]:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            made = backward(ctx, *grads)
        # PyTorch's own decorator for this says nothing of what to do, and has no type.
        refused: Tuple[Optional[Tensor], ...] = _Refused.apply(torch.empty(0, requires_grad=True), *made)
        return refused

    return first
