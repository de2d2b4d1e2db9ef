"""A small Llama of transformers with real layer shapes, its blocks by several providers: verified, then measured in turns."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch
from torch import Tensor

from .. import patch
from ._mlp import _turn, _wait

#: What a turn takes at least.
_TURN_MS = 20.0
_VOCABULARY = 1024
#: Features of an attention head.
HEAD = 128


def _eager(model: Any) -> Any:
    return model


def _compile(model: Any) -> Any:
    return torch.compile(model, mode="reduce-overhead" if not model.training else None)


def _liger(model: Any) -> Any:
    from liger_kernel.transformers.swiglu import LigerSwiGLUMLP

    for layer in model.model.layers:
        layer.mlp.forward = LigerSwiGLUMLP.forward.__get__(layer.mlp)
    return model


def _swiglu(model: Any) -> Any:
    report = patch(model, strict=True)
    assert len(report.patched) == len(model.model.layers), report
    return model


def _swiglu_compile(model: Any) -> Any:
    return _compile(_swiglu(model))


PROVIDERS: Dict[str, Callable[[Any], Any]] = {
    "torch": _eager,
    "compile": _compile,
    "liger": _liger,
    "swiglu": _swiglu,
    "swiglu+compile": _swiglu_compile,
}
#: decode: so many sequences of one token. prefill: one sequence. train: forward and backward of one sequence.
MODES = ("decode", "prefill", "train")


@dataclass
class Row:
    """Milliseconds of a provider, or why there are none."""

    provider: str
    mode: str
    tokens: int
    times: List[float] = field(default_factory=list)
    missing: Optional[str] = None
    #: Bytes at the peak beyond what was allocated before.
    peak: int = 0

    def median(self) -> float:
        return statistics.median(self.times)


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    intermediate: int
    dtype: torch.dtype
    device: str


def _model(shape: Shape, train: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = shape.hidden // HEAD
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=heads,
        num_key_value_heads=math.gcd(heads, max(1, heads // 4)),
        max_position_embeddings=8192,
        use_cache=False,
    )
    torch.manual_seed(7)
    # Where it is used: to draw its weights on the host takes longer than to measure it.
    with torch.device(shape.device):
        model: Any = LlamaForCausalLM(config)
    return model.to(device=shape.device, dtype=shape.dtype).train(train)


def _run(model: Any, mode: str, ids: Tensor) -> Tensor:
    if mode != "train":
        with torch.no_grad():
            logits: Tensor = model(ids).logits
            return logits
    for parameter in model.parameters():
        parameter.grad = None
    model(ids, labels=ids).loss.backward()
    grad: Tensor = next(p for name, p in model.named_parameters() if name.endswith("layers.0.mlp.up_proj.weight")).grad
    return grad


def _call(model: Any, mode: str, ids: Tensor, _: int) -> Tensor:
    return _run(model, mode, ids)


def _peak(run: Callable[[int], Any], device: str) -> int:
    if device == "cpu":
        return 0
    _wait(device)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(0)
    _wait(device)
    return torch.cuda.max_memory_allocated() - before


def measure(providers: Sequence[str], case: str, shape: Shape, rounds: int) -> List[Row]:
    """Each provider in a case such as ``decode:8``; those that are not here, or are wrong, with the reason instead of times."""
    mode, count = case.split(":")
    tokens = int(count)
    ids = torch.randint(_VOCABULARY, (tokens, 1) if mode == "decode" else (1, tokens), device=shape.device)
    rows = [Row(name, mode, tokens) for name in providers]
    plain = _model(shape, mode == "train")
    usual = _run(plain, mode, ids).double()
    exact = _run(plain.double(), mode, ids)
    del plain
    size = exact.norm().item()
    floor = (usual - exact).norm().item() / size
    runs: Dict[str, Callable[[int], Any]] = {}
    for row in rows:
        try:
            model = PROVIDERS[row.provider](_model(shape, mode == "train"))
            run = runs[row.provider] = partial(_call, model, mode, ids)
            # The first ones compile and capture.
            results = [run(i) for i in range(4)]
            error = (results[-1].double() - exact).norm().item() / size
            if not error <= 2 * floor + 16 * 2.0**-24:
                row.missing = f"wrong: its relative error is {error:.1e}, that of PyTorch's operations {floor:.1e}"
            row.peak = _peak(run, shape.device)
        except Exception as failed:
            row.missing = f"not run: {type(failed).__name__}: {str(failed).splitlines()[0] if str(failed) else ''}"
    there = [row for row in rows if row.missing is None]
    repeats = {r.provider: max(2, int(_TURN_MS / _turn(runs[r.provider], shape.device, 3))) for r in there}
    for _ in range(rounds):
        for row in there:
            row.times.append(_turn(runs[row.provider], shape.device, repeats[row.provider]))
    return rows
