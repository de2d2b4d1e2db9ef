"""A feed-forward block of several providers: outputs verified, then measured in turns, with weights colder than the caches."""

from __future__ import annotations

import csv
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import __version__
from .. import torch as ops

Call = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

#: More than the last cache of any device here holds.
COLD_BYTES = 256 << 20
#: What takes its turn is called for about as long as this.
TURN_SECONDS = 5e-3


def _torch(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def _compile() -> Call:
    made: Call = torch.compile(_torch)
    return made


def _swiglu() -> Call:
    return lambda x, gate, up, down: ops.mlp(x, gate, up, down)


def _liger() -> Call:
    from liger_kernel.ops import LigerSiLUMulFunction

    silu_mul = LigerSiLUMulFunction.apply

    def call(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(silu_mul(F.linear(x, gate), F.linear(x, up)), down)

    return call


def _liger_mlp() -> Call:
    from liger_kernel.ops import LigerMLPFunction

    def call(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        # It is for sequences of a batch.
        made: Tensor = LigerMLPFunction.apply(x[None], gate, up, down)
        return made[0]

    return call


def _quack() -> Call:
    from quack.mlp import mlp_func

    packed: Dict[int, Tensor] = {}

    def call(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        # Its own layout, made once: one row of the gate, one of up.
        both = packed.get(id(gate))
        if both is None:
            both = torch.stack((gate, up), 1).flatten(0, 1).detach().requires_grad_(gate.requires_grad)
            packed[id(gate)] = both
        made: Tensor = mlp_func(x, both, down, activation="swiglu")
        return made

    return call


PROVIDERS: Dict[str, Callable[[], Call]] = {
    "torch": lambda: _torch,
    "compile": _compile,
    "liger": _liger,
    "liger-mlp": _liger_mlp,
    "quack": _quack,
    "swiglu": _swiglu,
}
#: forward: inference. full: forward and backward, of x and all weights.
MODES = ("forward", "full")


@dataclass
class Row:
    """Milliseconds of a provider, or why there are none."""

    provider: str
    mode: str
    tokens: int
    times: List[float] = field(default_factory=list)
    missing: Optional[str] = None

    def quantile(self, percent: int) -> float:
        return statistics.quantiles(self.times, n=100, method="inclusive")[percent - 1]


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    dtype: torch.dtype
    device: str


def _weights(shape: Shape, grad: bool) -> List[Tuple[Tensor, Tensor, Tensor]]:
    """As many blocks as are more than the caches hold, which take turns."""
    one = 3 * shape.hidden * shape.intermediate * torch.empty(0, dtype=shape.dtype).element_size()
    options: Dict[str, Any] = {"dtype": shape.dtype, "device": shape.device}

    def weight(features: int, inputs: int) -> Tensor:
        made: Tensor = torch.randn(features, inputs, **options) / inputs**0.5
        return made.requires_grad_(grad)

    k, h = shape.hidden, shape.intermediate
    return [(weight(h, k), weight(h, k), weight(k, h)) for _ in range(-(-COLD_BYTES // one))]


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _step(call: Call, mode: str, x: Tensor, weights: Tuple[Tensor, Tensor, Tensor], grad: Tensor) -> Sequence[Tensor]:
    if mode == "forward":
        with torch.no_grad():
            return (call(x, *weights),)
    y = call(x, *weights)
    return (y, *torch.autograd.grad(y, (x, *weights[2:]), grad))


def _full(call: Call, x: Tensor, weights: Tuple[Tensor, Tensor, Tensor], grad: Tensor) -> None:
    for t in (x, *weights):
        t.grad = None
    call(x, *weights).backward(grad)


def _verify(call: Call, mode: str, x: Tensor, weights: Tuple[Tensor, Tensor, Tensor], grad: Tensor) -> Optional[str]:
    """Why results are wrong: further from float64 than twice what PyTorch's operations are, and a few units of float32."""
    wide = [t.detach().double().requires_grad_(mode == "full") for t in (x, *weights)]
    exact = _step(_torch, mode, wide[0], (wide[1], wide[2], wide[3]), grad.double())
    theirs = _step(call, mode, x, weights, grad)
    plain = _step(_torch, mode, x, weights, grad)
    for name, a, b, right in zip(("y", "dx", "dw_down"), theirs, plain, exact):
        size = right.norm()
        error, usual = ((t.double() - right).norm() / size for t in (a, b))
        if not error <= 2 * usual + 16 * 2.0**-24:
            return f"{name} is wrong: its relative error is {error:.1e}, that of PyTorch's operations {usual:.1e}"
    return None


def _turn(run: Callable[[int], Any], device: str, repeats: int) -> float:
    """Milliseconds a call."""
    if device == "cpu":
        start = time.perf_counter()
        for i in range(repeats):
            run(i)
        return (time.perf_counter() - start) / repeats * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for i in range(repeats):
        run(i)
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / repeats


def measure(
    providers: Sequence[str], modes: Sequence[str], tokens: Sequence[int], shape: Shape, rounds: int = 15
) -> List[Row]:
    """Each provider, mode and number of tokens; those that are not here, or are wrong, with the reason instead of times."""
    calls: Dict[str, Call] = {}
    why: Dict[str, str] = {}
    for name in providers:
        try:
            calls[name] = PROVIDERS[name]()
        except Exception as missing:
            why[name] = f"not run: {type(missing).__name__}: {missing}"
    rows: List[Row] = []
    for mode in modes:
        blocks = _weights(shape, mode == "full")
        for m in tokens:
            here = [Row(name, mode, m, missing=why.get(name)) for name in providers]
            rows += here
            _measure_one(here, calls, blocks, shape, rounds)
        del blocks
    return rows


def _running(
    call: Call, mode: str, x: Tensor, blocks: List[Tuple[Tensor, Tensor, Tensor]], grad: Tensor
) -> Callable[[int], None]:
    def run(i: int) -> None:
        if mode == "full":
            _full(call, x, blocks[i % len(blocks)], grad)
        else:
            with torch.no_grad():
                call(x, *blocks[i % len(blocks)])

    return run


def _measure_one(
    rows: List[Row], calls: Dict[str, Call], blocks: List[Tuple[Tensor, Tensor, Tensor]], shape: Shape, rounds: int
) -> None:
    mode, m = rows[0].mode, rows[0].tokens
    x = torch.randn(m, shape.hidden, dtype=shape.dtype, device=shape.device, requires_grad=mode == "full")
    grad = torch.randn(m, shape.hidden, dtype=shape.dtype, device=shape.device)
    runs: Dict[str, Tuple[Callable[[int], Any], int]] = {}
    for row in rows:
        if row.missing is not None:
            continue
        call = calls[row.provider]
        run = _running(call, mode, x, blocks, grad)
        try:
            row.missing = _verify(call, mode, x, blocks[0], grad)
            for i in range(max(3, len(blocks))):
                run(i)
            _wait(shape.device)
            repeats = max(2, min(1000, int(TURN_SECONDS * 1e3 / _turn(run, shape.device, 2))))
        except Exception as failed:
            row.missing = f"failed: {type(failed).__name__}: {str(failed).splitlines()[0] if str(failed) else ''}"
        if row.missing is None:
            runs[row.provider] = run, repeats
    for _ in range(rounds):
        for row in rows:
            if row.missing is None:
                run, repeats = runs[row.provider]
                row.times.append(_turn(run, shape.device, repeats))


def write_csv(path: Path, rows: Sequence[Row], shape: Shape) -> None:
    """In the columns of Liger-Kernel's benchmarks."""
    columns = (
        "kernel_name,kernel_provider,kernel_operation_mode,metric_name,metric_unit,x_name,x_label,x_value,"
        "y_value_50,y_value_20,y_value_80,extra_benchmark_config_str,gpu_name,timestamp,liger_version"
    )
    extra = {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "dtype": str(shape.dtype),
        "torch": torch.__version__,
        "swiglu": __version__,
    }
    try:
        from importlib.metadata import version

        liger = version("liger-kernel")
    except Exception:
        liger = ""
    with open(path, "w", encoding="utf-8", newline="") as file:
        out = csv.writer(file)
        out.writerow(columns.split(","))
        for row in rows:
            if row.missing is None:
                out.writerow([
                    "swiglu_mlp", row.provider, row.mode, "speed", "ms", "T", "tokens", row.tokens,
                    *(row.quantile(q) for q in (50, 20, 80)), json.dumps(extra), device_name(shape.device),
                    time.strftime("%Y-%m-%d %H:%M:%S"), liger,
                ])  # fmt: skip


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device != "cpu" else "CPU"


def plot(path: Path, rows: Sequence[Row], shape: Shape) -> None:
    """Medians and quartiles by tokens; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    modes = list(dict.fromkeys(row.mode for row in rows))
    figure, axes = plt.subplots(1, len(modes), figsize=(6 * len(modes), 4.5), squeeze=False)
    for axis, mode in zip(axes[0], modes):
        for provider in dict.fromkeys(row.provider for row in rows):
            there = [r for r in rows if (r.provider, r.mode) == (provider, mode) and r.missing is None]
            if there:
                x, y = [r.tokens for r in there], [r.quantile(50) for r in there]
                (line,) = axis.plot(x, y, marker="o", label=provider)
                low, high = ([r.quantile(q) for r in there] for q in (25, 75))
                axis.fill_between(x, low, high, color=line.get_color(), alpha=0.2)
        axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms", title=mode)
        axis.grid(True, which="both", alpha=0.2)
        axis.legend()
    name = str(shape.dtype).replace("torch.", "")
    figure.suptitle(f"{shape.hidden} x {shape.intermediate}, {name}, {device_name(shape.device)}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
