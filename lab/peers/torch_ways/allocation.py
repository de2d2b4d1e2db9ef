"""Memory between two kernels: kept from call to call, or taken from the driver in every call."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from typing import Iterator

import torch

from common.problem import SIZES, Unsupported

from .base import Request


class Scratch:
    """Memory that is there before the first call, one per copy of the data."""

    notes: list[str] = []

    def __init__(self, request: Request) -> None:
        self._kept = request.outputs(2 * request.case.intermediate)

    @contextmanager
    def take(self, i: int, shape: tuple[int, int]) -> Iterator[torch.Tensor]:
        yield self._kept[i].view(shape)


class PageFaults(Scratch):
    """Host memory straight from the system: large blocks come and go with every call, and each page of
    them is cleared when it is first touched."""

    notes = ["allocates gate and up in every call"]

    def __init__(self, request: Request) -> None:
        self._like = request.outputs()[0]

    @contextmanager
    def take(self, i: int, shape: tuple[int, int]) -> Iterator[torch.Tensor]:
        yield self._like.new_empty(shape)


class DriverAllocation(Scratch):
    """cudaMalloc and cudaFree in every call. The free waits for the device; the GEMM's result still
    goes to kept memory, which is as fast, so that torch sees nothing unusual."""

    notes = ["cudaMalloc and cudaFree of gate and up in every call"]

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        if request.profile.option("graph", False):
            raise Unsupported("an allocation by the driver cannot be captured into a graph")
        self._runtime = _cuda_runtime()
        self._bytes = request.case.m * 2 * request.case.intermediate * SIZES[request.case.dtype]

    @contextmanager
    def take(self, i: int, shape: tuple[int, int]) -> Iterator[torch.Tensor]:
        pointer = ctypes.c_void_p()
        _expect(self._runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(self._bytes)))
        try:
            yield self._kept[i].view(shape)
        finally:
            _expect(self._runtime.cudaFree(pointer))


def fresh_scratch(request: Request) -> Scratch:
    """Memory of this call alone."""
    return DriverAllocation(request) if request.on_cuda else PageFaults(request)


def _cuda_runtime() -> ctypes.CDLL:
    """The runtime that torch has loaded."""
    major = (torch.version.cuda or "").partition(".")[0]
    for name in (f"libcudart.so.{major}", "libcudart.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise Unsupported(f"libcudart of CUDA {major} is not where the loader looks")


def _expect(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"the CUDA runtime reports error {status}")
