"""What an operator does for tensors with values: our kernels, or PyTorch's operations with the reason why."""

from __future__ import annotations

import contextlib
import platform
from dataclasses import dataclass
from typing import Any, Dict, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import functional as F

from .. import _native
from .._activation import activation_named, expect_numerics
from .._errors import error, shape_error, wrong
from .._native import Activation, SwigluError
from .._system import find_cuda_libraries
from . import _check, _door, _formulas
from ._door import LAST, ONE_PASS, ONE_PASS_HERE, WHERE_THEY_LIE
from ._formulas import HALVES

_CODES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Taken:
    """Which way a call took, and why."""

    op: str
    #: ``native cpu``, ``native cuda`` or ``composed``: PyTorch's operations, with our activation where it has kernels.
    way: str
    reason: str

    def __str__(self) -> str:
        return f"{self.op}: {self.way} ({self.reason})"


_BACKWARD_HERE = "one pass over the gradient, gate and up"
_BACKWARD = f"{_BACKWARD_HERE}, on the current stream"


def explain_last() -> Optional[Taken]:
    """Which way the last call of this thread took; None before the first. Compiled graphs call operators too."""
    return None if LAST.taken is None else Taken(*LAST.taken)


def note(op: str, way: str, reason: str) -> None:
    LAST.taken = op, way, reason


def _described(t: Tensor) -> Tuple[int, Tuple[int, ...], Tuple[int, ...], str, bool]:
    """Where a tensor lies. Its caller keeps it until the call is made: an address keeps nothing."""
    return t.data_ptr(), t.shape, t.stride(), _CODES[t.dtype], True


def _described_if(t: Optional[Tensor]) -> Optional[Tuple[int, Tuple[int, ...], Tuple[int, ...], str, bool]]:
    return None if t is None else _described(t)


#: Whether tensors can be given to the native module as they are: it then finds out by PyTorch's table of
#: functions for DLPack what is slow to ask for here, and the current stream.
BY_TABLE = _native.describe_by_table(Tensor, torch.nn.Parameter)
# PyTorch's threads go on spinning behind each of its operations: threads of ours would wait for their processors.
_native.share_threads()
_kept: "set[Tuple[int, int]]" = set()


def _keep(index: int, raw: int) -> None:
    """Streams of PyTorch's own, which are never destroyed, need not be borrowed for each call. Others have even numbers."""
    number = torch._C._cuda_getCurrentStream(index)[0]
    if (number == 0 or number % 2 == 1) and raw != 2 and not torch.cuda.is_current_stream_capturing():
        _native.keep_stream(index, raw)
        _kept.add((index, raw))


def _current(t: Tensor) -> Any:
    """Makes the tensor's device the current one, where it is not."""
    index = t.device.index
    return _NOTHING if torch._C._cuda_getDevice() == index else torch.cuda.device(index)


_NOTHING = contextlib.nullcontext()


def _place(t: Tensor) -> Tuple[int, int]:
    index = t.device.index
    if not _cuda_known:
        if torch.cuda.is_current_stream_capturing():
            text = "the device is opened in the first call; swiglu.torch.warmup(module, tokens=[...]) before a capture does that"
            raise error("capture", "first call", text)
        find_cuda_libraries()
        _cuda_known.append(True)
    raw = torch._C._cuda_getCurrentRawStream(index)
    if BY_TABLE and (index, raw) not in _kept:
        _keep(index, raw)
    return index, raw


_cuda_known: "list[bool]" = []


def _rows_adjacent(t: Tensor) -> Tensor:
    """The tensor, or a copy where CUDA kernels could not address it: rows of adjacent elements with one stride."""
    if t.is_contiguous():
        return t
    if t.dim() > 0 and (t.shape[-1] <= 1 or t.stride(-1) == 1):
        try:
            return t.view(-1, t.shape[-1]) if t.numel() else t
        except RuntimeError:
            pass
    return t.contiguous()


def _direct(out: Optional[Tensor], shape: Sequence[int], like: Tensor, *others: Optional[Tensor]) -> Tensor:
    """What a CUDA kernel writes: ``out``, or a new tensor where it is none, shares memory with an input or lies otherwise."""
    if out is not None and out.is_contiguous():
        storage = out.untyped_storage().data_ptr()
        if all(t is None or t.untyped_storage().data_ptr() != storage for t in (like, *others)):
            return out
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def written(out: Tensor) -> Tensor:
    """A tensor that a kernel has written where PyTorch does not see it: what a gradient needs of it is refused from now on."""
    increment_version(out)
    return out


def _brought(direct: Tensor, out: Tensor) -> Tensor:
    return written(out) if direct is out else out.copy_(direct)


def _slow_here() -> "frozenset[torch.dtype]":
    """Types whose products PyTorch computes without instructions for them: float16 on x86 without AVX-512-FP16."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return frozenset()
    try:
        fast: bool = torch.ops.mkldnn._is_mkldnn_fp16_supported()
    except (AttributeError, RuntimeError):
        return frozenset()
    return frozenset() if fast else frozenset({torch.float16})


#: Types of a CPU's tensors over which our kernels compute blocks. They pack the weights in each call, which gains where PyTorch's
#: products are slow, and not beside those of oneDNN.
PACKED_IN_CALLS = _slow_here()
#: Tokens from which a forward pass gains by it.
_PACKED_FROM = 16


def packs(x: Tensor) -> bool:
    """Whether blocks over such tensors have their weights packed in each call."""
    return x.is_cpu and x.dtype in PACKED_IN_CALLS


def here(t: Optional[Tensor]) -> Optional[Tuple[int, Tuple[int, ...], Tuple[int, ...], str, bool]]:
    """Where a tensor of the host lies; one that autograd kept may come back as another."""
    if t is not None and not t.is_cpu:
        raise wrong("saved tensor", "one on cpu, where it was kept", f"one on {t.device}", "move it back", "layout")
    return _described_if(t)


def host_block(x: Tensor, parts: Parts, activation: str, y: Optional[Tensor], kept: Optional[Tensor]) -> None:
    """A block that packs its weights in the call: y, and gate and up, where they have a place."""
    # A description says nothing of a sign, and keeps nothing.
    values = [None if t is None else t.resolve_neg() for t in (x, *parts)]
    rows, *weights = map(here, values)
    _native.host_block_forward(activation_named(activation), rows, tuple(weights), here(y), here(kept))


#: Activations whose gate is 0 up to a point: there PyTorch has a gradient of 0, whatever it would be multiplied with.
CUT_OFF = "relu", "relu2"


def _no_kernels(t: Tensor) -> Optional[str]:
    """Why PyTorch computes: None where we have kernels."""
    if t.is_cpu and t.dtype in _CODES:
        return None
    if t.dtype not in _CODES:
        return f"kernels compute with float32, float16 and bfloat16, not {t.dtype}"
    if t.device.type not in ("cpu", "cuda"):
        return f"no kernels for the device type {t.device.type}"
    if t.device.type == "cuda" and torch.version.hip is not None:
        return "no kernels for AMD's GPUs"
    return None


def activation_into(
    op: str,
    gate: Tensor,
    up: Optional[Tensor],
    layout: Optional[str],
    activation: str,
    numerics: Optional[str],
    out: Optional[Tensor],
) -> Tensor:
    """h in ``out``, or in a new tensor."""
    made = _door.DOOR.activation(op, gate, up, layout, activation, numerics, out, False)
    if made is not None:
        return made
    act = activation_named(activation)
    shape = _check.activation_inputs(gate, up, layout)
    if out is not None:
        _check.expect_out(out, gate, shape)
    why = _no_kernels(gate)
    if why is not None:
        halves = (gate, up) if up is not None else _formulas.split(gate, layout or "")
        h = _formulas.forward(act, expect_numerics(numerics), *halves)
        note(op, "composed", why)
        return h if out is None else out.copy_(h)
    if gate.is_cpu:
        if out is not None:
            h = out
        elif up is not None and gate.is_contiguous():
            h = torch.empty_like(gate)
        else:
            h = torch.empty(shape, dtype=gate.dtype)
        described = _described(gate), _described_if(up), _described(h)
        _native.activation(act, numerics, layout, *described, of_pytorch=True)
        note(op, "native cpu", ONE_PASS_HERE)
        return h if out is None else written(h)
    with _current(gate):
        direct = _direct(out, shape, gate, up)
        first, second = _rows_adjacent(gate), None if up is None else _rows_adjacent(up)
        inputs = _described(first), _described_if(second)
        _native.cuda_activation(_place(gate), act, numerics, layout, *inputs, _described(direct))
        h = direct if out is None else _brought(direct, out)
    note(op, "native cuda", ONE_PASS)
    return h


def _room(gate: Tensor, up: Optional[Tensor]) -> Tuple[Tensor, Optional[Tensor]]:
    """Where the gradients of gate and up go: dense tensors of PyTorch's own type."""
    if type(gate) is Tensor and gate.is_contiguous():
        return torch.empty_like(gate), None if up is None else torch.empty_like(gate)
    # Whatever the default device is in a backward pass.
    first = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    return first, None if up is None else torch.empty_like(first)


def activation_backward(
    op: str,
    grad: Tensor,
    gate: Tensor,
    up: Optional[Tensor],
    layout: Optional[str],
    activation: str,
    numerics: Optional[str],
) -> Tuple[Tensor, Optional[Tensor]]:
    """The gradients of gate and up, in tensors of their own: of a packed tensor in one."""
    act = activation_named(activation)
    why = _no_kernels(gate)
    if why is None and gate.is_cpu:
        if numerics is not None and numerics.startswith("eager"):
            why = "the bits of PyTorch's operations were asked for"
        elif act.gate in CUT_OFF:
            why = "where the gate is not positive PyTorch has 0, whatever it would be multiplied with"
    grads = None
    if BY_TABLE and why is None and gate.layout is torch.strided:
        grad_gate, grad_up = grads = _room(gate, up)
        if _native.activation_backward_at_once(act, numerics, layout, grad, gate, up, grad_gate, grad_up):
            LAST.taken = (op, "native cuda", _BACKWARD) if gate.is_cuda else (op, "native cpu", _BACKWARD_HERE)
            return grad_gate, grad_up
    shape = _check.activation_inputs(gate, up, layout)
    _check.expect_alike("grad", grad, gate)
    _check.expect_shape("grad", grad, shape)
    if why is not None:
        halves = (gate, up) if up is not None else _formulas.split(gate, layout or "")
        made = _formulas.backward(act, numerics, grad, *halves)
        note(op, "composed", why)
        if up is not None:
            return tuple(g.contiguous() for g in made)  # type: ignore[return-value]
        return _formulas.join(*made, layout or ""), None
    grad_gate, grad_up = grads or _room(gate, up)
    if gate.is_cpu:
        _native.activation_backward(
            act, numerics, layout, _described(grad), _described(gate), _described_if(up),
            _described(grad_gate), _described_if(grad_up),
        )  # fmt: skip
        note(op, "native cpu", _BACKWARD_HERE)
        return grad_gate, grad_up
    with _current(gate):
        rows = _rows_adjacent(grad)
        first, second = _rows_adjacent(gate), None if up is None else _rows_adjacent(up)
        _native.cuda_activation_backward(
            _place(gate), act, numerics, layout,
            _described(rows), _described(first), _described_if(second),
            _described(grad_gate), _described_if(grad_up),
        )  # fmt: skip
    note(op, "native cuda", _BACKWARD)
    return grad_gate, grad_up


def linear(x: Tensor, weight: Tensor, bias: Optional[Tensor], numerics: Optional[str]) -> Tensor:
    """PyTorch's linear map; of 16-bit values in float32 where ``fused`` was asked for by name."""
    if x.dtype in HALVES and numerics is not None and numerics.startswith("fused"):
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return F.linear(x, weight, bias)


Parts = Tuple[Tensor, Optional[Tensor], Optional[Tensor], Optional[Tensor], Optional[Tensor], Optional[Tensor]]


def composed(x: Tensor, parts: Parts, activation: str, layout: str, numerics: Optional[str]) -> Tensor:
    """The layer of PyTorch's linear maps and our activation."""
    w_gate, w_up, w_down, b_gate, b_up, b_down = parts
    gate = linear(x, w_gate, b_gate, numerics)
    if w_up is not None:
        h = activation_into("", gate, linear(x, w_up, b_up, numerics), None, activation, numerics, None)
    else:
        h = activation_into("", gate, None, layout, activation, numerics, None)
    # h is a value of T between the two maps in every mode.
    if h.dtype != x.dtype:
        h = h.to(x.dtype)
    return h if w_down is None else F.linear(h, w_down, b_down)


# Layers over weights that stay where they are. Such a layer is what its key says and reads values in calls alone, so it is
# never out of date: another tensor at the same address, of this shape and type, has the same layer.
_borrowed: Dict[Tuple[object, ...], _native.Layer] = {}
_MOST_BORROWED = 4096


def _borrow(x: Tensor, parts: Parts, activation: str, numerics: Optional[str]) -> _native.Layer:
    index = x.device.index
    described = tuple(map(_described_if, parts))
    key = (index, activation, numerics, described)
    layer = _borrowed.get(key)
    if layer is None:
        if len(_borrowed) >= _MOST_BORROWED:
            _borrowed.clear()
        act: Activation = activation_named(activation)
        layer = _native.Layer.borrow(index, described, act, numerics)  # type: ignore[arg-type]
        _borrowed[key] = layer
    return layer


def _arranged(parts: Parts, layout: str) -> "Parts | str":
    """Weights as kernels read them where they lie, or why they cannot."""
    w_gate, w_up, w_down, b_gate, b_up, b_down = parts
    if w_up is None and layout != "gate-first":
        if layout != "up-first":
            return f"kernels read no {layout} weights where they lie"
        w_up, w_gate = w_gate.chunk(2)
        if b_gate is not None:
            b_up, b_gate = b_gate.chunk(2)
    elif w_up is None and b_gate is not None:
        w_gate, w_up = w_gate.chunk(2)
        b_gate, b_up = b_gate.chunk(2)
    if w_down is not None and w_down.shape[0] != w_gate.shape[1]:
        return "kernels compute blocks with as many output features as inputs"
    for weight in (w_gate, w_up, w_down):
        if weight is not None and weight.stride(-1) != 1:
            return "kernels read weights as rows of adjacent elements"
    return w_gate, w_up, w_down, b_gate, b_up, b_down


def layer_into(
    op: str, x: Tensor, parts: Parts, activation: str, layout: str, numerics: Optional[str], out: Optional[Tensor]
) -> Tensor:
    """A gated linear layer or a block, in ``out`` or in a new tensor."""
    if layout != "gate-first":
        _check.expect_layout_of(parts[1], layout)
    made = _door.DOOR.layer(op, x, parts, layout, activation, numerics, out, False)
    if made is not None:
        return made
    features = _check.layer(x, parts, layout)
    shape = (*x.shape[:-1], features)
    if out is not None:
        _check.expect_out(out, x, shape)
    why = _no_kernels(x)
    if why is None and x.is_cpu:
        result = _packing(op, x, parts, activation, layout, numerics, shape)
        if isinstance(result, Tensor):
            note(op, "native cpu", "weights packed in the call")
            return result if out is None else out.copy_(result)
        why = result
    if why is None:
        try:
            result = _on_cuda(x, parts, activation, layout, numerics, shape, out)
        except SwigluError as refused:
            if refused.kind != "unsupported":
                raise
            result = str(refused)
        if isinstance(result, Tensor):
            note(op, "native cuda", WHERE_THEY_LIE)
            return result
        why = result
    y = composed(x, parts, activation, layout, numerics)
    if x.dtype in HALVES and numerics is None:
        why += f"; gate and up are rounded to {x.dtype} between (numerics pre_round)"
    note(op, "composed", why)
    return y if out is None else out.copy_(y)


def _packing(
    op: str, x: Tensor, parts: Parts, activation: str, layout: str, numerics: Optional[str], shape: Tuple[int, ...]
) -> "Tensor | str":
    """The result of a block that packs its weights in the call, or why it does not."""
    if op != "mlp" or not packs(x):
        return (
            "the CPU's kernels read packed weights, and a packed copy could miss a change of these; "
            "swiglu.nn.MLP.freeze() makes one"
        )
    if numerics is not None:
        return "with numerics its maps are PyTorch's"
    if x.numel() < _PACKED_FROM * x.shape[-1] or x.numel() == 0:
        return f"weights are packed in calls of {_PACKED_FROM} tokens and more"
    arranged = _arranged(parts, layout)
    if isinstance(arranged, str):
        return arranged
    y = torch.empty(shape, dtype=x.dtype, device=x.device)
    host_block(x, arranged, activation, y, None)
    return y


def _on_cuda(
    x: Tensor,
    parts: Parts,
    activation: str,
    layout: str,
    numerics: Optional[str],
    shape: Tuple[int, ...],
    out: Optional[Tensor],
) -> "Tensor | str":
    arranged = _arranged(parts, layout)
    if isinstance(arranged, str):
        return arranged
    with _current(x):
        place = _place(x)
        return _enqueued(_borrow(x, arranged, activation, numerics), place, x, shape, out, *parts)


def _enqueued(
    layer: _native.Layer,
    place: Tuple[int, int],
    x: Tensor,
    shape: Tuple[int, ...],
    out: Optional[Tensor],
    *read: Optional[Tensor],
) -> Tensor:
    """The layer on the current stream, which is the place, in ``out`` or in a new tensor; what else it reads lies apart from it."""
    rows = _rows_adjacent(x)
    direct = _direct(out, shape, x, *read)
    tokens = x.numel() // max(x.shape[-1], 1)
    scratch = torch.empty(layer.workspace_bytes(tokens), dtype=torch.uint8, device=x.device)
    layer.forward_on(place, _described(rows), _described(direct), (scratch.data_ptr(), scratch.numel()))
    return direct if out is None else _brought(direct, out)


def packed(parts: Parts, activation: str, numerics: Optional[str]) -> _native.Layer:
    """A copy of weights on a CPU in the form its kernels read."""
    why = _no_kernels(parts[0])
    if why is None and parts[0].device.type != "cpu":
        why = "packed layers of this module are for the CPU; a CUDA device computes over the weights where they lie"
    if why is not None:
        raise error("unsupported", "packing", why)
    # Negated views are read as what they stand for.
    parts = tuple(None if t is None else t.resolve_neg() for t in parts)  # type: ignore[assignment]
    described = tuple(map(_described_if, parts))
    arrangement = "gate-first" if parts[1] is None else None
    if arrangement is not None and parts[3] is not None:
        b_gate, b_up = parts[3].chunk(2)
        described = (*described[:3], _described(b_gate), _described(b_up), described[5])
    act = activation_named(activation)
    return _native.Layer.pack(described, act, numerics, arrangement)  # type: ignore[arg-type]


def _of_packed(what: str, t: Tensor, layer: _native.Layer, device: str) -> Tensor:
    """The values of a tensor that a packed layer can read, or write, where they lie."""
    _check.expect_dense(what, t)
    if str(t.device) != device:
        advice = "load the layer for that device, move the tensor, or let a module of swiglu.nn compute there"
        raise wrong(what, f"a tensor on {device}", f"one on {t.device}", advice, "layout")
    if t.requires_grad and torch.is_grad_enabled():
        text = f"{what} requires one and packed weights give none; use torch.no_grad(), or a block of swiglu.nn"
        raise error("unsupported", "gradient", text)
    if _CODES.get(t.dtype) != layer.dtype:
        raise wrong(what, f"{layer.dtype} elements", str(t.dtype), f"convert it to {layer.dtype}", "dtype")
    _check.expect_no_tangent(t)
    values = t.detach().resolve_neg()
    if not _door.holds_values(values) or _door.recorded():
        advice = "call the layer outside of torch.func's transforms and of tracing"
        raise wrong(what, "a tensor with values of its own", "one that another wraps", advice, "unsupported")
    return values


@torch.compiler.disable  # type: ignore[untyped-decorator]
def packed_forward(layer: _native.Layer, x: Tensor, out: Optional[Tensor] = None) -> Tensor:
    """The result of a packed layer, in ``out`` or in a new tensor: on its device, or for a tensor of the host."""
    _check.expect_tensors(("x", "out"), (x, out), 1)
    there = layer.place
    device = there if x.is_cuda and there.startswith("cuda") else "cpu"
    values = _of_packed("x", x, layer, device)
    if x.dim() == 0 or x.shape[-1] != layer.hidden:
        raise shape_error("x", f"[..., {layer.hidden}]", str(list(x.shape)) if x.dim() else "a scalar")
    shape = (*x.shape[:-1], layer.out_features)
    y = None
    if out is not None:
        _check.expect_shape("out", out, shape)
        y = _of_packed("out", out, layer, device)
        _check.expect_written(out)
    if device == "cpu":
        result = torch.empty(shape, dtype=x.dtype, device="cpu") if y is None else y
        layer.forward(_described(values), _described(result))
        y = result if y is None else written(y)
    else:
        if not _cuda_known:
            # Who made the layer has opened the device.
            _cuda_known.append(True)
        with _current(x):
            y = _enqueued(layer, _place(x), values, shape, y)
    note(layer.kind, f"native {there.partition(':')[0]}", "packed weights")
    return y if out is None else out
