"""oneDNN as torch's compiler calls it when weights are frozen: reordered once, silu and the product as
post-operations of the two matrix products."""

from __future__ import annotations

from typing import Callable

import torch

from common.problem import Unsupported
from common.torch_support import Way

from .base import EAGER, Request

_OPS = torch.ops.mkldnn


def _check(request: Request) -> None:
    if request.on_cuda or not torch.backends.mkldnn.is_available():
        raise Unsupported("oneDNN's post-operations are of the CPU, in a torch built with oneDNN")
    if request.case.activation != "swiglu":
        raise Unsupported("its swish is silu: swiglu alone")


def _reordered(request: Request, weight: torch.Tensor) -> torch.Tensor:
    """The weight as oneDNN wants it for this number of rows."""
    return _OPS._reorder_linear_weight(weight, request.case.m)


def _hidden(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    # silu of the gate is rounded where it is stored; the up product stays in float32 until then.
    h = _OPS._linear_pointwise(x, gate, None, "swish", [], "")
    return _OPS._linear_pointwise.binary(x, h, up, None, "mul")


def gated_linear(request: Request) -> Way:
    """silu within the first product, the multiplication within the second."""
    _check(request)
    data = request.data
    copies = [(x, _reordered(request, gate), _reordered(request, up))
              for x, gate, up in request.rotate(data.x, data.gate, data.up)]
    return Way(len(copies), lambda i: _hidden(*copies[i]), EAGER)


def mlp(request: Request) -> Way:
    """The same, and the down projection."""
    _check(request)
    data = request.data
    copies = [(x, *(_reordered(request, weight) for weight in weights))
              for x, *weights in request.rotate(data.x, data.gate, data.up, data.down)]

    def call(i: int) -> torch.Tensor:
        x, gate, up, down = copies[i]
        return _OPS._linear_pointwise(_hidden(x, gate, up), down, None, "none", [], "")

    return Way(len(copies), call, EAGER)


#: By operation.
WAYS: dict[str, Callable[[Request], Way]] = {"gated-linear": gated_linear, "mlp": mlp}
