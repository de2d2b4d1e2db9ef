#!/usr/bin/env python3
"""A copy of the same bytes as the operation must move: the ceiling of what memory allows. It computes
nothing. On a GPU and, where torch is there, on the CPU by torch's copy; else by numpy's.

Options: `threads` (CPU, torch), `graph` (CUDA).
"""

import sys

from common import protocol
from common.problem import OPS, Case, Unsupported
from common.protocol import Job, Profile
from common.timing import sample_wall


def make_torch() -> tuple[protocol.Peer, str]:
    """The copy by torch, which uses every thread."""
    import torch

    from common import torch_server, torch_support
    from common.torch_support import DTYPES, Way
    from torch_ways.base import Request

    def copy(request: Request) -> Way:
        case = request.case
        if case.op == "copy":
            pairs = list(zip(request.rotate(request.data.x), request.outputs(), strict=True))
            return Way(len(pairs), lambda i: pairs[i][1].copy_(pairs[i][0][0]), "fused+precise")
        dtype = DTYPES[case.dtype]
        # One to one, whatever the operation reads for what it writes.
        count = max(1, int(case.bytes()) // 2 // dtype.itemsize)
        # Random, as everybody's: constant bits take less power to move.
        sources = [torch.randn(count, dtype=dtype, device=case.device) for _ in range(request.copies)]
        targets = [torch.zeros_like(source) for source in sources]
        return Way(len(sources), lambda i: targets[i].copy_(sources[i]), None,
                   ["half of the bytes are read, half are written"])

    ways = {f"{op}:copy": copy for op in OPS}
    return torch_server.TorchPeer("copy", ways, frozenset()), torch_support.default_device()


class NumpyCopy:
    """One thread's copy."""

    def __init__(self, case: Case, copies: int) -> None:
        import numpy as np

        self.notes = ["one thread"]
        words = max(1, int(case.bytes()) // 8)
        random = np.random.default_rng(1)
        self._sources = [random.integers(1 << 32, size=words, dtype=np.uint32) for _ in range(copies)]
        self._targets = [np.zeros_like(source) for source in self._sources]
        self._next = 0

    def _step(self) -> None:
        at = self._next
        self._next = (at + 1) % len(self._sources)
        self._targets[at][:] = self._sources[at]

    def verify(self, rows: list[int]) -> bytes:
        raise Unsupported("this copy is a ceiling: it computes nothing to compare")

    def sample(self, turns: int, budget_us: float) -> list[float]:
        return sample_wall(self._step, turns, budget_us)


class NumpyPeer:
    """Copies without torch."""

    name = "copy"
    options = frozenset({"way", "threads", "graph"})

    def versions(self) -> dict[str, str]:
        import numpy

        return {"numpy": numpy.__version__}

    def device(self, wanted: str) -> str:
        if wanted != "cpu":
            raise protocol.Unavailable(f"device {wanted} needs torch")
        return "CPU"

    def prepare(self, case: Case, profile: Profile, seed: int, rotations: int | str) -> Job:
        self.device(case.device)
        if case.op == "copy":
            raise Unsupported("a copy that is verified needs torch")
        return NumpyCopy(case, case.copies(None, rotations))


def make() -> tuple[protocol.Peer, str]:
    try:
        return make_torch()
    except ImportError:
        return NumpyPeer(), "cpu"


if __name__ == "__main__":
    sys.exit(protocol.main("copy", make))
