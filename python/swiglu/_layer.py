"""Layers of files, for arrays of the host."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Dict, Iterable, Mapping, Optional, Sequence, Tuple, Union

from . import _native
from ._activation import as_activation, expect_numerics
from ._arrays import described, is_numpy, is_torch, plain
from ._errors import error, expect_choice, expect_count, expect_text, said, wrong
from ._native import Activation
from ._system import find_cuda_libraries

if TYPE_CHECKING:
    import torch

_KINDS = ("mlp", "gated_linear")
#: Plans of more take as long as there are tiles of them.
_MOST_TOKENS = 2**31 - 1
#: Tensors that ``names`` of :func:`load` can name.
_TENSORS = ("gate", "up", "down", "gate_up", "gate_bias", "up_bias", "gate_up_bias", "down_bias")


@dataclass(frozen=True, repr=False)
class Explanation:
    """How a call is computed, and why: shown as ``text``, with the same as ``data``."""

    text: str
    data: Dict[str, Any]

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.text)}</pre>"


class Layer:
    """A gated linear layer or a feed-forward block, packed for a device. Made by :func:`load`."""

    def __init__(self, native: _native.Layer) -> None:
        if not isinstance(native, _native.Layer):
            raise wrong("swiglu.Layer", "what swiglu.load makes", said(native), "call swiglu.load(path, layer)")
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
        """The result for x ``[..., K]``: a numpy array for one, a tensor for one, else an :class:`swiglu.Array`.

        x is in the host's memory, wherever the layer is, or a tensor on the layer's CUDA device: the result then is one too, and
        the call is enqueued on PyTorch's current stream. There is no gradient: a tensor that requires one is refused while
        gradients are recorded.
        """
        if is_torch(x):
            from .torch import _kernels

            return _kernels.packed_forward(self._native, x)
        x = plain(x)
        first = described("x", x)
        if not is_numpy(x):
            return self._native.forward(first)
        import numpy

        # A wrong shape is refused by the call, which names both.
        y = numpy.empty((*x.shape[:-1], self.out_features), x.dtype)
        self._native.forward(first, described("out", y))
        return y

    def forward_into(self, x: Any, out: Any) -> Any:
        """Writes the result into ``out`` and returns it."""
        if is_torch(x) or is_torch(out):
            from .torch import _kernels

            return _kernels.packed_forward(self._native, x, out)
        x = plain(x)
        self._native.forward(described("x", x), described("out", out))
        return out

    def plan(self, tokens: int) -> str:
        """How so many tokens will be computed."""
        return self._native.plan(expect_count("tokens", tokens, most=_MOST_TOKENS))

    def explain(self, tokens: int = 1) -> Explanation:
        """The plan, what it was chosen from, and what the problem costs at least."""
        text, data = self._native.explain(expect_count("tokens", tokens, most=_MOST_TOKENS))
        return Explanation(text, json.loads(data))

    def __copy__(self) -> "Layer":
        return self

    def __deepcopy__(self, memo: Any) -> "Layer":
        # Constants are shared.
        return self

    def __reduce__(self) -> Tuple[Any, ...]:
        raise error("unsupported", "pickling a swiglu.Layer", "its weights are packed for this machine; load the file there")

    def __repr__(self) -> str:
        return repr(self._native)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}\n{escape(self.explain().text)}</pre>"


def _name(what: str, given: Any, expected: str) -> str:
    """A name as text, or what PyTorch has for it."""
    if type(given).__module__ == "torch":
        given = str(given).rpartition("torch.")[2]
    return expect_text(what, given, expected)


def load(
    path: Union[str, "os.PathLike[str]"],
    layer: int = 0,
    *,
    kind: str = "mlp",
    device: "Union[str, torch.device]" = "best",
    dtype: "Union[str, torch.dtype, None]" = None,
    activation: Union[str, Activation, None] = None,
    numerics: Optional[str] = None,
    decoded: bool = False,
    expert: Optional[int] = None,
    beside_experts: bool = False,
    prefix: Optional[str] = None,
    ignore: Sequence[str] = (),
    config: bool = True,
    orientation: Optional[str] = None,
    arrangement: Optional[str] = None,
    names: Optional[Mapping[str, str]] = None,
    rescale: int = 0,
    plain_fp8: bool = False,
    allow_non_finite: bool = False,
) -> Layer:
    """Opens a layer of a safetensors or GGUF file, or of a directory with a model in it, and packs it for a device.

    ``kind`` is ``mlp`` for the feed-forward block or ``gated_linear`` for its first half. ``device`` is ``best``, ``cpu``,
    ``cuda`` or ``cuda:N``; ``dtype`` is ``f32``, ``f16`` or ``bf16``, or PyTorch's. Element type, activation and numerics are
    the file's unless they are given; ``decoded`` keeps no weights quantised.

    What a file does not decide is refused, and the error names the argument that does: ``expert`` of several, or the block
    ``beside_experts``; the ``prefix`` of names where parts of a model share them; ``ignore`` for keys of the configuration and
    tensors to compute without, or no ``config`` at all; ``orientation`` (``out-in``, ``in-out``) and ``arrangement``
    (``gate-first`` and others); ``names`` of tensors by ``gate``, ``up``, ``down``, ``gate_up``, ``gate_bias``, ``up_bias``,
    ``gate_up_bias`` and ``down_bias``; ``plain_fp8`` where codes of 8 bits are the values. ``rescale`` makes h smaller by so
    many powers of two. A weight that is NaN or infinite, in the file or as ``f16``, is refused unless ``allow_non_finite``.
    """
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise wrong("path", "a path: str or os.PathLike", said(path))
    if isinstance(ignore, str) or not isinstance(ignore, Iterable) or not all(isinstance(name, str) for name in ignore):
        raise wrong("ignore", "a sequence of names", said(ignore))
    place = _name("device", device, "best, cpu, cuda or cuda:N")
    if names is not None and not isinstance(names, Mapping):
        raise wrong("names", "a dictionary of tensors' names", said(names))
    for tensor, name in (names or {}).items():
        expect_choice("tensor in names", tensor, _TENSORS)
        expect_text(f"names[{tensor!r}]", name, "the name of a tensor")
    if isinstance(rescale, bool) or not isinstance(rescale, int) or abs(rescale) > 64:
        raise wrong("rescale", "a power of two from -64 to 64", said(rescale))
    reading = {
        "layer": expect_count("layer", layer),
        "expert": None if expert is None else expect_count("expert", expert),
        "beside_experts": bool(beside_experts),
        "names": dict(names or {}),
        "orientation": None if orientation is None else expect_text("orientation", orientation, "out-in or in-out"),
        "arrangement": None if arrangement is None else expect_text("arrangement", arrangement, "gate-first or another"),
        "prefix": None if prefix is None else expect_text("prefix", prefix, "the beginning of names"),
        "ignore": list(ignore),
        "config": bool(config),
        "rescale": rescale,
        "plain_fp8": bool(plain_fp8),
    }
    expect_choice("kind of layer", kind, _KINDS)
    if place != "cpu":
        find_cuda_libraries()
    native = _native.Layer.load(
        os.fsdecode(path),
        reading,
        kind=kind,
        device=place,
        dtype=None if dtype is None else _name("dtype", dtype, "f32, f16 or bf16"),
        activation=None if activation is None else as_activation(activation),
        numerics=expect_numerics(numerics),
        decoded=bool(decoded),
        allow_non_finite=bool(allow_non_finite),
    )
    return Layer(native)


def explain(layer: Layer, tokens: int = 1) -> Explanation:
    """As :meth:`Layer.explain`."""
    if not isinstance(layer, Layer):
        advice = "swiglu.torch.explain_last() says how the last call of a function or module was computed"
        raise wrong("layer", "a swiglu.Layer, which swiglu.load makes", said(layer), advice)
    return layer.explain(tokens)
