"""Gated activations, gated linear layers and feed-forward blocks for PyTorch's tensors.

Importing this module defines ``torch.ops.swiglu``. Tensors of a CPU and of CUDA devices are computed by our kernels,
whatever else by PyTorch's operations; :func:`explain_last` says which, and why. ``activation`` is a name such as
``swiglu``, ``geglu-tanh`` or ``clamped-swiglu(alpha=1.702,offset=1,limit=7)``; ``numerics`` says where 16-bit values are
rounded: ``fused``, ``pre_round`` or ``eager``, of which the last is PyTorch's order.
"""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple, Union

import torch
import torch.fx
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .._activation import as_activation
from .._errors import error, expect_choice, expect_flag, expect_layout, said, wrong
from .._native import Activation
from . import _check, _door, _kernels, _main_grad, _ops, _training
from ._graphs import Bucket, Graphed, graphed, warmup
from ._kernels import Taken, explain_last

__all__ = [
    "Bucket",
    "Graphed",
    "Taken",
    "explain_last",
    "gated_linear",
    "glu",
    "graphed",
    "mlp",
    "silu_mul",
    "warmup",
]


def _name(activation: Union[str, Activation], numerics: Optional[str]) -> str:
    if numerics is not None:
        _check.expect_name("numerics", numerics)
    return activation if isinstance(activation, str) else str(as_activation(activation))


def silu_mul(
    gate: Tensor,
    up: Tensor,
    *,
    activation: Union[str, Activation] = "swiglu",
    numerics: Optional[str] = None,
    out: Optional[Tensor] = None,
) -> Tensor:
    """``act(gate) * up``, element by element, for two ``[..., H]`` tensors of any strides."""
    if not _door.traced():
        made = _door.DOOR.activation("silu_mul", gate, up, None, activation, numerics, out, True)
        if made is NotImplemented:
            return _ops.eager(gate, up, None, _name(activation, numerics), numerics)
        if made is not None:
            return made
    if not (isinstance(gate, Tensor) and isinstance(up, Tensor) and (out is None or isinstance(out, Tensor))):
        _check.expect_tensors(("gate", "up", "out"), (gate, up, out), 2)
    name = _name(activation, numerics)
    if _door.nothing_in_force() and _door.plain(gate, up, out):
        if not _door.wants_gradient(gate, up, out):
            return _kernels.activation_into("silu_mul", gate, up, None, name, numerics, out)
        if out is None:
            return _ops.eager(gate, up, None, name, numerics)
    _check.expect_dense("gate", gate)
    _check.expect_dense("up", up)
    if out is not None:
        _check.expect_written(out)
        torch.ops.swiglu.silu_mul.out(gate, up, name, numerics, out=out)
        return out
    result: Tensor
    if _door.transformed():
        result = _ops.SILU_MUL.call(gate, up, name, numerics)
    else:
        result = torch.ops.swiglu.silu_mul(gate, up, name, numerics)
    return result


def glu(
    x: Tensor,
    activation: Union[str, Activation] = "swiglu",
    *,
    layout: str = "gate-first",
    numerics: Optional[str] = None,
    out: Optional[Tensor] = None,
) -> Tensor:
    """``act(gate) * up`` for both in one ``[..., 2H]`` tensor: ``gate-first``, ``up-first`` or ``interleaved-G``."""
    if not _door.traced() and layout is not None:
        made = _door.DOOR.activation("glu", x, None, layout, activation, numerics, out, True)
        if made is NotImplemented:
            return _ops.eager(x, None, layout, _name(activation, numerics), numerics)
        if made is not None:
            return made
    if not (isinstance(x, Tensor) and (out is None or isinstance(out, Tensor))):
        _check.expect_tensors(("x", "out"), (x, out), 1)
    name = _name(activation, numerics)
    if not isinstance(layout, str):
        expect_layout(layout)
    if _door.nothing_in_force() and _door.plain(x, out):
        if not _door.wants_gradient(x, out):
            return _kernels.activation_into("glu", x, None, layout, name, numerics, out)
        if out is None:
            return _ops.eager(x, None, layout, name, numerics)
    _check.expect_dense("x", x)
    if out is not None:
        _check.expect_written(out)
        torch.ops.swiglu.glu.out(x, name, layout, numerics, out=out)
        return out
    result: Tensor
    if _door.transformed():
        result = _ops.GLU.call(x, name, layout, numerics)
    else:
        result = torch.ops.swiglu.glu(x, name, layout, numerics)
    return result


def _maps(x: Tensor, parts: _kernels.Parts, name: str, layout: str, numerics: Optional[str], fused: bool) -> Tensor:
    """The layer of linear maps that autograd knows: what it saves are x, the weights, gate and up, and of a block h."""
    w_gate, w_up, w_down, b_gate, b_up, b_down = parts

    def linear(what: str, x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
        return _main_grad.linear(what, x, weight, bias) if fused else torch.nn.functional.linear(x, weight, bias)

    gate = linear("w_gate", x, w_gate, b_gate)
    if w_up is None:
        h = glu(gate, name, layout=layout, numerics=numerics)
    else:
        h = silu_mul(gate, linear("w_up", x, w_up, b_up), activation=name, numerics=numerics)
    return h if w_down is None else linear("w_down", h, w_down, b_down)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _fused(x: Tensor, parts: _kernels.Parts, name: str, layout: str, keeps: bool) -> Tensor:
    """The layer whose weights' gradients go to their ``main_grad``. Compiled code calls it: what it does to attributes of
    parameters in the backward pass is in no graph."""
    casts = _door.autocasts() and x.dtype != torch.float64
    _check.layer(x, parts, layout, cast=casts)
    _main_grad.expect(x, parts, torch.get_autocast_dtype(x.device.type) if casts else x.dtype)
    if parts[2] is not None and _training.takes(x) and _door.nothing_in_force() and _door.plain(x, *parts):
        block = _training.block(x, parts, name, layout, True, keeps)
        if block is not None:
            return block
    if not keeps:
        made: Tensor = checkpoint(
            _maps, x, parts, name, layout, None, True, use_reentrant=False, preserve_rng_state=False
        )
        return made
    return _maps(x, parts, name, layout, None, True)


def _saves(save: str) -> bool:
    return expect_choice("save", save, ("preact", "input")) == "preact"


def _fuses(gradient_accumulation_fusion: bool, numerics: Optional[str]) -> bool:
    """Whether gradients of weights go to their ``main_grad``, once both options are seen to go together."""
    fuses = expect_flag("gradient_accumulation_fusion", gradient_accumulation_fusion)
    if fuses and numerics is not None:
        text = "is PyTorch's of its linear maps with gradient_accumulation_fusion; leave one of both away"
        raise error("unsupported", "numerics", text)
    return fuses


def _with_autograd(out: Optional[Tensor], numerics: Optional[str], wanted: bool) -> bool:
    """Whether linear maps that autograd knows are called."""
    return out is None and numerics is None and (wanted or _door.transformed())


def gated_linear(
    x: Tensor,
    w_gate: Tensor,
    w_up: Optional[Tensor] = None,
    b_gate: Optional[Tensor] = None,
    b_up: Optional[Tensor] = None,
    *,
    activation: Union[str, Activation] = "swiglu",
    layout: str = "gate-first",
    save: str = "preact",
    numerics: Optional[str] = None,
    gradient_accumulation_fusion: bool = False,
    out: Optional[Tensor] = None,
) -> Tensor:
    """``act(x·w_gateᵀ + b_gate, x·w_upᵀ + b_up)`` for x ``[..., K]`` and weights ``[H, K]``, as ``torch.nn.Linear`` has them.

    Without ``w_up``, ``w_gate`` has both, ``[2H, K]`` in ``layout``, and ``b_gate`` both biases. For the backward pass
    ``save="preact"`` keeps gate and up, ``"input"`` computes them again from x. With ``gradient_accumulation_fusion`` gradients
    of weights are added to their attribute ``main_grad``, as Megatron-Core's are.
    """
    keeps = _saves(save)
    fuses = gradient_accumulation_fusion is not False and _fuses(gradient_accumulation_fusion, numerics)
    parts: _kernels.Parts = (w_gate, w_up, None, b_gate, b_up, None)
    if layout != "gate-first":
        _check.expect_layout_of(w_up, layout)
    if not _door.traced():
        made = _door.DOOR.layer("gated_linear", x, parts, layout, activation, numerics, out, True)
        if made is not None and made is not NotImplemented:
            return made
    name = _name(activation, numerics)
    tensors = (x, w_gate, w_up, b_gate, b_up)
    _check.expect_tensors(("x", "w_gate", "w_up", "b_gate", "b_up", "out"), (x, w_gate, w_up, b_gate, b_up, out), 2)
    wanted = _door.wants_gradient(*tensors, out)
    if wanted and out is None and fuses:
        fused: Tensor = _fused(x, parts, name, layout, keeps)
        return fused
    if _with_autograd(out, numerics, keeps and wanted):
        _check.layer(x, parts, layout, cast=_door.autocasts())
        return _maps(x, parts, name, layout, numerics, False)
    if not wanted and _door.nothing_in_force():
        if _door.plain(*tensors, out):
            return _ops.BODIES["gated_linear"](*tensors, name, layout, numerics, out=out)
    _check.expect_dense("x", x)
    if out is not None:
        _check.expect_written(out)
        torch.ops.swiglu.gated_linear.out(*tensors, name, layout, numerics, out=out)
        return out
    result: Tensor = torch.ops.swiglu.gated_linear(*tensors, name, layout, numerics)
    return result


#: Those that may be left out come last.
_OF_BLOCKS = ("x", "w_gate", "w_down", "w_up", "b_gate", "b_up", "b_down", "out")


def mlp(
    x: Tensor,
    w_gate: Tensor,
    w_up: Optional[Tensor],
    w_down: Tensor,
    *,
    biases: Optional[Tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]] = None,
    activation: Union[str, Activation] = "swiglu",
    layout: str = "gate-first",
    save: str = "preact",
    numerics: Optional[str] = None,
    gradient_accumulation_fusion: bool = False,
    row_scale: Optional[Tensor] = None,
    out: Optional[Tensor] = None,
) -> Tensor:
    """The feed-forward block: :func:`gated_linear`, then ``h·w_downᵀ + b_down`` for ``w_down`` ``[K, H]``.

    ``biases`` are those of gate, up and down, each a tensor or None. ``row_scale``, of the shape of x but its last dimension, has
    a factor for each row of the result, as a router weighs the tokens of an expert: its gradient needs no copy of the result.
    """
    if row_scale is not None:
        how = {"biases": biases, "activation": activation, "layout": layout, "save": save, "numerics": numerics}
        fuses = gradient_accumulation_fusion
        return _scaled(row_scale, (x, w_gate, w_up, w_down), how, fuses, out)
    keeps = _saves(save)
    fuses = gradient_accumulation_fusion is not False and _fuses(gradient_accumulation_fusion, numerics)
    if biases is None:
        biases = None, None, None
    elif not isinstance(biases, (tuple, list)) or len(biases) != 3:
        given = f"{len(biases)} of them" if isinstance(biases, (tuple, list)) else said(biases)
        raise wrong("biases", "those of gate, up and down, each a tensor or None", given)
    b_gate, b_up, b_down = biases
    parts: _kernels.Parts = (w_gate, w_up, w_down, b_gate, b_up, b_down)
    if layout != "gate-first":
        _check.expect_layout_of(w_up, layout)
    if w_down is not None and not _door.traced():
        at_once = _door.DOOR.layer("mlp", x, parts, layout, activation, numerics, out, True)
        if at_once is NotImplemented and numerics is None and not fuses:
            # Nothing but the gradient is to be done for these tensors.
            _check.layer(x, parts, layout, alike=True)
            trained = _training.block(x, parts, _name(activation, None), layout, False, keeps)
            if trained is not None:
                return trained
        elif at_once is not None and at_once is not NotImplemented:
            return at_once
    name = _name(activation, numerics)
    tensors = (x, w_gate, w_up, w_down, b_gate, b_up, b_down)
    _check.expect_tensors(_OF_BLOCKS, (x, w_gate, w_down, w_up, b_gate, b_up, b_down, out), 3)
    wanted = _door.wants_gradient(*tensors, out)
    if wanted and out is None and fuses:
        fused: Tensor = _fused(x, parts, name, layout, keeps)
        return fused
    if _with_autograd(out, numerics, wanted):
        _check.layer(x, parts, layout, cast=_door.autocasts())
        if _training.takes(x) and _door.nothing_in_force() and _door.plain(*tensors):
            made = _training.block(x, parts, name, layout, False, keeps)
            if made is not None:
                return made
        elif keeps and _door.compiling():
            made = _training.in_graph(x, parts, name, layout)
            if made is not None:
                return made
        if keeps or _door.transformed():
            return _maps(x, parts, name, layout, numerics, False)
    if not wanted and _door.nothing_in_force():
        if _door.plain(*tensors, out):
            return _ops.BODIES["mlp"](*tensors, name, layout, numerics, out=out)
    _check.expect_dense("x", x)
    if out is not None:
        _check.expect_written(out)
        torch.ops.swiglu.mlp.out(*tensors, name, layout, numerics, out=out)
        return out
    result: Tensor = torch.ops.swiglu.mlp(*tensors, name, layout, numerics)
    return result


def _scaled(
    row_scale: Tensor, tensors: Tuple[Any, ...], how: Dict[str, Any], fuses: bool, out: Optional[Tensor]
) -> Tensor:
    """The block, each row times its factor: by one backward pass for both where a kernel has it, else as two operations."""
    x, biases = tensors[0], how["biases"]
    _check.expect_tensors(("x",), (x,), 1)
    _check.row_scale(row_scale, x)
    if biases is None:
        biases = None, None, None
    if out is None and fuses is False and how["numerics"] is None and isinstance(biases, (tuple, list)) and len(biases) == 3:
        parts: _kernels.Parts = (*tensors[1:], *biases)
        every = (x, *parts, row_scale)
        _check.expect_tensors(("x", "w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down"), every[:-1], 2)
        if _door.wants_gradient(*every) and _training.takes(x) and _door.nothing_in_force() and _door.plain(*every):
            name, layout = _name(how["activation"], None), how["layout"]
            _check.layer(x, parts, layout)
            made = _training.block(x, parts, name, layout, False, _saves(how["save"]), row_scale)
            if made is not None:
                return made
    if out is None:
        return _by_rows(mlp(*tensors, **how, gradient_accumulation_fusion=fuses), row_scale)
    if _door.wants_gradient(row_scale):
        _ops.no_gradient_with_out("row_scale")
    # They may lie where the result goes.
    factors = row_scale.unsqueeze(-1).clone()
    return mlp(*tensors, **how, gradient_accumulation_fusion=fuses, out=out).mul_(factors)


def _times(y: Tensor, x: Tensor, row_scale: Optional[Tensor]) -> Tensor:
    """Rows of a result of x times their factors, where they have some."""
    if row_scale is None:
        return y
    _check.row_scale(row_scale, x)
    return _by_rows(y, row_scale)


def _by_rows(y: Tensor, row_scale: Tensor) -> Tensor:
    return (y * row_scale.unsqueeze(-1)).to(y.dtype)


# torch.fx.symbolic_trace calls with what is no tensor: a call of these stays a node of its graph.
for _kept in ("silu_mul", "glu", "gated_linear", "mlp", "_times"):
    torch.fx.wrap(_kept)
