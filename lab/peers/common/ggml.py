"""ggml's CPU backend by ctypes, as far as a feed-forward block needs it.

The library is the one that `SWIGLU_GGML_LIBRARY` names (`libggml.so`, or the folder it lies in), else
that of an installed `llama-cpp-python`, else the loader's.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import os
from ctypes import POINTER, Structure, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any, Callable, Iterator

from .protocol import Unavailable

#: Numbers of element types: those of files.
TYPES = {"f32": 0, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13,
         "Q6_K": 14}
_CPU = 0
_HEADERS = 1 << 20

#: Functions of libggml and of the libraries that it needs: result and arguments.
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "ggml_version": (c_char_p, []),
    "ggml_commit": (c_char_p, []),
    "ggml_free": (None, [c_void_p]),
    "ggml_new_tensor_2d": (c_void_p, [c_void_p, c_int, c_int64, c_int64]),
    "ggml_mul_mat": (c_void_p, [c_void_p, c_void_p, c_void_p]),
    "ggml_swiglu": (c_void_p, [c_void_p, c_void_p]),
    "ggml_swiglu_split": (c_void_p, [c_void_p, c_void_p, c_void_p]),
    "ggml_new_graph": (c_void_p, [c_void_p]),
    "ggml_build_forward_expand": (None, [c_void_p, c_void_p]),
    "ggml_nbytes": (c_size_t, [c_void_p]),
    "ggml_backend_load_all_from_path": (None, [c_char_p]),
    "ggml_backend_dev_by_type": (c_void_p, [c_int]),
    "ggml_backend_dev_backend_reg": (c_void_p, [c_void_p]),
    "ggml_backend_dev_init": (c_void_p, [c_void_p, c_char_p]),
    "ggml_backend_dev_buffer_type": (c_void_p, [c_void_p]),
    "ggml_backend_dev_supports_op": (c_bool, [c_void_p, c_void_p]),
    "ggml_backend_reg_get_proc_address": (c_void_p, [c_void_p, c_char_p]),
    "ggml_backend_buft_name": (c_char_p, [c_void_p]),
    "ggml_backend_alloc_ctx_tensors_from_buft": (c_void_p, [c_void_p, c_void_p]),
    "ggml_backend_buffer_free": (None, [c_void_p]),
    "ggml_backend_tensor_set": (None, [c_void_p, c_char_p, c_size_t, c_size_t]),
    "ggml_backend_tensor_get": (None, [c_void_p, c_char_p, c_size_t, c_size_t]),
    "ggml_backend_graph_plan_create": (c_void_p, [c_void_p, c_void_p]),
    "ggml_backend_graph_plan_free": (None, [c_void_p, c_void_p]),
    "ggml_backend_graph_plan_compute": (c_int, [c_void_p, c_void_p]),
}


class _InitParams(Structure):
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


def _places() -> Iterator[Path | str]:
    """Where libggml may be, the first that exists is taken."""
    named = os.environ.get("SWIGLU_GGML_LIBRARY")
    if named:
        path = Path(named)
        yield path / "libggml.so" if path.is_dir() else path
        return
    spec = importlib.util.find_spec("llama_cpp")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        yield Path(folder) / "lib" / "libggml.so"
    found = ctypes.util.find_library("ggml")
    if found:
        yield found


def _open() -> tuple[ctypes.CDLL, Path | None]:
    for place in _places():
        if isinstance(place, str):
            return ctypes.CDLL(place, mode=ctypes.RTLD_GLOBAL), None
        if not place.exists():
            continue
        # Wheels do not always say where a library's own libraries lie: beside it.
        for name in ("libggml-base", "libggml-cpu"):
            for beside in sorted(place.parent.glob(f"{name}.so*"))[:1]:
                ctypes.CDLL(str(beside), mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(place), mode=ctypes.RTLD_GLOBAL), place.parent
    named = os.environ.get("SWIGLU_GGML_LIBRARY")
    where = f"SWIGLU_GGML_LIBRARY={named}: no libggml.so there" if named else (
        "no libggml: pip install llama-cpp-python, or SWIGLU_GGML_LIBRARY=path/to/libggml.so")
    raise Unavailable(where)


class Library:
    """The functions, and the CPU's device. Raises Unavailable where there is no library."""

    def __init__(self) -> None:
        try:
            handle, folder = _open()
            for name, (result, arguments) in _FUNCTIONS.items():
                function = getattr(handle, name)
                function.restype, function.argtypes = result, arguments
                setattr(self, name.removeprefix("ggml_"), function)
            handle.ggml_init.restype, handle.ggml_init.argtypes = c_void_p, [_InitParams]
        except (OSError, AttributeError) as error:
            raise Unavailable(f"libggml: {error}") from None
        self._handle = handle
        device = self.backend_dev_by_type(_CPU)
        if not device and folder:
            # A build whose backends are libraries to be chosen from.
            self.backend_load_all_from_path(str(folder).encode())
            device = self.backend_dev_by_type(_CPU)
        if not device:
            raise Unavailable("this libggml has no CPU backend")
        self.device: int = device
        self._registry = self.backend_dev_backend_reg(device)

    def context(self) -> int:
        """Headers of tensors and graphs, without data."""
        return self._handle.ggml_init(_InitParams(_HEADERS, None, True))

    def versions(self) -> str:
        """For example `0.9.4 (1a2b3c4)`."""
        return f"{self._handle.ggml_version().decode()} ({self._handle.ggml_commit().decode()})"

    def _function(self, name: str, result: Any, arguments: list[Any]) -> Callable[..., Any] | None:
        address = self.backend_reg_get_proc_address(self._registry, name.encode())
        return ctypes.CFUNCTYPE(result, *arguments)(address) if address else None

    def backend(self, threads: int) -> int:
        """The CPU with a number of threads."""
        made = self.backend_dev_init(self.device, None)
        set_threads = self._function("ggml_backend_set_n_threads", None, [c_void_p, c_int])
        if not made or set_threads is None:
            raise Unavailable("this libggml's CPU backend does not take a number of threads")
        set_threads(made, threads)
        return made

    def plain(self) -> int:
        """Memory that holds tensors as files do."""
        return self.backend_dev_buffer_type(self.device)

    def repacking(self) -> int | None:
        """Memory that rearranges weights for the processor as they are written to it."""
        extra = self._function("ggml_backend_dev_get_extra_bufts", POINTER(c_void_p), [c_void_p])
        types = extra(self.device) if extra else None
        index = 0
        while types and types[index]:
            if b"REPACK" in self.backend_buft_name(types[index]).upper():
                return types[index]
            index += 1
        return None
