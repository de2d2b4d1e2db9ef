"""Layers of files, for arrays of the host."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from html import escape
from typing import Any, Dict, Optional, Union

from . import _native
from ._activation import as_activation
from ._arrays import described, is_numpy, is_torch, plain
from ._native import Activation
from ._system import find_cuda_libraries


@dataclass(frozen=True)
class Explanation:
    """How a call is computed, and why: ``print`` it, or read ``data``."""

    text: str
    data: Dict[str, Any]

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.text)}</pre>"


class Layer:
    """A gated linear layer or a feed-forward block, packed for a device. Made by :func:`load`."""

    def __init__(self, native: _native.Layer) -> None:
        self._native = native

    @property
    def kind(self) -> str:
        """``mlp`` or ``gated_linear``."""
        return self._native.kind

    @property
    def hidden(self) -> int:
        """Input features, K."""
        return self._native.hidden

    @property
    def intermediate(self) -> int:
        """Features between the products, H."""
        return self._native.intermediate

    @property
    def out_features(self) -> int:
        """Output features: K of a block, H of a gated linear layer."""
        return self._native.out_features

    @property
    def dtype(self) -> str:
        """``f32``, ``f16`` or ``bf16``: that of inputs and outputs."""
        return self._native.dtype

    @property
    def activation(self) -> Activation:
        return self._native.activation

    @property
    def device(self) -> str:
        return self._native.device

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weights."""
        return self._native.weight_bytes

    def __call__(self, x: Any) -> Any:
        """The result for x ``[..., K]``: a numpy array for one, a tensor for one, else an :class:`swiglu.Array`."""
        if is_numpy(x):
            import numpy

            # A wrong shape is refused by the call, which names both.
            y = numpy.empty((*x.shape[:-1], self.out_features), x.dtype.newbyteorder("="))
            return self.forward_into(x, y)
        made = self._native.forward(x.detach() if is_torch(x) else x)
        if is_torch(x):
            import torch.utils.dlpack

            return torch.utils.dlpack.from_dlpack(made)
        return made

    def forward_into(self, x: Any, out: Any) -> Any:
        """Writes the result into ``out`` and returns it."""
        x = plain(x)
        self._native.forward(described(x), described(out))
        return out

    def plan(self, tokens: int) -> str:
        """How so many tokens will be computed."""
        return self._native.plan(tokens)

    def explain(self, tokens: int = 1) -> Explanation:
        """The plan, what it was chosen from, and what the problem costs at least."""
        text, data = self._native.explain(tokens)
        return Explanation(text, json.loads(data))

    def __repr__(self) -> str:
        return repr(self._native)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}\n{escape(self.explain().text)}</pre>"


def load(
    path: Union[str, "os.PathLike[str]"],
    layer: int = 0,
    *,
    kind: str = "mlp",
    device: str = "best",
    dtype: Optional[str] = None,
    activation: Union[str, Activation, None] = None,
    numerics: Optional[str] = None,
    decoded: bool = False,
) -> Layer:
    """Opens a layer of a safetensors or GGUF file, or of a directory with a model in it, and packs it for a device.

    ``kind`` is ``mlp`` for the feed-forward block or ``gated_linear`` for its first half. ``device`` is ``best``, ``cpu``,
    ``cuda`` or ``cuda:N``. Element type, activation and numerics are the file's unless they are given; ``decoded`` keeps
    no weights quantised.
    """
    if device != "cpu":
        find_cuda_libraries()
    act = None if activation is None else as_activation(activation)
    native = _native.Layer.load(
        os.fspath(path), layer, kind=kind, device=device, dtype=dtype, activation=act, numerics=numerics, decoded=decoded
    )
    return Layer(native)


def explain(layer: Layer, tokens: int = 1) -> Explanation:
    """As :meth:`Layer.explain`."""
    return layer.explain(tokens)
