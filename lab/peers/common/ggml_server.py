"""ggml's CPU backend as a peer: what `ggml_peer.py` serves."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass, field

import numpy as np

from . import inputs, protocol
from .ggml import TYPES, Library
from .problem import Case, Unsupported
from .protocol import Job, Profile
from .timing import sample_wall

#: Calls before the first that is timed: page faults and threads.
WARM_UP = 8


def values_of(case: Case, seed: int) -> np.ndarray:
    """x as values of the case's type, in f32."""
    x = inputs.normal_matrix(seed ^ inputs.X, case.m, case.hidden, np.float32(1.0))
    x = inputs.as_dtype(x, case.dtype)
    return (x.astype(np.uint32) << 16).view(np.float32) if case.dtype == "bf16" else x.astype(np.float32)


@dataclass
class Weights:
    """The matrices of a case as bytes, [outputs, inputs]: made once and copied into ggml's memory."""

    type: int
    tensors: list[tuple[int, int, bytes]] = field(default_factory=list)

    @classmethod
    def of(cls, case: Case, seed: int, way: str) -> Weights:
        def matrix(stream: int, rows: int, cols: int) -> bytes:
            scale = inputs.weight_scale(cols)
            if case.weights is None:
                return inputs.normal_matrix(seed ^ stream, rows, cols, scale).tobytes()
            return inputs.quantized_matrix(seed ^ stream, case.weights, rows, cols, scale).tobytes()

        k, h = case.hidden, case.intermediate
        made = cls(TYPES[case.weights or "f32"])
        gate, up = matrix(inputs.GATE, h, k), matrix(inputs.UP, h, k)
        made.tensors = [(2 * h, k, gate + up)] if way == "packed" else [(h, k, gate), (h, k, up)]
        if case.op == "mlp":
            made.tensors.append((k, h, matrix(inputs.DOWN, k, h)))
        return made


class Copy:
    """One copy of the data with its graph and plan."""

    def __init__(self, ggml: Library, backend: int, case: Case, weights: Weights, x: bytes,
                 memory: int) -> None:
        self._ggml, self._backend = ggml, backend
        self._contexts: list[int] = []
        self._buffers: list[int] = []
        self._products: list[int] = []
        self._plan: int | None = None
        try:
            self._make(case, weights, x, memory)
        except BaseException:
            # What a copy holds is ggml's: nobody else gives it back.
            self.free()
            raise

    def _make(self, case: Case, weights: Weights, x: bytes, memory: int) -> None:
        ggml = self._ggml
        for _ in range(2):
            self._contexts.append(ggml.context())
        held, work = self._contexts
        tensors = [ggml.new_tensor_2d(held, weights.type, cols, rows)
                   for rows, cols, _ in weights.tensors]
        self._x = ggml.new_tensor_2d(work, TYPES["f32"], case.hidden, case.m)
        *gate_up, down = tensors if case.op == "mlp" else [*tensors, None]
        product = lambda weight, of: self._product(work, weight, of)
        if len(gate_up) == 1:
            h = ggml.swiglu(work, product(gate_up[0], self._x))
        else:
            gate, up = (product(weight, self._x) for weight in gate_up)
            h = ggml.swiglu_split(work, gate, up)
        self._out = h if down is None else product(down, h)
        graph = ggml.new_graph(work)
        ggml.build_forward_expand(graph, self._out)
        for context, kind in ((held, memory), (work, ggml.plain())):
            buffer = ggml.backend_alloc_ctx_tensors_from_buft(context, kind)
            if not buffer:
                raise MemoryError("ggml found no memory for a copy of the data")
            self._buffers.append(buffer)
        if not all(ggml.backend_dev_supports_op(ggml.device, node) for node in self._products):
            raise Unsupported("ggml does not repack weights of this type or shape on this processor")
        for tensor, (_, _, data) in zip(tensors, weights.tensors, strict=True):
            ggml.backend_tensor_set(tensor, data, 0, len(data))
        ggml.backend_tensor_set(self._x, x, 0, len(x))
        self._plan = ggml.backend_graph_plan_create(self._backend, graph)

    def _product(self, context: int, weight: int, of: int) -> int:
        self._products.append(self._ggml.mul_mat(context, weight, of))
        return self._products[-1]

    def compute(self) -> None:
        status = self._ggml.backend_graph_plan_compute(self._backend, self._plan)
        if status != 0:
            raise RuntimeError(f"ggml ended with status {status}")

    def poison(self) -> None:
        size = self._ggml.nbytes(self._out)
        self._ggml.backend_tensor_set(self._out, np.full(size // 4, np.nan, "<f4").tobytes(), 0, size)

    def result(self) -> bytes:
        out = ctypes.create_string_buffer(self._ggml.nbytes(self._out))
        self._ggml.backend_tensor_get(self._out, out, 0, len(out))
        return out.raw

    def free(self) -> None:
        if self._plan:
            self._ggml.backend_graph_plan_free(self._backend, self._plan)
        for buffer in self._buffers:
            self._ggml.backend_buffer_free(buffer)
        for context in self._contexts:
            self._ggml.free(context)
        self._plan, self._buffers, self._contexts = None, [], []


class GgmlJob:
    """Copies in rotation."""

    def __init__(self, copies: list[Copy], case: Case, notes: list[str]) -> None:
        self._copies, self._case, self.notes, self._next = copies, case, notes, 0
        for _ in range(max(len(copies), WARM_UP)):
            self._step()

    def _step(self) -> None:
        at = self._next
        self._next = (at + 1) % len(self._copies)
        self._copies[at].compute()

    def verify(self, rows: list[int]) -> bytes:
        self._copies[0].poison()
        self._next = 0
        self._step()
        out = np.frombuffer(self._copies[0].result(), "<f4").reshape(self._case.out_shape)
        return inputs.as_dtype(out[rows], self._case.dtype).tobytes()

    def sample(self, turns: int, budget_us: float) -> list[float]:
        return sample_wall(self._step, turns, budget_us)

    def __del__(self) -> None:
        for copy in self._copies:
            copy.free()


class GgmlPeer:
    """ggml on the CPU."""

    name = "ggml"
    options = frozenset({"way", "repack", "threads", "activations"})
    quantized = True

    def __init__(self) -> None:
        self._ggml = Library()
        self._backends: dict[int, int] = {}
        self._made: tuple[tuple[Case, int, str], Weights] | None = None

    def versions(self) -> dict[str, str]:
        return {"ggml": self._ggml.versions(), "numpy": np.__version__}

    def device(self, wanted: str) -> str:
        if wanted != "cpu":
            raise protocol.Unavailable(f"this peer is ggml's CPU backend, not on {wanted}")
        return "CPU"

    def prepare(self, case: Case, profile: Profile, seed: int, rotations: int | str) -> Job:
        self.device(case.device)
        if not case.has_weights or case.activation != "swiglu":
            raise Unsupported(f"{case.op} with {case.activation}: gated-linear and mlp with swiglu")
        if case.orientation != "out-in":
            raise Unsupported(f"{case.orientation}: weights are out-in")
        if case.dtype != "f32" and case.weights is None:
            raise Unsupported(f"weights of {case.dtype}; they are f32 or quantised")
        way, repack = str(profile.option("way", "separate")), bool(profile.option("repack", False))
        if way not in ("separate", "packed"):
            raise Unsupported(f"way {way}; ggml has separate, packed")
        activations = str(profile.option("activations", "q8"))
        if activations != "q8":
            raise Unsupported(f"activations {activations}; ggml has q8")
        memory = self._ggml.repacking() if repack else self._ggml.plain()
        if memory is None:
            raise Unsupported("this ggml has no memory that repacks")
        threads = int(profile.option("threads", os.cpu_count() or 1))
        backend = self._backends.setdefault(threads, 0) or self._ggml.backend(threads)
        self._backends[threads] = backend
        weights = self._weights(case, seed, way)
        x = values_of(case, seed).tobytes()
        count = case.copies(None, rotations)
        copies: list[Copy] = []
        try:
            for _ in range(count):
                copies.append(Copy(self._ggml, backend, case, weights, x, memory))
        except Exception:
            for copy in copies:
                copy.free()
            raise
        kind = ["inputs in blocks of 8 bits"] if case.weights else []
        memory_name = self._ggml.backend_buft_name(memory).decode()
        if case.dtype != "f32":
            kind.append("inputs and outputs in f32")
        notes = ["rounds as fused+fast", *kind, f"{way}, {memory_name}, {threads} threads",
                 f"{count} copies in rotation"]
        return GgmlJob(copies, case, notes)

    def _weights(self, case: Case, seed: int, way: str) -> Weights:
        """The next profile of a case has the same."""
        key = (case, seed, way)
        if self._made is None or self._made[0] != key:
            self._made = None
            self._made = (key, Weights.of(case, seed, way))
        return self._made[1]
