"""A case of an experiment, as the host sends it, and what it costs at least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Mapping

if TYPE_CHECKING:
    from .inputs import Block

# Data in rotation exceed the caches by far: on the CPU this many bytes of weights (of everything
# where there are no weights), on a GPU this many times its second-level cache.
COLD_BYTES_CPU = 400e6
COLD_L2_MULTIPLE = 4
MAX_COPIES_CPU = 1000
MAX_COPIES_CUDA = 512

OPS = ("activation", "activation-backward", "gated-linear", "mlp", "mlp-train", "copy")

SIZES = {"f32": 4, "f16": 2, "bf16": 2}


def _blocks() -> Mapping[str, Block]:
    """The types of quantised weights. Inputs need numpy, so they are imported late: a peer without it
    must still answer."""
    from .inputs import BLOCKS

    return BLOCKS


class Unsupported(Exception):
    """The peer cannot compute this case in this way: says why. Not an error of the run."""


@dataclass(frozen=True)
class Case:
    """x [m, hidden] -> h [m, intermediate] (gated-linear) -> y [m, hidden] (mlp); mlp-train has the gradient of
    y besides, and as its result y and the gradients of x and of the weights; the activation and the copy have two inputs [m, intermediate] and one output of that shape; activation-backward has the
    gradient of that output besides, and the gradients of both inputs as its result."""

    op: str
    m: int
    hidden: int
    intermediate: int
    dtype: str
    activation: str = "swiglu"
    numerics: str = "fused+fast"
    arrangement: str = "separate"
    orientation: str = "out-in"
    heat: str = "cold"
    device: str = "cpu"
    #: The type of all weights where they are quantised; else they are of `dtype`.
    weights: str | None = None

    @classmethod
    def parse(cls, message: Mapping[str, Any], device: str, quantized: bool = False) -> Case:
        """Reads the host's case. A field that this peer does not know must not be ignored silently
        where it changes the result, so biases are refused by name, and quantised weights by all
        peers but those that say they know them."""
        op = str(message["op"])
        if op not in OPS:
            raise Unsupported(f"operation {op}; known are {', '.join(OPS)}")
        if message.get("bias"):
            raise Unsupported("biases are not part of this peer's protocol")
        shape = message.get("shape") or {}
        size = lambda name: int(message.get(name, shape.get(name, 0)) or 0)
        case = cls(
            op=op,
            m=int(message["m"]),
            hidden=size("hidden"),
            intermediate=size("intermediate"),
            dtype=str(message["dtype"]),
            activation=str(message.get("activation", "swiglu")),
            numerics=str(message.get("numerics", "fused+fast")),
            arrangement=str(message.get("arrangement", "separate")),
            orientation=str(message.get("orientation", "out-in")),
            heat=str(message.get("heat", "cold")),
            device=str(message.get("device") or device),
            weights=None if message.get("weights") is None else str(message["weights"]),
        )
        if case.dtype not in SIZES:
            raise Unsupported(f"dtype {case.dtype}; known are {', '.join(SIZES)}")
        if case.weights is not None:
            case._expect_blocks(quantized)
        if case.m < 1 or case.intermediate < 1 or (case.has_weights and case.hidden < 1):
            raise Unsupported(f"an empty case: m={case.m} hidden={case.hidden} "
                              f"intermediate={case.intermediate}")
        return case

    def _expect_blocks(self, quantized: bool) -> None:
        if not quantized:
            raise Unsupported(f"{self.weights} weights: this peer computes with weights of the dtype")
        blocks = _blocks()
        if self.weights not in blocks or not self.has_weights:
            raise Unsupported(f"{self.op} with {self.weights} weights; known are {', '.join(blocks)}")
        elements = blocks[self.weights].elements
        inputs = (self.hidden, self.intermediate) if self.is_block else (self.hidden,)
        if any(n % elements for n in inputs):
            raise Unsupported(f"{inputs} inputs: {self.weights} has blocks of {elements}")

    @property
    def has_weights(self) -> bool:
        return self.op == "gated-linear" or self.is_block

    @property
    def is_block(self) -> bool:
        """Whether there is a down projection."""
        return self.op in ("mlp", "mlp-train")

    @property
    def out_shape(self) -> tuple[int, int]:
        """Of gradients: that of gate and that of up beside each other. Of a training step the matrices with `hidden`
        columns one behind the other: y, the gradients of x, gate and up, and the transpose of down's."""
        if self.op == "mlp-train":
            return (2 * self.m + 3 * self.intermediate, self.hidden)
        columns = {"mlp": self.hidden, "activation-backward": 2 * self.intermediate}
        return (self.m, columns.get(self.op, self.intermediate))

    @property
    def packed_inputs(self) -> bool:
        """Whether gate and up of the activation share a tensor [m, 2*intermediate], gate first."""
        if self.arrangement not in ("separate", "gate-first"):
            raise Unsupported(f"arrangement {self.arrangement}; known are separate, gate-first")
        return self.arrangement == "gate-first"

    def flops(self) -> float:
        """Of the linear maps, a multiply-add counted as two; for the activation one per element, for
        its gradients one per element of each."""
        per_token = {"gated-linear": 4 * self.hidden, "mlp": 6 * self.hidden, "mlp-train": 18 * self.hidden,
                     "activation": 1, "activation-backward": 2}
        return float(self.m) * self.intermediate * per_token.get(self.op, 0)

    def weight_bytes(self) -> float:
        matrices = {"gated-linear": 2, "mlp": 3, "mlp-train": 3}.get(self.op, 0)
        block = _blocks()[self.weights] if self.weights else None
        elements, size = (block.elements, block.size) if block else (1, SIZES[self.dtype])
        return float(matrices) * self.hidden * self.intermediate * size / elements

    def bytes(self) -> float:
        """What must move at least: inputs and weights read once in each pass, outputs written once; between the passes
        of a training step gate and up are written and read."""
        h = self.intermediate
        per_token = {"gated-linear": self.hidden + h, "mlp": 2 * self.hidden,
                     "mlp-train": 5 * self.hidden + 4 * h, "activation": 3 * h,
                     "activation-backward": 5 * h, "copy": 2 * h}
        elements = per_token[self.op]
        times = 3 if self.op == "mlp-train" else 1
        return times * self.weight_bytes() + float(self.m) * elements * SIZES[self.dtype]

    def copies(self, l2_bytes: int | None, wanted: int | str = "auto") -> int:
        """How many copies of the data are rotated. `l2_bytes` is a GPU's, None on the CPU."""
        if isinstance(wanted, int):
            return max(1, wanted)
        if self.heat == "hot":
            return 1
        if l2_bytes is None:
            data, cold, most = self.weight_bytes() or self.bytes(), COLD_BYTES_CPU, MAX_COPIES_CPU
        else:
            data, cold, most = self.bytes(), COLD_L2_MULTIPLE * l2_bytes, MAX_COPIES_CUDA
        return int(min(max(-(-cold // max(data, 1.0)), 1), most))
