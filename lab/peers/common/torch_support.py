"""What the peers that run on PyTorch share: the seeded inputs as tensors, copies of them, and jobs that
are timed by the wall clock (CPU) or by events (CUDA). Importing it needs torch."""

from __future__ import annotations

import gc
import platform
from dataclasses import dataclass, field
from typing import Callable, NamedTuple, Sequence

import torch
import torch.nn.functional as F

from . import inputs
from .problem import Case, Unsupported
from .protocol import Profile, Unavailable
from .timing import MAX_PER_TURN, sample_wall

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}

#: A timed batch is long compared with the resolution of events and the start of a turn.
BATCH_US = 2_000.0
#: A graph has at least this many calls, so that starting it is a small part of each.
GRAPH_CALLS = 8

#: Threads of a call on the CPU whose profile does not say how many.
THREADS = torch.get_num_threads()

#: Elements derived at a time: temporaries are eight bytes each.
CHUNKS = {"cpu": 1 << 18, "cuda": 1 << 24}


# --- inputs -------------------------------------------------------------------------------------

def _signed(word: int) -> int:
    """The same 64 bits as torch's only 64-bit integer."""
    word &= inputs.MASK
    return word - (1 << 64) if word >> 63 else word


def _shift(z: torch.Tensor, by: int) -> torch.Tensor:
    """A logical shift: torch shifts copies of the sign in."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def bits(seed: int, first: int, count: int, device: str) -> torch.Tensor:
    """`inputs.bits` as int64 words, derived where they are needed."""
    z = torch.arange(first + 1, first + 1 + count, dtype=torch.int64, device=device)
    z = z * _signed(inputs.PHI) + _signed(seed)
    z = (z ^ _shift(z, 30)) * _signed(inputs.MIX_1)
    z = (z ^ _shift(z, 27)) * _signed(inputs.MIX_2)
    return z ^ _shift(z, 31)


def normal_matrix(seed: int, rows: int, cols: int, scale: float, dtype: str, device: str) -> torch.Tensor:
    """[rows, cols] of `scale * normal`, rounded to the dtype."""
    out = torch.empty(rows * cols, dtype=DTYPES[dtype], device=device)
    size = CHUNKS[device.partition(":")[0]]
    for first, count in inputs.chunks(out.numel(), size):
        b = bits(seed, first, count, device)
        total = (b & 0xFFFF) + ((b >> 16) & 0xFFFF) + ((b >> 32) & 0xFFFF) + ((b >> 48) & 0xFFFF)
        values = (total.to(torch.float32) - float(inputs.CENTRE)) * float(inputs.UNIT)
        out[first:first + count] = values * float(scale)
    return out.view(rows, cols)


@dataclass(frozen=True)
class Tensors:
    """One copy of a case's data. Weights are [out, in], as torch.nn.Linear has them; the activation
    has gate and up [m, intermediate], or `packed` [m, 2 * intermediate]; its backward pass has the gradient
    of the result besides."""

    x: torch.Tensor | None = None
    gate: torch.Tensor | None = None
    up: torch.Tensor | None = None
    down: torch.Tensor | None = None
    packed: torch.Tensor | None = None
    out_grad: torch.Tensor | None = None

    @classmethod
    def derive(cls, case: Case, seed: int) -> Tensors:
        def make(tag: int, rows: int, cols: int, scale: float) -> torch.Tensor:
            return normal_matrix(seed ^ tag, rows, cols, scale, case.dtype, case.device)

        m, k, h = case.m, case.hidden, case.intermediate
        if not case.has_weights:
            if case.op == "copy":
                return cls(x=make(inputs.X, m, h, 1.0))
            scale = float(inputs.ACTIVATION_SCALE)
            gate, up = make(inputs.GATE, m, h, scale), make(inputs.UP, m, h, scale)
            out_grad = make(inputs.OUT_GRAD, m, h, 1.0) if case.op == "activation-backward" else None
            if case.packed_inputs:
                return cls(packed=torch.cat([gate, up], 1), out_grad=out_grad)
            return cls(gate=gate, up=up, out_grad=out_grad)
        weight = float(inputs.weight_scale(k))
        down = float(inputs.weight_scale(h))
        return cls(
            x=make(inputs.X, m, k, 1.0),
            gate=make(inputs.GATE, h, k, weight),
            up=make(inputs.UP, h, k, weight),
            down=make(inputs.DOWN, k, h, down) if case.is_block else None,
            out_grad=make(inputs.OUT_GRAD, m, k, 1.0) if case.op == "mlp-train" else None,
        )

    def gate_up(self) -> torch.Tensor:
        """Gate rows, then up rows: [2 * intermediate, hidden]."""
        return torch.cat([_there(self.gate), _there(self.up)], 0)


def _there(tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None:
        raise Unsupported("this way needs a tensor that the operation does not have")
    return tensor


@dataclass
class Source:
    """The data of the case prepared last. Profiles of one case follow each other, and deriving large
    weights takes longer than timing them."""

    _key: tuple[Case, int] | None = None
    _tensors: Tensors = field(default_factory=Tensors)

    def of(self, case: Case, seed: int) -> Tensors:
        if self._key != (case, seed):
            self._tensors, self._key = Tensors(), None
            gc.collect()
            give_back()
            self._tensors, self._key = Tensors.derive(case, seed), (case, seed)
        return self._tensors


def give_back() -> None:
    """What torch's allocator holds and nobody uses."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


# --- devices ------------------------------------------------------------------------------------

def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(device: str) -> None:
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise Unavailable("torch.cuda.is_available() is false")
    if device.partition(":")[0] not in CHUNKS:
        raise Unavailable(f"device {device}; known are cpu, cuda, cuda:N")


def device_name(device: str) -> str:
    check_device(device)
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return processor_name()


def processor_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as facts:
            for line in facts:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    found = {"torch": torch.__version__}
    if torch.cuda.is_available() and torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def l2_bytes(device: str) -> int | None:
    if not device.startswith("cuda"):
        return None
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


# --- activations ---------------------------------------------------------------------------------

_GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": F.silu,
    "glu": torch.sigmoid,
    "reglu": F.relu,
    "reglu2": lambda g: F.relu(g).square(),
    "geglu": F.gelu,
    "geglu-tanh": lambda g: F.gelu(g, approximate="tanh"),
    "bilinear": lambda g: g,
}


def gate_function(activation: str) -> Callable[[torch.Tensor], torch.Tensor]:
    try:
        return _GATES[activation]
    except KeyError:
        raise Unsupported(f"activation {activation}; known are {', '.join(_GATES)}") from None


def swiglu_only(case: Case) -> None:
    if case.activation != "swiglu":
        raise Unsupported(f"activation {case.activation}; this peer has swiglu alone")


# --- jobs ---------------------------------------------------------------------------------------

class Step(NamedTuple):
    """The results of a training step: y, and the gradients of x and of the weights, [out, in]."""

    y: torch.Tensor
    dx: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor

    def rows(self, rows: Sequence[int]) -> torch.Tensor:
        """Of the matrices with `hidden` columns, one behind the other."""
        chosen: list[torch.Tensor] = []
        for row in rows:
            for part in (self.y, self.dx, self.gate, self.up, self.down.t()):
                if row < len(part):
                    chosen.append(part[row])
                    break
                row -= len(part)
        return torch.stack(chosen)


#: Two tensors are gradients: of gate and of up, whose columns are shown beside each other.
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | Step
Call = Callable[[int], Result]


@dataclass
class Way:
    """How a profile computes: `call(i)` enqueues or runs it on copy i and returns the result."""

    copies: int
    call: Call
    #: None where nothing is computed.
    numerics: str | None
    notes: list[str] = field(default_factory=list)
    #: Where calls add to what is there: makes that zeros, behind which one call has the result.
    reset: Callable[[], None] | None = None
    #: Bytes that are kept between the passes of a training step, beside x.
    kept: Callable[[], int] | None = None

    def all_notes(self) -> list[str]:
        return ([f"rounds as {self.numerics}"] if self.numerics else []) + self.notes


class TorchJob:
    """A way on the CPU: each call by the wall clock."""

    def __init__(self, case: Case, profile: Profile, way: Way) -> None:
        self.notes = way.all_notes()
        self._way, self._next = way, 0
        #: Results stay alive until their copy's next turn, so that a result is as cold as its inputs.
        self._outs: list[Result | None] = [None] * way.copies
        self._threads = int(profile.option("threads", THREADS)) if case.device == "cpu" else THREADS

    def _step(self) -> None:
        at = self._next
        self._next = (at + 1) % self._way.copies
        self._outs[at] = self._way.call(at)

    def _use_threads(self) -> None:
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compiles, tunes and allocates what the first calls would."""
        self._use_threads()
        for _ in range(max(3, min(self._way.copies, 8))):
            self._step()
        if self._way.kept is not None:
            self.notes.append(f"keeps {self._way.kept()} bytes between the passes, beside x")

    @torch.inference_mode()
    def verify(self, rows: list[int]) -> bytes:
        self._use_threads()
        self._poison()
        return _rows(self._once(), rows)

    def _once(self) -> Result | None:
        """The result of one call."""
        if self._way.reset is not None:
            self._way.reset()
        self._next = 0
        self._step()
        return self._outs[0]

    def _poison(self) -> None:
        """A result that is not written shows as NaN."""
        for out in self._outs:
            for tensor in _tensors(out):
                tensor.fill_(float("nan"))

    @torch.inference_mode()
    def sample(self, turns: int, budget_us: float) -> list[float]:
        self._use_threads()
        return sample_wall(self._step, turns, budget_us)


class CudaJob(TorchJob):
    """A way on a GPU: batches of passes over all copies between events, call by call or as a captured
    graph. A sample is the mean over a batch: calls follow each other without waiting for the host."""

    def __init__(self, case: Case, profile: Profile, way: Way) -> None:
        super().__init__(case, profile, way)
        self._wants_graph = bool(profile.option("graph", False))
        self._graph: torch.cuda.CUDAGraph | None = None
        self._calls = way.copies * max(1, -(-GRAPH_CALLS // way.copies))
        self._pass_us = 0.0

    def _pass(self) -> None:
        if self._graph is not None:
            self._graph.replay()
            return
        for _ in range(self._calls):
            self._step()

    @torch.inference_mode()
    def warm_up(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            super().warm_up()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        if self._wants_graph:
            self._capture()
        self._pass()
        self._pass_us = self._batches(1, 1)[0] * self._calls

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        self._next = 0
        with torch.cuda.graph(graph):
            for _ in range(self._calls):
                self._step()
        self._graph = graph

    def _batches(self, batches: int, passes: int) -> list[float]:
        """Microseconds per call of each batch. One pass before them is not timed: it keeps the device
        busy while the host enqueues the others, and displaces the other peers' data."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(batches + 1)]
        self._pass()
        events[0].record()
        for event in events[1:]:
            for _ in range(passes):
                self._pass()
            event.record()
        events[-1].synchronize()
        calls = passes * self._calls
        return [a.elapsed_time(b) * 1e3 / calls for a, b in zip(events, events[1:])]

    @torch.inference_mode()
    def sample(self, turns: int, budget_us: float) -> list[float]:
        passes = max(1, round(BATCH_US / max(self._pass_us, 1.0)))
        batch_us = max(passes * self._pass_us, 1.0)
        batches = int(min(max(budget_us // batch_us, 1), MAX_PER_TURN))
        return [us for _ in range(turns) for us in self._batches(batches, passes)]

    @torch.inference_mode()
    def verify(self, rows: list[int]) -> bytes:
        self._poison()
        if self._way.reset is not None:
            return _rows(self._once(), rows)
        self._next = 0
        self._pass()
        torch.cuda.synchronize()
        return _rows(self._outs[-1], rows)


def _tensors(out: Result | None) -> tuple[torch.Tensor, ...]:
    if out is None:
        return ()
    return (out, ) if isinstance(out, torch.Tensor) else out


def _rows(out: Result | None, rows: Sequence[int]) -> bytes:
    if isinstance(out, Step):
        chosen = out.rows(rows)
    else:
        tensors = _tensors(out)
        at = torch.tensor(list(rows), dtype=torch.long, device=tensors[0].device)
        chosen = torch.cat([tensor[at] for tensor in tensors], 1)
    words = {4: torch.int32, 2: torch.int16}[chosen.element_size()]
    return chosen.contiguous().view(words).cpu().numpy().tobytes()


def job(case: Case, profile: Profile, way: Way) -> TorchJob:
    """The job for a way, warmed up."""
    made = (CudaJob if case.device.startswith("cuda") else TorchJob)(case, profile, way)
    made.warm_up()
    return made
