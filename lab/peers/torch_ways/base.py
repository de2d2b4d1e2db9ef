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


#: Modes in which the compiler captures graphs itself. They keep memory of the calls they have seen, which
#: would outlive a preparation; and a graph is what the option `graph` is for.
OWN_GRAPHS = ("reduce-overhead", "max-autotune")

Function = Callable[..., torch.Tensor]


class Compiled:
    """What was compiled for the case prepared last. A case is prepared several times, because where data
    lie decides something; code is the same each time, and compiling and tuning it takes longer than all
    that is timed. So compiled code stays from one preparation of a case to the next. Data, results and
    captured graphs do not: compiled functions take all tensors as arguments, which is checked."""

    def __init__(self) -> None:
        self._case: Case | None = None
        self._kept: dict[tuple[object, ...], Function] = {}

    def of(self, case: Case) -> Compiled:
        if self._case != case:
            self._case, self._kept = case, {}
        return self

    def function(self, function: Function, mode: str | None, threads: int | None) -> Function:
        """torch.compile for exactly the shapes of its calls. `threads` are those that it is called with:
        code for a CPU depends on their number."""
        values = tuple(cell.cell_contents for cell in function.__closure__ or ())
        if not all(value is None or callable(value) or isinstance(value, (int, str)) for value in values):
            raise TypeError(f"{function.__qualname__} closes over {values}: data must be arguments")
        key = (function.__module__, function.__qualname__, function.__code__, values, mode, threads)
        if key not in self._kept:
            self._kept[key] = torch.compile(_own_code(function), fullgraph=True, dynamic=False, mode=mode)
        return self._kept[key]


@dataclass(frozen=True)
class Request:
    """A case, the profile's options, the data, how many copies of it to rotate, and what earlier
    preparations of the case have compiled."""

    case: Case
    profile: Profile
    data: Tensors
    copies: int
    kept: Compiled

    @property
    def on_cuda(self) -> bool:
        return self.case.device.startswith("cuda")

    def gate(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return gate_function(self.case.activation)

    def rotate(self, *tensors: torch.Tensor | None) -> list[tuple[torch.Tensor, ...]]:
        """Copies of those tensors, in memory of this preparation."""
        for tensor in tensors:
            if tensor is None:
                raise Unsupported(f"operation {self.case.op} lacks a tensor that this way needs")
        present = tuple(t for t in tensors if t is not None)
        return [tuple(t.clone() for t in present) for _ in range(self.copies)]

    def outputs(self, cols: int | None = None) -> list[torch.Tensor]:
        """One result [m, cols] per copy, whose pages exist."""
        m, n = self.case.out_shape
        like = self.data.x if self.data.x is not None else self.data.gate
        like = like if like is not None else self.data.packed
        if like is None:
            raise Unsupported("a case without data")
        return [torch.zeros(m, cols or n, dtype=like.dtype, device=like.device)
                for _ in range(self.copies)]

    def compiled(self, function: Function) -> Function:
        """torch.compile for exactly these shapes, or what an earlier preparation has of it."""
        mode = self.profile.option("mode", None)
        if self.on_cuda and mode in OWN_GRAPHS:
            raise Unsupported(f"mode {mode} captures graphs of its own; give max-autotune-no-cudagraphs "
                              "and graph = true")
        return self.kept.function(function, mode, self.profile.option("threads", None))


def _own_code(function: Function) -> Function:
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
