"""What is here, and what a forked process must forget."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any, Dict

from . import _native


def find_cuda_libraries() -> None:
    """Names the directories of this interpreter's wheels with NVRTC and cuBLASLt, unless the user has named others.

    The library itself looks into wheels of an activated environment; an interpreter can be run without that.
    """
    if "SWIGLU_CUDA_LIBRARY_PATH" in os.environ:
        return
    # Wheels of NVIDIA's are parts of one package, wherever on the interpreter's path they lie.
    nvidia = importlib.util.find_spec("nvidia")
    places = (nvidia and nvidia.submodule_search_locations) or []
    names = ("cu13/lib", "cuda_nvrtc/lib", "cublas/lib")
    found = [str(Path(place) / name) for place in places for name in names if (Path(place) / name).is_dir()]
    if found:
        os.environ["SWIGLU_CUDA_LIBRARY_PATH"] = os.pathsep.join(found)


def info() -> Dict[str, Any]:
    """Version, instruction set, devices and libraries of this machine, or what speaks against them."""
    find_cuda_libraries()
    found: Dict[str, Any] = json.loads(_native.info())
    return found


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_native.before_fork,
        after_in_parent=_native.after_fork_in_parent,
        after_in_child=_native.after_fork,
    )
