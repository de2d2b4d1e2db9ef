"""A plugin of vLLM: its gated activations by our kernels, with the bits of PyTorch's operations.

The entry point ``vllm.general_plugins`` names :func:`register`, which vLLM calls in each of its processes; its variable
``VLLM_PLUGINS`` says which plugins it loads.
"""

from __future__ import annotations

import logging
from typing import Any, Callable, Dict, List

from torch import Tensor

from . import torch as ops


def _silu(self: Any, x: Tensor) -> Tensor:
    return ops.glu(x, numerics="eager")


def _mul_and_silu(self: Any, x: Tensor) -> Tensor:
    return ops.glu(x, layout="up-first", numerics="eager")


def _gelu(self: Any, x: Tensor) -> Tensor:
    return ops.glu(x, "geglu" if self.approximate == "none" else "geglu-tanh", numerics="eager")


def _clamped(self: Any, x: Tensor) -> Tensor:
    name = f"clamped-swiglu(alpha={self.alpha},offset=1,limit={self.limit})"
    return ops.glu(x, name, layout="interleaved", numerics="eager")


FORWARDS: Dict[str, Callable[[Any, Tensor], Tensor]] = {
    "SiluAndMul": _silu,
    "MulAndSilu": _mul_and_silu,
    "GeluAndMul": _gelu,
    "SwigluOAIAndMul": _clamped,
}


def register() -> List[str]:
    """Registers a class in the place of each of vLLM's that we have; returns their names. A second call changes nothing."""
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.layers import activation

    names = []
    for name, forward in FORWARDS.items():
        theirs = getattr(activation, name, None)
        if theirs is None or name in _registered:
            continue
        methods = dict.fromkeys(("forward_cuda", "forward_cpu", "forward_oot"), forward)
        CustomOp.register_oot(name=name)(type(name, (theirs,), methods))
        _registered.append(name)
        names.append(name)
    logging.getLogger("swiglu").info("vLLM's %s are computed by swiglu", ", ".join(names))
    return names


_registered: List[str] = []
