"""What a call costs the host, beside the bare parts that it is made of: all in one run, taking turns."""

from __future__ import annotations

import time
from typing import Any, Callable, Dict, List

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import torch as ops
from ..torch import _door

TOKENS, HIDDEN, INTERMEDIATE = 16, 896, 4864


class _Bare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return torch.empty_like(a)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, grad


def _bare_op() -> Callable[..., Tensor]:
    library = torch.library.Library("swiglu_bench", "DEF")
    library.define("f(Tensor a, Tensor b) -> Tensor")
    library.impl("f", lambda a, b: torch.empty_like(a), "CompositeExplicitAutograd")
    _bare_op.library = library  # type: ignore[attr-defined]
    found: Callable[..., Tensor] = torch.ops.swiglu_bench.f
    return found


def calls(device: str) -> Dict[str, Callable[[], Any]]:
    """Each by a name; what is bare is named so."""
    options: Dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    a, b = (torch.randn(TOKENS, INTERMEDIATE, **options) for _ in range(2))
    x = torch.randn(TOKENS, HIDDEN, **options)
    up, gate = (torch.randn(INTERMEDIATE, HIDDEN, **options) / 30 for _ in range(2))
    down = torch.randn(HIDDEN, INTERMEDIATE, **options) / 70
    h, y = torch.empty_like(a), torch.empty_like(x)
    ga, gb = a.clone().requires_grad_(), b.clone().requires_grad_()
    bare = _bare_op()
    leaves = [t.clone().requires_grad_() for t in (x, gate, up, down)]

    def three_maps(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    def step(block: Callable[..., Tensor]) -> None:
        for leaf in leaves:
            leaf.grad = None
        block(*leaves).backward(x)

    made: Dict[str, Callable[[], Any]] = {
        "bare: empty_like": lambda: torch.empty_like(a),
        "bare: define + impl": lambda: bare(a, b),
        "bare: autograd.Function": lambda: _Bare.apply(ga, gb),
        "bare: F.silu(a) * b": lambda: F.silu(a) * b,
        "bare: F.silu(a) * b, with gradient": lambda: F.silu(ga) * gb,
        "silu_mul, out=": lambda: ops.silu_mul(a, b, out=h),
        "silu_mul": lambda: ops.silu_mul(a, b),
        "silu_mul, torch.ops": lambda: torch.ops.swiglu.silu_mul(a, b, "swiglu", None),
        "silu_mul, with gradient": lambda: ops.silu_mul(ga, gb),
        "part of silu_mul: what it asks": _door.DOOR.nothing_in_force,
        "part of silu_mul: the rest": lambda: _door.DOOR.activation("", a, b, None, "swiglu", None, h, False),
        "bare: three linear maps": lambda: three_maps(x, gate, up, down),
        "mlp, out=": lambda: ops.mlp(x, gate, up, down, out=y),
        "mlp": lambda: ops.mlp(x, gate, up, down),
        "bare: three linear maps, with gradient": lambda: three_maps(*leaves),
        "mlp, with gradient": lambda: ops.mlp(*leaves),
        "bare: three linear maps, a training step": lambda: step(three_maps),
        "mlp, a training step": lambda: step(ops.mlp),
    }
    if device != "cpu":
        for name in ("silu_mul, out=", "mlp, out="):
            made[name]()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                made[name]()
            made[f"{name[:-6]}, a graph's replay"] = graph.replay
    return made


#: Of calls in a turn: as many as take so long, one at least. A CPU computes what a GPU's host only asks for.
REPEATS, SECONDS = 200, 0.005


def measure(device: str, rounds: int = 25) -> Dict[str, List[float]]:
    """Microseconds a call, by rounds. The device works through its queue between rounds, and is never full in one."""

    def wait() -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    def turn(call: Callable[[], Any], repeats: int) -> float:
        """Seconds a call takes."""
        wait()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) / repeats

    made = calls(device)
    repeats: Dict[str, int] = {}
    for name, call in made.items():
        turn(call, 3)  # The first compiles, loads and allocates.
        repeats[name] = max(1, min(REPEATS, int(SECONDS / turn(call, 3))))
    times: Dict[str, List[float]] = {name: [] for name in made}
    for number in range(rounds + 2):
        for name, call in made.items():
            took = turn(call, repeats[name])
            if number >= 2:
                times[name].append(took * 1e6)
    wait()
    return times
