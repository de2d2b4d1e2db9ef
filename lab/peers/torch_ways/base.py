"""What a way is built from, and the pieces that several ways have in common."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import FunctionType
from typing import Callable

import torch

from common.problem import Case, Unsupported
from common.protocol import Profile
from common.torch_support import Tensors, gate_function

EAGER = "eager+precise"
PRE_ROUND = "pre_round+precise"


@dataclass(frozen=True)
class Request:
    """A case, the profile's options, one copy of the data, and how many of it to rotate."""

    case: Case
    profile: Profile
    data: Tensors
    copies: int

    @property
    def on_cuda(self) -> bool:
        return self.case.device.startswith("cuda")

    def gate(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return gate_function(self.case.activation)

    def rotate(self, *tensors: torch.Tensor | None) -> list[tuple[torch.Tensor, ...]]:
        """Copies of those tensors; the first is the tensors themselves."""
        for tensor in tensors:
            if tensor is None:
                raise Unsupported(f"operation {self.case.op} lacks a tensor that this way needs")
        present = tuple(t for t in tensors if t is not None)
        return [present] + [tuple(t.clone() for t in present) for _ in range(self.copies - 1)]

    def outputs(self, cols: int | None = None) -> list[torch.Tensor]:
        """One result [m, cols] per copy, whose pages exist."""
        m, n = self.case.out_shape
        like = self.data.x if self.data.x is not None else self.data.gate
        like = like if like is not None else self.data.packed
        if like is None:
            raise Unsupported("a case without data")
        return [torch.zeros(m, cols or n, dtype=like.dtype, device=like.device)
                for _ in range(self.copies)]

    def compiled(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """torch.compile for exactly these shapes."""
        mode = self.profile.option("mode", None)
        return torch.compile(_own_code(function), fullgraph=True, dynamic=False, mode=mode)


def _own_code(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The function with a code object of its own. The compiler keeps what it compiled by code object:
    ways of one case, and cases of one way, would share a list that is searched in every call and has a
    limit; emptying it would have prepared ways compile again while they are timed."""
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__,
                        function.__defaults__, function.__closure__)


def with_orientation(request: Request) -> Request:
    """The weights as the case stores them: transposed views of [in, out] memory, if it says so."""
    if request.case.orientation == "out-in":
        return request
    stored = {name: value.t().contiguous().t()
              for name in ("gate", "up", "down")
              if (value := getattr(request.data, name)) is not None}
    return replace(request, data=replace(request.data, **stored))


def packed_activation(request: Request) -> tuple[Callable[[torch.Tensor, torch.Tensor], object], str]:
    """act(gate | up) of a packed [m, 2 * intermediate] into a result, and where that rounds."""
    kind = str(request.profile.option("act", "triton" if request.on_cuda else "compile"))
    gate, half = request.gate(), request.case.intermediate
    match kind:
        case "triton":
            from triton_ways.kernels import packed_swiglu
            if request.case.activation != "swiglu":
                raise Unsupported(f"activation {request.case.activation} with act = triton")
            return packed_swiglu, PRE_ROUND
        case "compile":
            def fused(packed: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
                return out.copy_(gate(packed[:, :half]) * packed[:, half:])
            return request.compiled(fused), PRE_ROUND
        case "eager":
            def two_passes(packed: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
                return torch.mul(gate(packed[:, :half]), packed[:, half:], out=out)
            return two_passes, EAGER
        case other:
            raise Unsupported(f"act {other}; known are triton, compile, eager")
