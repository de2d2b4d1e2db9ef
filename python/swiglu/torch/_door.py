"""Whether a call may go straight to its body, past the dispatcher: 2 µs less than ``torch.ops`` in eager.

Everything that the dispatcher would do for a call is on this list. Where any of it is in force, it does it.
"""

from __future__ import annotations

import threading
from typing import Optional, Tuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._python_dispatch import _disable_current_modes

from .. import _native

PLAIN = (Tensor, Parameter)
_C = torch._C


def _plain_keys() -> "frozenset[int]":
    """The dispatch keys of tensors that nothing is to be done for: neither wrapped, negated nor quantised."""
    keys = set()
    for device in ("cpu", "meta"):
        for inference in (False, True):
            with torch.inference_mode(inference):
                t = torch.empty(0, device=device)
            if device == "cpu":
                keys.add(_C._dispatch_keys(t).raw_repr())
    if torch.cuda.is_available():
        for inference in (False, True):
            with torch.inference_mode(inference):
                keys.add(_C._dispatch_keys(torch.empty(0, device="cuda")).raw_repr())
    return frozenset(keys)


_keys_of = _C._dispatch_keys
_KEYS: "Optional[frozenset[int]]" = None


def transformed() -> bool:
    """One of PyTorch's transforms (vmap, grad, jvp) is in force."""
    return not torch.compiler.is_compiling() and _C._functorch.peek_interpreter_stack() is not None


# What Dynamo takes to be true in code that it traces, and reads no further; other tracing is under modes. `is_compiling` asks two
# functions more.
traced = torch.compiler.is_dynamo_compiling
_modes, _functions = _C._len_torch_dispatch_stack, _C._len_torch_function_stack
_transforms, _autocast, _tracing = _C._functorch.peek_interpreter_stack, _C._is_any_autocast_enabled, _C._get_tracing_state

ONE_PASS_HERE = "one pass over gate and up"
ONE_PASS = f"{ONE_PASS_HERE}, on the current stream"
WHERE_THEY_LIE = "fused kernels over the weights where they lie, on the current stream"


class _Last(threading.local):
    #: Op, way and reason of a thread's last call: named when somebody asks.
    taken: Optional[Tuple[str, str, str]] = None


LAST = _Last()

#: Computes what needs nothing but its kernel: it asks what is in force, describes tensors by PyTorch's table of functions for
#: DLPack, makes the result and enqueues the call. It gives None where anything speaks against that, or there is no such table.
DOOR = _native.Door(
    [_modes, _functions, _transforms, _autocast, _tracing],
    forward_ad,
    torch.is_grad_enabled,
    torch.empty_like,
    _C._increment_version,
    LAST,
    (ONE_PASS_HERE, ONE_PASS, WHERE_THEY_LIE),
)


def nothing_in_force() -> bool:
    """No mode, transform, tracing, autocast or forward-mode derivative."""
    return not traced() and DOOR.nothing_in_force()


def compiling() -> bool:
    """Dynamo traces what is to run here, outside of PyTorch's transforms, and not for an export, which keeps the operator."""
    # The flag is there since 2.7. Its function `is_exporting` is true in all that Dynamo traces, up to 2.11 or so, and the stack of
    # transforms is never empty there.
    exported = getattr(torch.compiler, "_is_exporting_flag", False)
    return bool(traced() and not exported and not _C._are_functorch_transforms_active())


def watched() -> bool:
    """A transform or a trace sees what is computed, and may let it have no values."""
    return bool(traced() or _transforms() is not None or _tracing() is not None)


def recorded() -> bool:
    """A trace would keep what the dispatcher is told of a call, and nothing of one that it is not told of."""
    if _tracing() is not None or not _modes():
        return _tracing() is not None
    # It takes long to import, and who records has done it.
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None


def _known_keys() -> "frozenset[int]":
    global _KEYS
    if _KEYS is None:
        # What is made under a mode is the mode's.
        with _disable_current_modes():
            _KEYS = _plain_keys()
    return _KEYS


def holds_values(t: Tensor) -> bool:
    """Whether nothing is to be done for a tensor before its memory is read."""
    return _keys_of(t).raw_repr() in _known_keys()


def plain(*tensors: Optional[Tensor]) -> bool:
    """Tensors of PyTorch's own, on a CPU or a CUDA device."""
    known = _KEYS or _known_keys()
    for t in tensors:
        if t is not None and (type(t) not in PLAIN or _keys_of(t).raw_repr() not in known):
            return False
    return True


def autocasts() -> bool:
    """Whether PyTorch's linear maps convert what they are given."""
    return bool(_autocast())


grad_enabled = torch.is_grad_enabled


def wants_gradient(*tensors: Optional[Tensor]) -> bool:
    if grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False
