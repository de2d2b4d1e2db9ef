"""Hugging Face: layers for ``kernels`` without its hub, classes of ``transformers``, and a folder for the hub.

>>> import swiglu.hf
>>> swiglu.hf.apply("llama")          # models built from now on; swiglu.patch(model) takes one that is there
['LlamaMLP']
>>> swiglu.hf.register()              # kernels.kernelize(model, ...) finds our layers by their names
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from functools import wraps
from typing import Any, Dict, List, Type

from torch import Tensor, nn

from .. import _patch
from .._errors import error
from .._patch import ORIGINAL
from . import layers

__all__ = ["LayerOfPackage", "apply", "layers", "mapping", "register", "unapply"]


@dataclass(frozen=True)
class LayerOfPackage:
    """What ``kernels`` calls a repository: one layer, out of this package instead of a download."""

    layer_name: str

    def load(self) -> Type[nn.Module]:
        layer: Type[nn.Module] = getattr(layers, self.layer_name)
        return layer

    def __str__(self) -> str:
        return f"`swiglu` (layer `{self.layer_name}`)"


def mapping() -> Dict[str, Dict[str, LayerOfPackage]]:
    """The layers by name and device, as ``kernels.use_kernel_mapping`` takes them."""
    return {name: dict.fromkeys(("cpu", "cuda"), LayerOfPackage(name)) for name in layers.__all__}


def register() -> None:
    """Adds :func:`mapping` to that of ``kernels``."""
    try:
        import kernels
    except ImportError as missing:
        raise error("unavailable", "swiglu.hf.register", f"{missing}; pip install kernels") from None

    kernels.register_kernel_mapping(mapping())


#: Classes, and what they computed with.
_applied: Dict[Any, Any] = {}


def _is_gated(cls: Any) -> bool:
    """Whether a class, with a forward of its own that takes one argument, makes maps of a gated block."""
    if not (isinstance(cls, type) and issubclass(cls, nn.Module) and "forward" in vars(cls)):
        return False
    made = {name for base in cls.__mro__ for name in getattr(vars(base).get("__init__"), "__code__", _NOTHING).co_names}
    takes_one = len(inspect.signature(cls.forward).parameters) == 2
    return takes_one and "down_proj" in made and ("gate_up_proj" in made or {"gate_proj", "up_proj"} <= made)


_NOTHING = (lambda: None).__code__


def _recognising(original: Any) -> Any:
    @wraps(original)
    def forward(self: nn.Module, *args: Tensor, **kwargs: Tensor) -> Tensor:
        # A forward of a subclass that calls this one computes more than the block.
        if _patch.original(type(self)) is not original:
            result: Tensor = original(self, *args, **kwargs)
            return result
        return _patch.forward_recognised(self, *args, **kwargs)

    setattr(forward, ORIGINAL, (forward, original))
    return forward


def apply(*model_types: str) -> List[str]:
    """Lets the feed-forward blocks of classes of ``transformers`` compute with our kernels, as :func:`swiglu.patch` does.

    A model type is a module's name, such as ``llama`` or ``qwen3``. Each block is recognised in its first call: one that
    is no ``down(act(gate)*up)`` is computed as before. Returns the names of the classes. :func:`unapply` undoes it.
    """
    names: List[str] = []
    for model_type in model_types:
        where = f"transformers.models.{model_type}.modeling_{model_type}"
        try:
            module = importlib.import_module(where)
        except ImportError as missing:
            raise error("argument", "model type", f"`{model_type}`: {missing}") from None
        found = [c for n, c in vars(module).items() if n.endswith("MLP") and _is_gated(c) and c.__module__ == where]
        if not found:
            raise error("unsupported", "model type", f"`{model_type}` has no class of gated blocks, ...MLP, of its own")
        for cls in found:
            if cls not in _applied:
                _applied[cls] = cls.forward
                cls.forward = _recognising(cls.forward)
            names.append(cls.__name__)
    return names


def unapply() -> List[str]:
    """Undoes :func:`apply` for all classes, and returns their names."""
    names = [cls.__name__ for cls in _applied]
    for cls, original in _applied.items():
        cls.forward = original
    _applied.clear()
    return names
