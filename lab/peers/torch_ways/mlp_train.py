"""A training step of the feed-forward block: y, and the gradients of x and of the three weights from that of y, by
autograd. Gradients are new tensors in every call, as they are behind `zero_grad(set_to_none=True)`."""

from __future__ import annotations

from typing import Callable, Sequence

import torch
import torch.nn.functional as F

from common.torch_support import Step, Way

from .base import EAGER, Request, with_orientation

Forward = Callable[..., torch.Tensor]
#: From the gradients of a way's weights to those of gate, up and down, [out, in].
Split = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def apart(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return gate, up, down


def halves(gate_up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of gate rows, then up rows."""
    return (*gate_up.chunk(2, 0), down)


def in_turn(gate_up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of gate and up rows in turn."""
    return gate_up[0::2], gate_up[1::2], down


def training(request: Request, forward: Forward, weights: Sequence[torch.Tensor | None], split: Split = apart,
             adds: bool = False) -> Way:
    """Both passes of `forward(x, *weights)`. `adds`: gradients of weights are added to what a tensor's `grad` holds."""
    copies = [tuple(tensor.requires_grad_() for tensor in tensors)
              for tensors in request.rotate(request.data.x, *weights)]
    out_grads = [out_grad for (out_grad, ) in request.rotate(request.data.out_grad)]

    def gradients(i: int, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not adds:
            return torch.autograd.grad(y, copies[i], out_grads[i])
        x, *weights = copies[i]
        x.grad = None
        y.backward(out_grads[i])
        return (x.grad, *(weight.grad for weight in weights))

    def call(i: int) -> Step:
        # Jobs run in inference mode, which keeps nothing for a backward pass.
        with torch.inference_mode(False), torch.enable_grad():
            y = forward(*copies[i])
            dx, *grads = gradients(i, y)
        return Step(y.detach(), dx, *split(*grads))

    def zero() -> None:
        with torch.inference_mode(False):
            for _, *weights in copies:
                for weight in weights:
                    weight.grad = torch.zeros_like(weight)

    def kept() -> int:
        """Bytes of the device's memory that a forward pass leaves taken, without its result."""
        with torch.inference_mode(False), torch.enable_grad():
            before = torch.cuda.memory_allocated()
            y = forward(*copies[0])
            return torch.cuda.memory_allocated() - before - y.numel() * y.itemsize

    if adds:
        zero()
    return Way(len(copies), call, EAGER, reset=zero if adds else None, kept=kept if request.on_cuda else None)


def eager(request: Request) -> Way:
    """Hugging Face's LlamaMLP."""
    request, gate = with_orientation(request), request.gate()
    data = request.data

    def block(x: torch.Tensor, wg: torch.Tensor, wu: torch.Tensor, wd: torch.Tensor) -> torch.Tensor:
        return F.linear(gate(F.linear(x, wg)) * F.linear(x, wu), wd)

    return training(request, block, (data.gate, data.up, data.down))


def compiled(request: Request) -> Way:
    """torch.compile of the same, both passes. A packed weight makes it slower: halves of a result are copied in the
    backward pass."""
    request, gate = with_orientation(request), request.gate()
    data = request.data

    def block(x: torch.Tensor, wg: torch.Tensor, wu: torch.Tensor, wd: torch.Tensor) -> torch.Tensor:
        return F.linear(gate(F.linear(x, wg)) * F.linear(x, wu), wd)

    return training(request, request.compiled(block), (data.gate, data.up, data.down))


WAYS: dict[str, Callable[[Request], Way]] = {
    "eager": eager,
    "compile": compiled,
}
