"""Lets the feed-forward blocks of a model compute with our kernels, where nothing else would be lost by it.

One file, because what recognises a block, what tries it, and what each call looks at and computes go by one record of it.
"""

from __future__ import annotations

import functools
import inspect
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from html import escape
from itertools import product
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as _all_modules
from torch.utils._python_dispatch import _disable_current_modes

from . import torch as ops
from ._activation import expect_numerics
from ._errors import error, expect_choice
from .torch import _check

LEVELS = ("block", "gated", "activation")
_ATTRIBUTE = "_swiglu_patch"
_SEPARATE = ("gate_proj", "up_proj", "down_proj")
_PACKED = ("gate_up_proj", "down_proj")
#: A module without a name.
_WHOLE = "(the model)"
#: Where the activation of a block is found.
_ACTIVATIONS = ("act_fn", "activation_fn", "act")


class _Left(Exception):
    """Why a module is left alone."""


@dataclass(frozen=True)
class Found:
    """A block that was recognised."""

    linears: Tuple[str, ...]
    activation: str
    act: Any
    act_name: str
    #: The most that can be taken over, and why not more.
    level: str
    why: Optional[str]
    #: Its class, and attributes of its own that its forward may go by.
    cls: Any = nn.Module
    own: Dict[str, Any] = field(default_factory=dict)
    #: How many modules it has.
    parts: int = 0
    #: What its class computes with, what the class of its activation does, and all plain attributes that either may go by.
    forward: Any = field(init=False)
    act_forward: Any = field(init=False)
    attributes: Tuple[Tuple[str, Any], ...] = field(init=False)

    def __post_init__(self) -> None:
        self.__dict__.update(
            forward=original(self.cls),
            act_forward=type(self.act).forward if isinstance(self.act, nn.Module) else None,
            attributes=tuple({**_of_class(self.cls), **self.own}.items()),
        )

    def __getstate__(self) -> Dict[str, Any]:
        # What classes have is theirs: a copy would be another value, and not all of it can be copied or pickled.
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        Found.__init__(self, **state)

    @property
    def packed(self) -> bool:
        return len(self.linears) == 2


@dataclass(frozen=True)
class Module:
    """What became of one module: ``level`` is None where it was left alone, for ``reason``."""

    name: str
    kind: str
    level: Optional[str]
    activation: Optional[str]
    reason: str


@dataclass(frozen=True, repr=False)
class PatchReport:
    """What became of each module that looks like a feed-forward block."""

    modules: Tuple[Module, ...]

    @property
    def patched(self) -> Tuple[Module, ...]:
        return tuple(m for m in self.modules if m.level is not None)

    @property
    def left(self) -> Tuple[Module, ...]:
        return tuple(m for m in self.modules if m.level is None)

    def _summary(self) -> str:
        return f"{len(self.patched)} of {len(self.modules)} feed-forward blocks patched"

    def __repr__(self) -> str:
        lines = [self._summary()]
        for m in self.modules:
            what = f"{m.level}, {m.activation}" if m.level else "left alone"
            lines.append(f"  {m.name or _WHOLE} ({m.kind}): {what}: {m.reason}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><td>{escape(m.name or _WHOLE)}</td><td>{escape(m.kind)}</td><td>{m.level or 'left alone'}</td>"
            f"<td>{escape(m.activation or '')}</td><td>{escape(m.reason)}</td></tr>"
            for m in self.modules
        )
        head = "".join(f"<th>{name}</th>" for name in ("module", "class", "level", "activation", "why"))
        return f"<table><caption>{self._summary()}</caption><tr>{head}</tr>{cells}</table>"


def _activation_of(act: Any) -> str:
    """The name of a block's activation, by what it is: a name or a class alone could lie."""
    if isinstance(act, nn.Module) and "forward" in vars(act):
        raise _Left(f"its activation {type(act).__name__} has a forward of its own")
    if type(act) is nn.SiLU or act in (F.silu, torch.nn.functional.silu):
        return "swiglu"
    if type(act) is nn.GELU:
        return "geglu" if act.approximate == "none" else "geglu-tanh"
    if act is F.gelu:
        return "geglu"
    if type(act) is nn.ReLU or act in (F.relu, torch.relu):
        return "reglu"
    if type(act) is nn.Sigmoid or act is torch.sigmoid:
        return "glu"
    if type(act) is nn.Identity:
        return "bilinear"
    # Classes of transformers that are one function, whatever they call to compute it: taken only where they agree with it.
    name = type(act).__name__
    known = {
        "SiLUActivation": "swiglu",
        "PytorchGELUTanh": "geglu-tanh",
        "GELUTanh": "geglu-tanh",
        "NewGELUActivation": "geglu-tanh",
        "GELUActivation": "geglu",
        "ReLUSquaredActivation": "reglu2",
    }
    if isinstance(act, nn.Module) and type(act).__module__.startswith("transformers.") and name in known:
        probe = torch.linspace(-6, 6, 97, dtype=torch.float64, device="cpu")
        with torch.no_grad():
            h = torch.ops.swiglu.silu_mul(probe, torch.ones_like(probe), known[name], None)
            if torch.allclose(act(probe), h, rtol=1e-12, atol=1e-12):
                return known[name]
    raise _Left(f"its activation {name} is none of ours")


#: How all linear maps are called and compute. What somebody had replaced before is told by where it is defined.
_LINEAR_CALL, _LINEAR_FORWARD = nn.Linear.__call__, nn.Linear.forward
_PYTORCHS = _LINEAR_CALL.__module__ == nn.Module.__module__ and _LINEAR_FORWARD.__module__ == nn.Linear.__module__


def _maps_replaced() -> bool:
    if nn.Linear.forward is not _LINEAR_FORWARD or nn.Linear.__call__ is not nn.Module.__call__:
        return True
    # PyTorch's tracer puts its own call into all modules for as long as it traces, in the place of what anybody else put there.
    return nn.Linear.__call__ is not _LINEAR_CALL and (ops._door.traced() or not ops._door.recorded())


def _check_linear(name: str, linear: Any) -> None:
    if not _PYTORCHS or _maps_replaced():
        raise _Left("torch.nn.Linear has another forward than PyTorch's")
    if type(linear) is not nn.Linear:
        kind = type(linear)
        raise _Left(f"{name} is a {kind.__module__}.{kind.__qualname__}, not a plain torch.nn.Linear")
    _no_hooks(name, linear)
    if "forward" in vars(linear):
        raise _Left(f"{name} has a forward of its own")
    own = linear._parameters
    for what in ("weight", "bias"):
        t = own.get(what)
        if t is None and what in own and what == "bias":
            continue
        if type(t) is not nn.Parameter:
            kind = type(t)
            given = "not there" if t is None else f"a {kind.__module__}.{kind.__qualname__}"
            raise _Left(f"the {what} of {name} is {given}, not a plain parameter")
        if t.layout != torch.strided:
            raise _Left(f"the {what} of {name} lies in memory as {t.layout}")
        if not t.dtype.is_floating_point:
            raise _Left(f"the {what} of {name} has {t.dtype} elements")
        if t.device.type == "meta":
            raise _Left(f"the {what} of {name} has no values (device meta)")
    if linear.weight.dim() != 2 or linear.bias is not None and linear.bias.shape != linear.weight.shape[:1]:
        raise _Left(f"the weight and the bias of {name} do not fit each other")


def _map(linear: Any) -> Tuple[Tensor, Optional[Tensor]]:
    """Weight and bias; in the module's own dictionary, since to ask a module takes a microsecond each."""
    own: Dict[str, Any] = linear._parameters
    return own["weight"], own["bias"] if "bias" in own else linear.bias


def _no_hooks(name: str, module: nn.Module) -> None:
    if _check.hooked(module):
        raise _Left(f"{name} has hooks, which would not be called")


#: Hooks of all modules: dictionaries that PyTorch changes in place.
_HOOKS_OF_ALL: Tuple[Dict[int, Any], ...] = (
    _all_modules._global_forward_hooks,
    _all_modules._global_forward_pre_hooks,
    _all_modules._global_backward_hooks,
    _all_modules._global_backward_pre_hooks,
)


@contextmanager
def _without_hooks_of_all() -> Iterator[None]:
    """Nor does another thread's module call them meanwhile, and one that is removed there meanwhile comes back."""
    kept = [dict(hooks) for hooks in _HOOKS_OF_ALL]
    for hooks in _HOOKS_OF_ALL:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in zip(_HOOKS_OF_ALL, kept):
            hooks.update(before)


def _changed(module: nn.Module, found: Found, level: str) -> Optional[str]:
    """Why a call must go the original way: what may have changed since a module was patched."""
    if any(_HOOKS_OF_ALL):
        return "there are hooks of all modules"
    if level != "activation" and _maps_replaced():
        return "torch.nn.Linear has another forward now"
    if original(type(module)) is not found.forward:
        return "its class has another forward now"
    for name, was in found.attributes:
        now = getattr(module, name, None)
        if now is not was and not _same(now, was):
            return f"its {name} is another one now"
    children = module._modules
    # It had neither of the first, and of the last those that are looked at here: a forward may ask whether it has more.
    if module._parameters or module._buffers or len(children) != found.parts:
        return "it has other parts or values of its own now"
    act = children.get(found.act_name)
    if act is None:
        act = getattr(module, found.act_name, None)
    if act is not found.act:
        return "its activation is another one now"
    if isinstance(act, nn.Module):
        if _check.hooked(act):
            return "its activation has hooks"
        if "forward" in act.__dict__:
            return "its activation has a forward of its own"
        if type(act).forward is not found.act_forward:
            return "the class of its activation has another forward now"
        if type(act) is nn.GELU and (act.approximate == "none") != (found.activation == "geglu"):
            return "its activation is another one now"
    # Maps that are called may be whatever they have become.
    for name in () if level == "activation" else found.linears[:-1] if level == "gated" else found.linears:
        changed = _check.changed(children, name)
        if changed is not None:
            return changed
        own: Dict[str, Any] = children[name]._parameters  # type: ignore[union-attr]
        # Under a mode, such as that of an export, they may be its own kind of tensors, which operators take.
        if type(own.get("weight")) is not nn.Parameter and not ops._door._modes():
            return f"the weight of {name} is no longer a plain parameter"
        if type(own.get("bias")) not in (nn.Parameter, type(None)) and not ops._door._modes():
            return f"the bias of {name} is no longer a plain parameter"
    return None


def _same(now: Any, was: Any) -> bool:
    """Plain values that are equal. Of anything else nobody knows what its comparison costs, or says."""
    return type(now) is type(was) and type(now) in (bool, int, float, str) and bool(now == was)


def _of_class(cls: Any) -> Dict[str, Any]:
    """The values of a class that a forward may go by."""
    names: Dict[str, None] = {}
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        for name, value in vars(base).items():
            # What is called, or computes what it gives, is part of the class, as its forward is.
            if not name.startswith("__") and not callable(value) and not hasattr(value, "__get__"):
                names[name] = None
    return {name: getattr(cls, name) for name in names if hasattr(cls, name)}


def _own(module: nn.Module) -> Dict[str, Any]:
    """What a module itself has that is no module and no tensor."""
    names = (name for name in module.__dict__ if name not in _OF_MODULES and not name.startswith("_swiglu"))
    return {name: getattr(module, name) for name in names if hasattr(module, name)}


#: What every module has, and what changes without a change of what is computed.
_OF_MODULES = frozenset((*nn.Module().__dict__, "forward", "_replicate_for_data_parallel", "_is_hf_initialized"))


def _looks_like_one(module: nn.Module) -> bool:
    children = module._modules
    return "down_proj" in children and ("gate_up_proj" in children or {"gate_proj", "up_proj"} <= set(children))


def _experts(module: nn.Module) -> bool:
    of_several = {name for name, t in module._parameters.items() if t is not None and t.dim() == 3}
    return "down_proj" in of_several and ("gate_up_proj" in of_several or {"gate_proj", "up_proj"} <= of_several)


def recognise(module: nn.Module) -> Found:
    """The parts of a Llama-like block. Raises ``SwigluError`` with the reason where it is none that can be computed."""
    try:
        found = _recognise(_check.expect_module("module", module))
        _no_hooks("the module", module)
        if found.level != "block":
            raise _Left(found.why)
        return found
    except _Left as why:
        raise error("unsupported", type(module).__name__, str(why)) from None


def _recognise(module: nn.Module) -> Found:
    # Values are compared, which tensors of a mode may not have; nor is it, or a hook, to see or count what is computed for that.
    with _disable_current_modes(), _without_hooks_of_all():
        return _recognise_plain(module)


def _recognise_plain(module: nn.Module) -> Found:
    from .nn import MLP

    if isinstance(module, MLP):
        raise _Left("it is one of swiglu.nn's, which computes with our kernels as it is")
    if not _looks_like_one(module):
        raise _Left("it has no gate_proj, up_proj (or gate_up_proj) and down_proj")
    linears = _SEPARATE if "gate_proj" in module._modules else _PACKED
    others = [name for name in module._modules if name not in linears and name not in _ACTIVATIONS]
    # What else a block has, a norm or a dropout, its forward uses in a way that names do not tell.
    if others:
        raise _Left(f"it has more parts than a block: {', '.join(others)}")
    own = [*module._parameters, *module._buffers]
    if own:
        raise _Left(f"it has values of its own: {', '.join(own)}")
    names = [name for name in _ACTIVATIONS if hasattr(module, name)]
    if len(names) != 1:
        raise _Left(f"its activation was not found as one of {', '.join(_ACTIVATIONS)}")
    act = getattr(module, names[0])
    if isinstance(act, nn.Module):
        _no_hooks(names[0], act)
    activation = _activation_of(act)
    _expect_same(module, linears, activation)
    level, why = _level_of(module, linears)
    return Found(linears, activation, act, names[0], level, why, type(module), _own(module), len(module._modules))


def _level_of(module: nn.Module, linears: Tuple[str, ...]) -> Tuple[str, Optional[str]]:
    """The activation alone goes with maps of any kind: they are called. Else their weights are read."""
    plain: Dict[str, Any] = {}
    called: Dict[str, str] = {}
    for name in linears:
        try:
            _check_linear(name, module._modules[name])
            plain[name] = module._modules[name]
        except _Left as why:
            called[name] = str(why)
    _check_weights(plain)
    if not called:
        return "block", None
    return "gated" if list(called) == ["down_proj"] else "activation", next(iter(called.values()))


def _check_weights(plain: Dict[str, Any]) -> None:
    """Refuses what only a forward computes that broadcasts, casts or moves: small maps do not tell whether it does."""
    tensors = [t for linear in plain.values() for t in (linear.weight, linear.bias) if t is not None]
    if len({t.dtype for t in tensors}) > 1 or len({t.device for t in tensors}) > 1:
        raise _Left("its weights differ in element type or device")
    shapes = {name: tuple(linear.weight.shape) for name, linear in plain.items()}
    of_x = {shape[1] for name, shape in shapes.items() if name != "down_proj"}
    of_h = {
        shape[1] if name == "down_proj" else shape[0] / (2 if name == "gate_up_proj" else 1)
        for name, shape in shapes.items()
    }
    if len(of_x) > 1 or len(of_h) > 1:
        raise _Left(f"its weights do not fit each other: {shapes}")


def _expect_same(module: nn.Module, linears: Tuple[str, ...], activation: str) -> None:
    """Lets the module's forward compute with small maps, and their gradients: it may scale, clamp, add or detach what its
    parts do not tell."""
    with torch.inference_mode(False), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        small, x, upstream = _small(linears)
        # A forward may ask for any of these.
        for training, grad in product((True, False), repeat=2):
            with torch.set_grad_enabled(grad):
                _compare(module, small, activation, x, training, upstream if grad else None)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            _compare_roughly(module, small, activation, x, dtype)


def _small(linears: Tuple[str, ...]) -> Tuple[Dict[str, Any], Tensor, Tensor]:
    """Small maps, x and a gradient of the result; on the CPU, whatever the default device is, and without the generator
    that initialises and drops out."""
    generator = torch.Generator("cpu").manual_seed(1)
    plain: Dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    hidden, intermediate = 8, 12
    small: Dict[str, Any] = {}
    for name in linears:
        features = {"down_proj": hidden, "gate_up_proj": 2 * intermediate}.get(name, intermediate)
        inputs = intermediate if name == "down_proj" else hidden
        small[name] = nn.utils.skip_init(nn.Linear, inputs, features, **plain)
        for t in small[name].parameters():
            t.data = torch.randn(t.shape, generator=generator, **plain)
    # Some rows reach far, where limits would show.
    x = torch.randn((6, hidden), generator=generator, **plain)
    x *= torch.tensor([[0.1], [0.5], [1], [3], [30], [1e3]], device="cpu")
    return small, x.requires_grad_(), torch.randn((6, hidden), generator=generator, **plain)


def _theirs(module: nn.Module, small: Dict[str, Any], x: Tensor, training: bool) -> Any:
    """What the module's forward computes with small maps."""
    # A class's own way of making one may call its ``__init__``.
    shadow: Any = object.__new__(module.__class__)
    shadow.__dict__.update(module.__dict__, training=training, _modules={**module._modules, **small})
    return original(type(module))(shadow, x)


def _ours(small: Dict[str, Any], activation: str, x: Tensor) -> Tensor:
    found = Found(tuple(small), activation, None, "", "activation", None)
    result: Tensor = _compute(small, found, "activation", x, "preact", None)
    return result


def _compare(
    module: nn.Module, small: Dict[str, Any], activation: str, x: Tensor, training: bool, upstream: Optional[Tensor]
) -> None:
    try:
        theirs = _theirs(module, small, x, training)
    except Exception as error:
        raise _Left(f"its forward does not take one tensor alone: {type(error).__name__}: {error}") from None
    ours = _ours(small, activation, x)
    if not isinstance(theirs, Tensor) or theirs.shape != ours.shape:
        raise _Left("its forward returns something else than one tensor of the block's shape")
    # float64 in other orders: what differs by more than this is another function.
    scale = torch.maximum(theirs.abs().amax(1, keepdim=True), ours.abs().amax(1, keepdim=True))
    if not torch.all((theirs - ours).abs() <= 1e-10 * scale):
        raise _Left(_SOMETHING_ELSE)
    if upstream is None:
        return
    if not theirs.requires_grad:
        raise _Left("its forward has no gradient")
    of = [x, *(t for linear in small.values() for t in linear.parameters())]
    both = (torch.autograd.grad(y, of, upstream, allow_unused=True, materialize_grads=True) for y in (theirs, ours))
    for a, b in zip(*both):
        if not torch.all((a - b).abs() <= 1e-10 * torch.maximum(a.abs().max(), b.abs().max())):
            raise _Left("its gradients are others than those of down(act(gate)·up)")


_SOMETHING_ELSE = "its forward computes something else than down(act(gate)·up)"


def _compare_roughly(
    module: nn.Module, small: Dict[str, Any], activation: str, x: Tensor, dtype: torch.dtype
) -> None:
    """In an element type that a forward may tell from others, to which the maps are rounded."""
    # More would be infinite in float16.
    x = x[:4].detach().to(dtype)
    for linear in small.values():
        linear.to(dtype)
    theirs = []
    try:
        for training, grad in product((True, False), repeat=2):
            with torch.set_grad_enabled(grad):
                theirs.append(_theirs(module, small, x.requires_grad_(grad), training))
    except Exception:
        # Not every PyTorch computes all of them on a CPU, and float64 has shown what the forward takes.
        return
    with torch.no_grad():
        for linear in small.values():
            linear.double()
        ours, bound = _ours(small, activation, x.double()), _bound(small, activation, x.double())
        for y in theirs:
            if not isinstance(y, Tensor) or y.dtype != dtype or y.shape != ours.shape:
                raise _Left(f"its forward returns something else than a tensor of {dtype} for one")
            if not torch.all((y.double() - ours).abs() <= bound):
                raise _Left(f"{_SOMETHING_ELSE}, in {dtype}")


def _bound(small: Dict[str, Any], activation: str, x: Tensor) -> Tensor:
    """How far a block may be from its exact value where each operation rounds to bfloat16, as PyTorch may be told to do with
    products of float32 too; float16 sums are within it. A map rounds its product and its sum with the bias. Roundings come to
    a fifteenth of it."""
    unit = 2.0**-8

    def terms(name: str, x: Tensor) -> Tensor:
        return F.linear(x.abs(), small[name].weight.abs(), small[name].bias.abs())

    def gate_and_up(of: Any) -> Tuple[Tensor, ...]:
        return tuple(of("gate_up_proj").chunk(2, -1)) if "gate_up_proj" in small else (of("gate_proj"), of("up_proj"))

    gate, up = gate_and_up(lambda name: small[name](x).abs())
    gate_off, up_off = (2 * unit * t for t in gate_and_up(lambda name: terms(name, x)))
    # The steepest of the functions has a slope below 1.13, relu2 at most 2|g|. Composed of operations, they add some units.
    relu2 = activation == "reglu2"
    act = gate.square() if relu2 else gate.clamp(min=1)
    act_off = gate_off * (2 * (gate + gate_off) if relu2 else 1.13) + 4 * unit * act
    h_off = act_off * (up + up_off) + act * up_off + unit * act * up
    down = small["down_proj"].weight.abs()
    return F.linear(h_off, down) + 2 * unit * terms("down_proj", act * up + h_off)


def _called(down: Any, h: Tensor) -> Any:
    """The result of a down map, or why the original forward is to give h to it."""
    weight = getattr(down, "weight", None)
    if isinstance(weight, Tensor) and weight.dtype in _check.COMPUTED and weight.dtype != h.dtype:
        if not ops._door.autocasts():
            return f"the weight of down_proj has {weight.dtype} elements, and h {h.dtype}"
    return down(h)


def _compute(
    linears: Dict[str, Any], found: Found, level: str, x: Tensor, save: str, numerics: Optional[str]
) -> Any:
    """The block, or why its original forward is to compute what its maps gave: it may promote, broadcast or cast that."""
    name, down = found.activation, linears["down_proj"]
    if level == "activation":
        made = [linears[part](x) for part in found.linears[:-1]]
        gate, up = made[0], made[-1]
        if not isinstance(gate, Tensor) or not isinstance(up, Tensor) or gate.dtype not in _check.COMPUTED:
            return "its maps gave something else than tensors of float32, float16, bfloat16 or float64"
        if gate.dtype != up.dtype or gate.shape != up.shape or gate.device != up.device:
            return f"its maps gave a gate of {gate.dtype}, {list(gate.shape)}, and an up of {up.dtype}, {list(up.shape)}"
        if found.packed:
            return _called(down, ops.glu(gate, name, numerics=numerics))
        return _called(down, ops.silu_mul(gate, up, activation=name, numerics=numerics))
    gate = _map(linears["gate_up_proj" if found.packed else "gate_proj"])
    up = (None, None) if found.packed else _map(linears["up_proj"])
    how: Dict[str, Any] = {"activation": name, "save": save, "numerics": numerics}
    if level == "gated":
        return _called(down, ops.gated_linear(x, gate[0], up[0], gate[1], up[1], **how))
    last = _map(down)
    return ops.mlp(x, gate[0], up[0], last[0], biases=(gate[1], up[1], last[1]), **how)


@dataclass(frozen=True)
class _Patch:
    found: Found
    level: str
    save: str
    numerics: Optional[str]
    #: What the forward calls its tensor.
    x: str


def _forward(self: Any, *args: Any, **named: Any) -> Tensor:
    return _as_patched(self, self._swiglu_patch, args, named)


def _as_patched(self: Any, patch: _Patch, args: Tuple[Any, ...], named: Dict[str, Any]) -> Tensor:
    found = patch.found
    changed = None
    if len(args) == 1 and not named:
        (x,) = args
    elif not args and len(named) == 1 and patch.x in named:
        x = named[patch.x]
    else:
        changed = "it was called with something else than one tensor"
    changed = changed or _changed(self, found, patch.level)
    if changed is None and isinstance(x, Tensor) and (x.is_nested or x.layout != torch.strided):
        changed = "x is a nested tensor" if x.is_nested else f"x lies in memory as {x.layout}"
    made = changed or _compute(self._modules, found, patch.level, x, patch.save, patch.numerics)
    if isinstance(made, str):
        ops._kernels.note("patched block", "original", made)
        made = original(type(self))(self, *args, **named)
    result: Tensor = made
    return result


def _replicate(module: Any) -> Any:
    """A replica of ``DataParallel``: its forward is of its own parameters."""
    replica = type(module)._replicate_for_data_parallel(module)
    _bind(replica)
    return replica


def _bind(module: nn.Module) -> None:
    # Not methods: pickled, they would be looked for in the class.
    module.__dict__["forward"] = functools.partial(_forward, module)
    module.__dict__["_replicate_for_data_parallel"] = functools.partial(_replicate, module)


def _unbind(module: nn.Module) -> None:
    for name, ours in (("forward", _forward), ("_replicate_for_data_parallel", _replicate)):
        # What somebody else has put there since, which calls ours, stays.
        if getattr(module.__dict__.get(name), "func", None) is ours:
            del module.__dict__[name]


#: Of a forward of ours in a class: itself, and the one in whose place it is.
ORIGINAL = "_swiglu_original"
#: Of a module that such a forward has met: how it computes, or why as before. It says nothing once that forward is gone.
_RECOGNISED = "_swiglu_recognised"


def original(cls: Any) -> Any:
    """What a class computes with, but for us."""
    # A forward of ours that its class inherits is found with it; what was decorated with `functools.wraps` has its attributes.
    ours, before = getattr(cls.forward, ORIGINAL, (None, None))
    return before if ours is cls.forward else cls.forward


def _named(module: nn.Module) -> str:
    """What the original forward calls its first argument."""
    parameters = list(inspect.signature(original(type(module))).parameters)
    return parameters[1] if len(parameters) > 1 else ""


def forward_recognised(self: Any, *args: Any, **named: Any) -> Tensor:
    """The forward of a class whose modules nobody has patched one by one: each is recognised in its first call."""
    own = self.__dict__
    if _RECOGNISED not in own and not ops._door.watched() and not ops._door.recorded():
        try:
            found = _recognise(self)
            own[_RECOGNISED] = _Patch(found, found.level, "preact", None, _named(self))
        except _Left as why:
            own[_RECOGNISED] = str(why)
    how = own.get(_RECOGNISED, "its first call is inside torch.compile, a transform or a trace")
    if isinstance(how, str):
        ops._kernels.note("block", "original", how)
        result: Tensor = original(type(self))(self, *args, **named)
        return result
    return _as_patched(self, how, args, named)


def in_force(module: nn.Module) -> Optional[_Patch]:
    """How a module computes with our kernels: as it was patched, or as a forward of ours recognised it."""
    own = module.__dict__
    how = own.get(_ATTRIBUTE)
    # Ours is its class's, or its own, where `kernels` put it there.
    if how is None and (type(module).forward is not original(type(module)) or "forward" in own):
        how = own.get(_RECOGNISED)
    return how if isinstance(how, _Patch) else None


def patch(
    model: nn.Module,
    *,
    level: str = "block",
    save: str = "preact",
    numerics: Optional[str] = None,
    strict: bool = False,
) -> PatchReport:
    """Lets each Llama-like feed-forward block of a model compute with our kernels. In place; :func:`unpatch` undoes it.

    Blocks are recognised by their structure: ``gate_proj``, ``up_proj`` (or ``gate_up_proj``), ``down_proj`` and ``act_fn``.
    A block keeps what it would silently lose: maps with hooks or adapters, quantised or parallel ones are called as before,
    and a block with another activation, or whose forward computes something else, is left alone. The report names the reason.
    Parameters stay where they are. What changes after patching is noticed in each call, which then goes the original way.

    ``level`` is the most that is taken over: the ``block``, the ``gated`` half of it, or the ``activation`` alone, with the
    maps called as they are. ``strict`` raises ``SwigluError`` if less than that is possible for any block, and changes nothing.
    """
    _check.expect_module("model", model)
    expect_choice("level", level, LEVELS)
    ops._saves(save)
    expect_numerics(numerics)
    report: List[Module] = []
    patches: List[Tuple[nn.Module, _Patch]] = []
    for name, module in model.named_modules():
        kind = type(module).__name__
        if _experts(module):
            why_left = "its weights are tensors of several experts, which no operator here takes"
            report.append(Module(name, kind, None, None, why_left))
        if not _looks_like_one(module):
            continue
        try:
            if _ATTRIBUTE in module.__dict__:
                raise _Left("it is patched already")
            if "forward" in module.__dict__:
                raise _Left("it has a forward of its own")
            found = _recognise(module)
        except _Left as why:
            report.append(Module(name, kind, None, None, str(why)))
            continue
        most = LEVELS[max(LEVELS.index(level), LEVELS.index(found.level))]
        weaker = found.why if most != level else None
        patches.append((module, _Patch(found, most, save, numerics, _named(module))))
        report.append(Module(name, kind, most, found.activation, weaker or "its forward is down(act(gate)·up)"))
    made = PatchReport(tuple(report))
    if strict and not report:
        text = "no feed-forward block was found: a module with gate_proj and up_proj (or gate_up_proj) and down_proj"
        raise error("unsupported", "patch", text)
    if strict and any(m.level != level for m in made.modules):
        raise error("unsupported", "patch", str(made))
    for module, how in patches:
        module.__dict__[_ATTRIBUTE] = how
        _bind(module)
    return made


def unpatch(model: nn.Module) -> int:
    """Undoes :func:`patch`; the number of modules that were patched."""
    count = 0
    for module in _check.expect_module("model", model).modules():
        module.__dict__.pop(_RECOGNISED, None)
        if module.__dict__.pop(_ATTRIBUTE, None) is not None:
            _unbind(module)
            count += 1
    return count
