"""``torch.ops.swiglu``: operators with kernels, shapes of results, gradients, autocast and vmap.

They are defined and implemented through a library, because what ``torch.library.custom_op`` wraps around a call takes longer
than a small kernel. Each has an overload ``out``.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, List, NoReturn, Optional, Tuple, Type

import torch
from torch import Tensor

from .._errors import error, shape_error
from . import _check, _door, _kernels
from ._kernels import Parts
from ._once import no_second_derivative

LIBRARY = torch.library.Library("swiglu", "DEF")

# No argument has a default: PyTorch 2.15's Inductor passes those of an operator with an overload `out` twice.
_HOW = "str activation, str? numerics"
_HOW_PACKED = "str activation, str layout, str? numerics"
_GATED = "Tensor x, Tensor w_gate, Tensor? w_up, Tensor? b_gate, Tensor? b_up"
BLOCK = "Tensor x, Tensor w_gate, Tensor? w_up, Tensor w_down, Tensor? b_gate, Tensor? b_up, Tensor? b_down"
_ARGUMENTS: Dict[str, str] = {
    "silu_mul": f"Tensor gate, Tensor up, {_HOW}",
    "glu": f"Tensor x, {_HOW_PACKED}",
    "gated_linear": f"{_GATED}, {_HOW_PACKED}",
    "mlp": f"{BLOCK}, {_HOW_PACKED}",
}
_DEVICES = "CompositeExplicitAutograd"


# What each computes. Arguments are those of the schema; `out` is None or where the result goes.


def _silu_mul(
    gate: Tensor, up: Tensor, activation: str, numerics: Optional[str], *, out: Optional[Tensor] = None
) -> Tensor:
    return _kernels.activation_into("silu_mul", gate, up, None, activation, numerics, out)


def _glu(
    x: Tensor,
    activation: str,
    layout: str,
    numerics: Optional[str],
    *,
    out: Optional[Tensor] = None,
) -> Tensor:
    return _kernels.activation_into("glu", x, None, layout, activation, numerics, out)


def _gated_linear(
    x: Tensor,
    w_gate: Tensor,
    w_up: Optional[Tensor],
    b_gate: Optional[Tensor],
    b_up: Optional[Tensor],
    activation: str,
    layout: str,
    numerics: Optional[str],
    *,
    out: Optional[Tensor] = None,
) -> Tensor:
    parts: Parts = (w_gate, w_up, None, b_gate, b_up, None)
    return _kernels.layer_into("gated_linear", x, parts, activation, layout, numerics, out)


def _mlp(
    x: Tensor,
    w_gate: Tensor,
    w_up: Optional[Tensor],
    w_down: Tensor,
    b_gate: Optional[Tensor],
    b_up: Optional[Tensor],
    b_down: Optional[Tensor],
    activation: str,
    layout: str,
    numerics: Optional[str],
    *,
    out: Optional[Tensor] = None,
) -> Tensor:
    parts: Parts = (w_gate, w_up, w_down, b_gate, b_up, b_down)
    return _kernels.layer_into("mlp", x, parts, activation, layout, numerics, out)


BODIES: Dict[str, Callable[..., Tensor]] = {
    "silu_mul": _silu_mul,
    "glu": _glu,
    "gated_linear": _gated_linear,
    "mlp": _mlp,
}


# Shapes of results, for tensors without values. The same checks as those of the kernels.


def _shape_of(name: str, args: Tuple[Any, ...]) -> Tuple[int, ...]:
    if name == "silu_mul":
        return tuple(_check.activation_inputs(args[0], args[1], None))
    if name == "glu":
        return tuple(_check.activation_inputs(args[0], None, args[2]))
    if name == "gated_linear":
        x, w_gate, w_up, b_gate, b_up, _, layout, _ = args
        return (*x.shape[:-1], _check.layer(x, (w_gate, w_up, None, b_gate, b_up, None), layout))
    x, w_gate, w_up, w_down, b_gate, b_up, b_down, _, layout, _ = args
    return (*x.shape[:-1], _check.layer(x, (w_gate, w_up, w_down, b_gate, b_up, b_down), layout))


def _fake(name: str) -> Callable[..., Tensor]:
    def fake(*args: Any) -> Tensor:
        shape = _shape_of(name, args)
        return torch.empty(shape, dtype=args[0].dtype, device=args[0].device)

    return fake


def _fake_out(name: str) -> Callable[..., None]:
    def fake(*args: Any, out: Tensor) -> None:
        _check.expect_out(out, args[0], _shape_of(name, args))

    return fake


def _out(name: str) -> Callable[..., None]:
    body = BODIES[name]

    def kernel(*args: Any, out: Tensor) -> None:
        body(*args, out=out)

    return kernel


def no_gradient_with_out(what: str) -> NoReturn:
    text = "with `out` there is no gradient, and an argument requires one; leave `out` away, or use torch.no_grad()"
    raise error("unsupported", what, text)


def _out_without_gradient(name: str) -> Callable[..., None]:
    def kernel(keyset: Any, *args: Any, out: Tensor) -> None:
        tensors = [t for t in (*args, out) if isinstance(t, Tensor)]
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            no_gradient_with_out(name)
        _check.expect_no_tangent(*tensors)
        with torch._C._AutoDispatchBelowAutograd():
            getattr(torch.ops.swiglu, name).out.redispatch(keyset & torch._C._after_autograd_keyset, *args, out=out)

    return kernel


# Gradients. Matrix products are PyTorch's; what is saved are inputs, so that nothing is written that somebody else reads.


def _silu_mul_backward(
    grad: Tensor, gate: Tensor, up: Tensor, activation: str, numerics: Optional[str]
) -> Tuple[Tensor, Tensor]:
    grads = _kernels.activation_backward("silu_mul_backward", grad, gate, up, None, activation, numerics)
    return grads  # type: ignore[return-value]


def _glu_backward(grad: Tensor, x: Tensor, activation: str, layout: str, numerics: Optional[str]) -> Tensor:
    return _kernels.activation_backward("glu_backward", grad, x, None, layout, activation, numerics)[0]


def _save(ctx: Any, inputs: Tuple[Any, ...], kept: Tuple[Tensor, ...] = ()) -> None:
    ctx.mark_non_differentiable(*kept)
    ctx.save_for_backward(*(a if isinstance(a, Tensor) else None for a in inputs), *kept)
    ctx.how = [a for a in inputs if isinstance(a, str)], inputs[-1]
    ctx.inputs = len(inputs)


def _padded(ctx: Any, *grads: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
    return (*grads, *(None,) * (ctx.inputs - len(grads)))


def _silu_mul_gradient(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
    gate, up, *_ = ctx.saved_tensors
    (activation, *_), numerics = ctx.how
    call = _SILU_MUL_BACKWARD.call if _door.transformed() else torch.ops.swiglu.silu_mul_backward
    d_gate, d_up = call(grad, gate, up, activation, numerics)
    wanted = ctx.needs_input_grad
    return _padded(ctx, d_gate if wanted[0] else None, d_up if wanted[1] else None)


def _glu_gradient(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
    x, *_ = ctx.saved_tensors
    (activation, layout, *_), numerics = ctx.how
    call = _GLU_BACKWARD.call if _door.transformed() else torch.ops.swiglu.glu_backward
    return _padded(ctx, call(grad, x, activation, layout, numerics))


def _rows(t: Tensor) -> Tensor:
    """A tensor as ``[tokens, features]``."""
    # With no features -1 is any number of rows.
    return t.reshape(math.prod(t.shape[:-1]), t.shape[-1])


def _through(grad: Tensor, x: Tensor, weight: Tensor, wanted: List[bool]) -> List[Optional[Tensor]]:
    """The gradients of x, weight and bias of a linear map, those that are wanted."""
    grad, rows = _rows(grad), _rows(x)
    return [
        (grad @ weight).reshape(x.shape) if wanted[0] else None,
        grad.t() @ rows if wanted[1] else None,
        grad.sum(0) if wanted[2] else None,
    ]


def _layer_gradients(
    grad_h: Tensor,
    x: Tensor,
    parts: Parts,
    made: Tuple[Tensor, Optional[Tensor]],
    how: Tuple[str, str, Optional[str]],
    wanted: Dict[str, bool],
) -> Dict[str, Optional[Tensor]]:
    """The gradients of a gated linear layer from that of h and the maps' results."""
    w_gate, w_up, _, b_gate, b_up, _ = parts
    activation, layout, numerics = how
    gate, up = made
    ops = torch.ops.swiglu
    if w_up is None or up is None:
        both = ops.glu_backward(grad_h, gate, activation, layout, numerics)
        need = [wanted["x"], wanted["w_gate"], wanted["b_gate"]]
        return dict(zip(("x", "w_gate", "b_gate"), _through(both, x, w_gate, need)))
    d_gate, d_up = ops.silu_mul_backward(grad_h, gate, up, activation, numerics)
    need = [wanted["x"], wanted["w_gate"], wanted["b_gate"]]
    grads = dict(zip(("x", "w_gate", "b_gate"), _through(d_gate, x, w_gate, need)))
    need = [wanted["x"], wanted["w_up"], wanted["b_up"]]
    x_too, grads["w_up"], grads["b_up"] = _through(d_up, x, w_up, need)
    if grads["x"] is not None and x_too is not None:
        grads["x"] = grads["x"] + x_too
    return grads


_GATED_NAMES = ("x", "w_gate", "w_up", "b_gate", "b_up")
_BLOCK_NAMES = ("x", "w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down")


def _linear_maps(x: Tensor, parts: Parts) -> Tuple[Tensor, Optional[Tensor]]:
    w_gate, w_up, _, b_gate, b_up, _ = parts
    gate = torch.nn.functional.linear(x, w_gate, b_gate)
    return gate, None if w_up is None else torch.nn.functional.linear(x, w_up, b_up)


def _gated_linear_gradient(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
    x, w_gate, w_up, b_gate, b_up, *_ = ctx.saved_tensors
    (activation, layout, *_), numerics = ctx.how
    how = activation, layout, numerics
    parts: Parts = (w_gate, w_up, None, b_gate, b_up, None)
    wanted = dict(zip(_GATED_NAMES, ctx.needs_input_grad))
    grads = _layer_gradients(grad, x, parts, _linear_maps(x, parts), how, wanted)
    return _padded(ctx, *(grads.get(name) for name in _GATED_NAMES))


def _mlp_gradient(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
    x, w_gate, w_up, w_down, b_gate, b_up, b_down, *_ = ctx.saved_tensors
    (activation, layout, *_), numerics = ctx.how
    how = activation, layout, numerics
    parts: Parts = (w_gate, w_up, w_down, b_gate, b_up, b_down)
    wanted = dict(zip(_BLOCK_NAMES, ctx.needs_input_grad))
    made = _linear_maps(x, parts)
    ops = torch.ops.swiglu
    gate, up = made
    if wanted["w_down"]:
        h = ops.glu(gate, *how) if up is None else ops.silu_mul(gate, up, activation, numerics)
    else:
        h = gate.new_empty((*gate.shape[:-1], w_down.shape[1]))
    first = any(wanted[name] for name in ("x", "w_gate", "w_up", "b_gate", "b_up"))
    d_h, d_down, d_bias = _through(grad, h, w_down, [first, wanted["w_down"], wanted["b_down"]])
    grads: Dict[str, Optional[Tensor]] = {}
    if d_h is not None:
        grads = _layer_gradients(d_h, x, parts, made, how, wanted)
    grads.update(w_down=d_down, b_down=d_bias)
    return _padded(ctx, *(grads.get(name) for name in _BLOCK_NAMES))


_GRADIENTS: Dict[str, Callable[..., Any]] = {
    "silu_mul": _silu_mul_gradient,
    "glu": _glu_gradient,
    "gated_linear": _gated_linear_gradient,
    "mlp": _mlp_gradient,
}


def no_second_gradient(ctx: Any, *grads: Tensor) -> Any:
    no_second_derivative()


def _fake_backward(grad: Tensor, *inputs: Any) -> Any:
    made = tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in inputs if isinstance(t, Tensor))
    return made if len(made) == 2 else made[0]


class _Function(torch.autograd.Function):
    """An operator in the form that PyTorch's transforms ask for; in plain eager its own gradient is quicker."""

    op: str

    @classmethod
    def call(cls, *args: Any) -> Any:
        return cls.apply(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Tuple[Any, ...], output: Any) -> None:
        _save(ctx, inputs)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _check.no_forward_mode()


def _function(op: str, gradient: Callable[..., Any]) -> Type[_Function]:
    def forward(*args: Any) -> Any:
        return getattr(torch.ops.swiglu, op)(*args)

    def vmap(info: Any, in_dims: Tuple[Optional[int], ...], *args: Any) -> Any:
        result = made.call(*_moved(op, info, in_dims, args))
        return result, (0,) * len(result) if isinstance(result, tuple) else 0

    body = {"forward": staticmethod(forward), "backward": staticmethod(gradient), "vmap": staticmethod(vmap), "op": op}
    made: Type[_Function] = type(f"Function_{op}", (_Function,), body)
    return made


class _Eager(torch.autograd.Function):
    """The activation with a gradient in plain eager: half of what the dispatcher's own takes."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Optional[Tensor], *how: Optional[str]) -> Tensor:
        layout, activation, numerics = how
        ctx.save_for_backward(gate, up)
        ctx.how = how
        op = "glu" if up is None else "silu_mul"
        return _kernels.activation_into(op, gate, up, layout, activation or "", numerics, None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        gate, up = ctx.saved_tensors
        layout, activation, numerics = ctx.how
        wanted = ctx.needs_input_grad
        if torch.is_grad_enabled() or not (_door.nothing_in_force() and _door.plain(grad, gate, up)):
            # The operators know that they have no gradient of their own, and modes and batches of gradients know them.
            ops = torch.ops.swiglu
            if up is None:
                return ops.glu_backward(grad, gate, activation, layout, numerics), None, None, None, None
            d_gate, d_up = ops.silu_mul_backward(grad, gate, up, activation, numerics)
        else:
            op = "glu_backward" if up is None else "silu_mul_backward"
            d_gate, d_up = _kernels.activation_backward(op, grad, gate, up, layout, activation, numerics)
        return d_gate if wanted[0] else None, d_up if wanted[1] else None, None, None, None


def eager(gate: Tensor, up: Optional[Tensor], layout: Optional[str], activation: str, numerics: Optional[str]) -> Tensor:
    made: Tensor = _Eager.apply(gate, up, layout, activation, numerics)
    return made


SILU_MUL = _function("silu_mul", _silu_mul_gradient)
GLU = _function("glu", _glu_gradient)
_SILU_MUL_BACKWARD = _function("silu_mul_backward", no_second_gradient)
_GLU_BACKWARD = _function("glu_backward", no_second_gradient)


# A kernel before those of devices, for gradients. That of ``torch.library.register_autograd`` sends every call through the
# dispatcher again; here one without a gradient, that only a device's kernel is left for, goes to its body.

_after_autograd = torch._C._after_autograd_keyset


def _any_of_these_requires_grad(*args: Any) -> bool:
    return any(isinstance(t, Tensor) and t.requires_grad for t in args)


#: PyTorch's own since 2.7 or so.
_any_requires_grad: Callable[..., bool] = getattr(torch._C, "_any_requires_grad", _any_of_these_requires_grad)
_DEVICE_KEYS = torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA
#: Of sets of keys that were met: whether the next is a device's. To ask for it takes a microsecond.
_device_is_next: Dict[int, bool] = {}


def _with_gradient(
    name: str, body: Callable[..., Any], gradient: Callable[..., Any], keeps: bool = False
) -> Callable[..., Any]:
    """``keeps``: whether what it makes behind the first result is for the gradient only."""
    op = getattr(torch.ops.swiglu, name).default

    def beside(keyset: Any, args: Tuple[Any, ...]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset, *args)

    def forward(ctx: Any, *args: Any) -> Any:
        inputs, keyset = args[:-1], args[-1]
        result = beside(keyset, inputs)
        _save(ctx, inputs, result[1:] if keeps else ())
        return result

    def backward(ctx: Any, *grads: Tensor) -> Tuple[Optional[Tensor], ...]:
        return (*gradient(ctx, *grads), None)

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(f"Gradient_{name}", (torch.autograd.Function,), members)

    def kernel(keyset: Any, *args: Any) -> Any:
        _check.expect_no_tangent(*args)
        if torch.is_grad_enabled() and _any_requires_grad(*args):
            return function.apply(*args, keyset & _after_autograd)
        raw = keyset.raw_repr()
        at_once = _device_is_next.get(raw)
        if at_once is None:
            at_once = (keyset & _after_autograd).highestPriorityTypeId() in _DEVICE_KEYS
            _device_is_next[raw] = at_once
        return body(*args) if at_once else beside(keyset & _after_autograd, args)

    return kernel


# Autocast: linear maps take the type it is set to, as PyTorch's do; the activation takes its inputs' widest.


def _autocast(name: str, device: str, key: "torch._C.DispatchKey", overload: str) -> Callable[..., Any]:
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        op = getattr(getattr(torch.ops.swiglu, name), overload)
        floats = [t for t in args if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64]
        dtype = torch.get_autocast_dtype(device)
        if name in ("silu_mul", "glu") and floats:
            dtype = floats[0].dtype
            for t in floats[1:]:
                dtype = torch.promote_types(dtype, t.dtype)
        known = {id(t) for t in floats}
        cast = [t.to(dtype) if id(t) in known else t for t in args]
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            return op(*cast, **kwargs)

    return kernel


# vmap: rows of a batch are rows. Weights with a batch of their own are taken one by one.


def front(t: Any, dim: Optional[int], size: int) -> Any:
    if not isinstance(t, Tensor):
        return t
    return t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)


def _moved(name: str, info: Any, in_dims: Tuple[Optional[int], ...], args: Tuple[Any, ...]) -> List[Any]:
    moved = [front(t, dim, info.batch_size) for t, dim in zip(args, in_dims)]
    if any(isinstance(t, Tensor) and t.dim() == 1 for t in moved):
        raise shape_error(name, "[..., H] in each of the batch", "scalars")
    return moved


def _vmap_rows(name: str) -> Callable[..., Any]:
    """Of an operator whose tensors are all rows."""

    def rule(info: Any, in_dims: Tuple[Optional[int], ...], *args: Any) -> Any:
        result = getattr(torch.ops.swiglu, name)(*_moved(name, info, in_dims, args))
        return result, (0,) * len(result) if isinstance(result, tuple) else 0

    return rule


def vmap_layer(name: str) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Tuple[Optional[int], ...], *args: Any) -> Any:
        op = getattr(torch.ops.swiglu, name)
        if all(dim is None for dim in in_dims[1:]):
            made = op(args[0].movedim(in_dims[0], 0), *args[1:])
        else:

            def each(i: int) -> Any:
                return op(*(t if dim is None else t.select(dim, i) for t, dim in zip(args, in_dims)))

            results = [each(i) for i in range(info.batch_size)]
            tuples = isinstance(results[0], tuple)
            made = tuple(map(torch.stack, zip(*results))) if tuples else torch.stack(results)
        return made, (0,) * len(made) if isinstance(made, tuple) else 0

    return rule


_TAGS = (torch.Tag.pt2_compliant_tag,)


def define(
    name: str,
    arguments: str,
    returns: str,
    body: Callable[..., Any],
    fake: Callable[..., Any],
    gradient: Callable[..., Any],
    keeps: bool = False,
) -> None:
    """Defines an operator, without its overload ``out``."""
    LIBRARY.define(f"{name}({arguments}) -> {returns}", tags=_TAGS)
    LIBRARY.impl(name, body, _DEVICES)
    torch.library.register_fake(f"swiglu::{name}", fake, lib=LIBRARY)
    LIBRARY.impl(name, _with_gradient(name, body, gradient, keeps), "Autograd", with_keyset=True)


def autocast(name: str, overload: str) -> None:
    for device, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        qualified = name if overload == "default" else f"{name}.{overload}"
        kernel = _autocast(name, device, getattr(torch._C.DispatchKey, key), overload)
        LIBRARY.impl(qualified, kernel, key, with_keyset=True)


def _define() -> None:
    for name, arguments in _ARGUMENTS.items():
        define(name, arguments, "Tensor", BODIES[name], _fake(name), _GRADIENTS[name])
        # Without the tag `out`: with it Inductor calls this overload, of operators with optional tensors in another order, and in code
        # that is C++ by a function that nobody has.
        LIBRARY.define(f"{name}.out({arguments}, *, Tensor(a!) out) -> ()", tags=_TAGS)
        LIBRARY.impl(f"{name}.out", _out(name), _DEVICES)
        LIBRARY.impl(f"{name}.out", _out_without_gradient(name), "Autograd", with_keyset=True)
        torch.library.register_fake(f"swiglu::{name}.out", _fake_out(name), lib=LIBRARY)
        autocast(name, "default")
        autocast(name, "out")
    backwards: Dict[str, Tuple[str, str, Callable[..., Any]]] = {
        "silu_mul_backward": (
            "Tensor grad, Tensor gate, Tensor up, str activation, str? numerics",
            "(Tensor, Tensor)",
            _silu_mul_backward,
        ),
        "glu_backward": (
            "Tensor grad, Tensor x, str activation, str layout, str? numerics",
            "Tensor",
            _glu_backward,
        ),
    }
    for name, (arguments, returns, body) in backwards.items():
        define(name, arguments, returns, body, _fake_backward, no_second_gradient)
    for name in ("silu_mul", "glu", *backwards):
        torch.library.register_vmap(f"swiglu::{name}", _vmap_rows(name), lib=LIBRARY)
    for name in ("gated_linear", "mlp"):
        torch.library.register_vmap(f"swiglu::{name}", vmap_layer(name), lib=LIBRARY)


_define()
