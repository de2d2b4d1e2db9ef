"""A peer made of ways: what the torch, triton, liger, quack and copy peers have in common."""

from __future__ import annotations

from typing import Callable, Mapping

from torch_ways.base import Compiled, Request

from . import torch_support
from .problem import Case, Unsupported
from .protocol import Job, Profile, Unavailable

Build = Callable[[Request], torch_support.Way]


class TorchPeer:
    """Looks up `operation:way` and times it. The first way of an operation is its default."""

    def __init__(self, name: str, ways: Mapping[str, Build], options: frozenset[str],
                 versions: Mapping[str, str] | None = None, cpu: bool = True) -> None:
        self.name, self.options = name, options | {"way", "graph", "threads"}
        self._ways, self._versions, self._cpu = dict(ways), dict(versions or {}), cpu
        self._source, self._compiled = torch_support.Source(), Compiled()

    def versions(self) -> dict[str, str]:
        return {**torch_support.versions(), **self._versions}

    def device(self, wanted: str) -> str:
        if not self._cpu and not wanted.startswith("cuda"):
            raise Unavailable(f"{self.name} runs on CUDA devices, not on {wanted}")
        return torch_support.device_name(wanted)

    def prepare(self, case: Case, profile: Profile, seed: int, rotations: int | str) -> Job:
        self.device(case.device)
        build = self._build(case, profile)
        copies = case.copies(torch_support.l2_bytes(case.device), rotations)
        data = self._source.of(case, seed)
        request = Request(case, profile, data, copies, self._compiled.of(case))
        return torch_support.job(case, profile, build(request))

    def released(self) -> None:
        """Memory goes back to the driver: other processes need it, and the next preparation takes its own."""
        torch_support.give_back()

    def _build(self, case: Case, profile: Profile) -> Build:
        known = [k.partition(":")[2] for k in self._ways if k.startswith(f"{case.op}:")]
        if not known:
            raise Unsupported(f"{self.name} does not compute {case.op}")
        way = str(profile.option("way", known[0]))
        if way not in known:
            raise Unsupported(f"way {way} for {case.op}; {self.name} has {', '.join(known)}")
        return self._ways[f"{case.op}:{way}"]
