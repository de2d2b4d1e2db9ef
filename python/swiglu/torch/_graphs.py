"""CUDA graphs of modules for few tokens, where the host's time is the most of a call's."""

from __future__ import annotations

from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from .._errors import error, expect_count, said, shape_error, wrong
from . import _check


def _blocks(module: nn.Module) -> Iterator[Tuple[str, nn.Module, int, Tensor]]:
    """The parts of a module that compute with our kernels: name, module, input features, one of the weights."""
    from .._patch import in_force
    from ..nn import _Gated

    for name, part in _check.expect_module("module", module).named_modules():
        patch = in_force(part)
        if patch is not None:
            first: Any = part._modules[patch.found.linears[0]]
            yield name, part, first.in_features, first.weight
        elif isinstance(part, _Gated):
            yield name, part, part.hidden, part._weights()[0]


def _expect_tokens(tokens: Sequence[int]) -> List[int]:
    counts = list(tokens) if isinstance(tokens, Iterable) and not isinstance(tokens, str) else []
    if not counts:
        raise wrong("tokens", "numbers from 1 on, such as [1, 2, 4]", said(tokens))
    return sorted({expect_count("a number in tokens", m, 1) for m in counts})


def _expect_cuda(weight: Tensor) -> None:
    if weight.device.type != "cuda":
        raise wrong("module", "weights on a CUDA device", f"some on {weight.device}", "module.cuda() moves it", "layout")
    if torch.cuda.is_current_stream_capturing():
        raise error("capture", "module", "prepare it before a capture, not inside")


def warmup(module: nn.Module, tokens: Sequence[int] = (1, 2, 4, 8, 16)) -> int:
    """Makes later calls with so many tokens as quick as every other: what they need is compiled and loaded.

    Calls each block of the module that computes with our kernels, :mod:`swiglu.nn`'s and patched ones, with zeros; in
    training its gradient too. Needed before a capture by other code that is the first call of its kind. Returns the number of
    blocks. Raises ``SwigluError`` where there is none.
    """
    counts, found = _expect_tokens(tokens), list(_blocks(module))
    if not found:
        text = "nothing in it computes with our kernels; swiglu.patch(module) lets its blocks do that"
        raise error("argument", type(module).__name__, text)
    for _, part, hidden, weight in found:
        if weight.device.type == "cuda":
            _expect_cuda(weight)
        for m in counts:
            x = torch.zeros(m, hidden, dtype=weight.dtype, device=weight.device, requires_grad=part.training)
            with torch.set_grad_enabled(part.training):
                y = part(x)
                if part.training:
                    torch.autograd.grad(y.sum(), x)
    return len(found)


class Bucket(NamedTuple):
    """A graph for up to so many tokens, and what it reads and writes."""

    graph: "torch.cuda.CUDAGraph"
    x: Tensor
    y: Tensor


class Graphed:
    """A module's inference as CUDA graphs, made by :func:`graphed`: call it in the module's place."""

    def __init__(self, module: nn.Module, buckets: Dict[int, Bucket], copy: bool) -> None:
        self.module = module
        #: By the number of tokens, ascending. Who writes ``x[:m]`` and replays ``graph`` has the result in ``y[:m]``.
        self.buckets = buckets
        self._copy = copy
        self._parts: List[Tuple[Dict[str, Any], str, Any]] = []
        self._tensors: List[Tuple[Dict[str, Any], str, Optional[int]]] = []
        for part in module.modules():
            self._parts += [(part._modules, *item) for item in part._modules.items()]
            for name, t in part._parameters.items():
                self._tensors.append((part._parameters, name, None if t is None else t.data_ptr()))

    def _expect_unchanged(self) -> None:
        """A graph reads what was there at its capture."""
        why = None
        for parts, name, part in self._parts:
            if parts.get(name) is not part:
                why = f"{name} is another module now"
        for tensors, name, address in self._tensors:
            t = tensors.get(name)
            if (None if t is None else t.data_ptr()) != address:
                why = f"its {name} lies elsewhere now"
        if why is None:
            from .._patch import _changed, in_force

            patch = in_force(self.module)
            why = None if patch is None else _changed(self.module, patch.found, patch.level)
        if why is not None:
            raise error("layout", "graphed module", f"{why}; call graphed() again")

    def _expect(self, x: Tensor) -> Tuple[int, Bucket]:
        """The tokens of x and the smallest bucket that holds them."""
        most, largest = next(reversed(self.buckets.items()))
        shape = x.shape
        if len(shape) < 1 or shape[-1] != largest.x.shape[1]:
            raise shape_error("x", f"[..., {largest.x.shape[1]}]", str(list(shape)))
        m = x.numel() // max(shape[-1], 1)
        if m > most:
            raise shape_error("x", f"at most {most} tokens, the largest graph's", f"{list(shape)}: {m} tokens")
        _check.expect_alike("x", x, largest.x)
        if torch.is_grad_enabled() and x.requires_grad:
            raise error("unsupported", "gradient", "a graph of a module's inference has none; use torch.no_grad()")
        if torch.is_autocast_enabled("cuda"):
            raise error("unsupported", "autocast", "a graph has the element types of its capture; leave autocast")
        return m, next(bucket for tokens, bucket in self.buckets.items() if m <= tokens)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, x: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            result: Tensor = self.module(x)
            return result
        m, bucket = self._expect(x)
        self._expect_unchanged()
        with torch.no_grad():
            bucket.x[:m].copy_(x.reshape(m, x.shape[-1]))
            bucket.graph.replay()
            y = bucket.y[:m]
            return (y.clone() if self._copy else y).reshape(*x.shape[:-1], y.shape[-1])

    def __repr__(self) -> str:
        return f"swiglu.torch.Graphed({type(self.module).__name__}, tokens={list(self.buckets)})"


#: By device: what graphs compute in, for all of them.
_pools: Dict[int, Any] = {}


def graphed(
    module: nn.Module, tokens: Sequence[int] = (1, 2, 4, 8, 16), *, copy: bool = True, pool: Optional[Any] = None
) -> Graphed:
    """The module's inference for few tokens as CUDA graphs, one for each number of tokens.

    x ``[..., K]`` takes the smallest graph that holds its tokens. Parameters are read where they lie, in each call. All
    graphs of a device that were made so share what they compute in: one after the other, on one stream, unless ``pool`` is
    another ``torch.cuda.graph_pool_handle()``. Without ``copy`` the result is a view of memory that the next call writes.
    Raises ``SwigluError`` or ``ShapeError`` for what no graph was made for, and where the module has changed since.
    """
    counts = _expect_tokens(tokens)
    found = list(_blocks(module))
    if not found or found[0][0] != "":
        raise error("argument", type(module).__name__, "expected a block: one of swiglu.nn, or one that is patched")
    _, _, hidden, weight = found[0]
    _expect_cuda(weight)
    buckets: Dict[int, Bucket] = {}
    if pool is None:
        pool = _pools.setdefault(weight.device.index, torch.cuda.graph_pool_handle())
    with torch.no_grad(), torch.cuda.device(weight.device), torch.autocast("cuda", enabled=False):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        # The largest first: smaller graphs find its memory in the pool.
        for m in reversed(counts):
            x = torch.zeros(m, hidden, dtype=weight.dtype, device=weight.device)
            with torch.cuda.stream(side):
                module(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                y = module(x)
            buckets[m] = Bucket(graph, x, y)
        torch.cuda.current_stream().wait_stream(side)
    return Graphed(module, dict(sorted(buckets.items())), copy)
