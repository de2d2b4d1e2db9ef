"""GGUF's blocks as tensors: values and scales apart, as every kernel here wants them."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field

import numpy as np
import torch

from common import inputs, torch_support
from common.problem import Case, Unsupported

#: Elements that share a scale, in the types that are known here.
GROUP = 32
KNOWN = ("Q8_0", "Q4_0")


@dataclass(frozen=True)
class Quantized:
    """A matrix [rows, cols]. Its values are int8 [rows, cols], or bytes of two [rows, cols / 2]: of each group of 32, byte j
    has elements j, in the low half, and j + 16, both 8 too large. Scales are float16 [rows, cols / 32]."""

    values: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def derive(cls, case: Case, tag: int, seed: int, rows: int, cols: int) -> Quantized:
        if case.weights not in KNOWN:
            raise Unsupported(f"{case.weights} weights; known are {', '.join(KNOWN)}")
        blocks = inputs.quantized_matrix(seed ^ tag, case.weights, rows, cols, inputs.weight_scale(cols))
        scales = np.ascontiguousarray(blocks[:, :2]).view("<f2").reshape(rows, cols // GROUP)
        kind = np.int8 if case.weights == "Q8_0" else np.uint8
        values = np.ascontiguousarray(blocks[:, 2:]).view(kind).reshape(rows, -1)
        return cls(*(torch.from_numpy(part).to(case.device) for part in (values, scales)))

    @property
    def nibbles(self) -> bool:
        return self.values.dtype == torch.uint8

    def integers(self) -> torch.Tensor:
        """The values [rows, cols] as int8, in order."""
        if not self.nibbles:
            return self.values
        return nibbles_in_order(self.values) - 8


def nibbles_in_order(values: torch.Tensor) -> torch.Tensor:
    """Nibbles [rows, cols] of bytes [rows, cols / 2], as int8."""
    groups = values.view(values.shape[0], -1, GROUP // 2)
    return torch.cat([groups & 15, groups >> 4], -1).view(values.shape[0], -1).to(torch.int8)


@dataclass(frozen=True)
class Block:
    """A feed-forward block's data: x of the case's dtype, three quantised matrices [out, in]."""

    x: torch.Tensor | None = None
    gate: Quantized | None = None
    up: Quantized | None = None
    down: Quantized | None = None

    @classmethod
    def derive(cls, case: Case, seed: int) -> Block:
        if case.op != "mlp":
            raise Unsupported(f"{case.op}: this peer has feed-forward blocks")
        k, h = case.hidden, case.intermediate
        return cls(
            x=torch_support.normal_matrix(seed ^ inputs.X, case.m, k, 1.0, case.dtype, case.device),
            gate=Quantized.derive(case, inputs.GATE, seed, h, k),
            up=Quantized.derive(case, inputs.UP, seed, h, k),
            down=Quantized.derive(case, inputs.DOWN, seed, k, h),
        )


@dataclass
class Source:
    """The data of the case prepared last, as `torch_support.Source` has them."""

    _key: tuple[Case, int] | None = None
    _block: Block = field(default_factory=Block)

    def of(self, case: Case, seed: int) -> Block:
        if self._key != (case, seed):
            self._block, self._key = Block(), None
            gc.collect()
            torch_support.give_back()
            self._block, self._key = Block.derive(case, seed), (case, seed)
        return self._block
