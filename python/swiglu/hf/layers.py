"""Layers for the package ``kernels``: without state, and with nothing but a forward, whose ``self`` is a model's module.

The activations round as PyTorch's own operations do. A block is computed with our kernels where it is what its name says, and
as before where it is not: :func:`swiglu.torch.explain_last` says why.
"""

from torch import Tensor, nn

from .. import torch as ops
from .._errors import error
from .._patch import forward_recognised

__all__ = ["GeGLUMLP", "GeluAndMul", "GeluTanhAndMul", "MulAndSilu", "SiluAndMul", "SwiGLUMLP"]


class SiluAndMul(nn.Module):
    """SwiGLU of a packed tensor, its gate first."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: Tensor) -> Tensor:
        return ops.glu(x, numerics="eager")


class MulAndSilu(nn.Module):
    """SwiGLU of a packed tensor, its gate last."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: Tensor) -> Tensor:
        return ops.glu(x, layout="up-first", numerics="eager")


class GeluAndMul(nn.Module):
    """GeGLU of a packed tensor, its gate first."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: Tensor) -> Tensor:
        return ops.glu(x, "geglu", numerics="eager")


class GeluTanhAndMul(nn.Module):
    """GeGLU by tanh of a packed tensor, its gate first."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: Tensor) -> Tensor:
        return ops.glu(x, "geglu-tanh", numerics="eager")


class SwiGLUMLP(nn.Module):
    """A Llama-like block."""

    has_backward = True

    def forward(self, x: Tensor) -> Tensor:
        return _block(self, x)


class GeGLUMLP(nn.Module):
    """A Gemma-like block."""

    has_backward = True

    def forward(self, x: Tensor) -> Tensor:
        return _block(self, x)


def _block(module: nn.Module, x: Tensor) -> Tensor:
    if isinstance(module, (SwiGLUMLP, GeGLUMLP)):
        text = "it has no weights, its forward is for modules of a model, which kernels gives it to; swiglu.nn.MLP is a block"
        raise error("argument", type(module).__name__, text)
    return forward_recognised(module, x)
