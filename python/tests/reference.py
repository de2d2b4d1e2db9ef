"""float64 definitions in numpy, and how far results may be from them."""

from __future__ import annotations

import math
from typing import Any, Tuple

import numpy as np

#: Names that cover each function of the gate, a limit before and behind it, and an offset.
FAMILY = [
    "swiglu", "swiglu(beta=1.702)", "glu", "reglu", "reglu2", "geglu", "geglu-tanh", "bilinear",
    "clamped-swiglu", "geglu-tanh(limit=2.5,offset=-0.25)", "reglu2(limit=1.5,offset=0.5)", "swiglu(limit-behind=1.5)",
]  # fmt: skip

#: Half the distance from 1 to the next value.
UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "float64": 2.0**-53}
#: The least positive value.
LEAST = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133, "float64": 2.0**-1074}

_erf = np.vectorize(math.erf, otypes=[float])


def sigmoid(x: Any) -> Any:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def function(act: Any, g: Any) -> Any:
    return {
        "silu": lambda: g * sigmoid(act.beta * g),
        "sigmoid": lambda: sigmoid(g),
        "relu": lambda: np.maximum(g, 0),
        "relu2": lambda: np.maximum(g, 0) ** 2,
        "gelu": lambda: 0.5 * g * (1 + _erf(g / math.sqrt(2))),
        "gelu_tanh": lambda: 0.5 * g * (1 + np.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))),
        "identity": lambda: g,
    }[act.gate]()


def factors(act: Any, gate: Any, up: Any) -> Tuple[Any, Any, Any]:
    limit = math.inf if act.limit is None else act.limit
    g = gate if act.limit_behind else np.minimum(gate, limit)
    f = function(act, g)
    f = np.minimum(f, limit) if act.limit_behind else f
    return g, f, np.clip(up, -limit, limit) + act.up_offset


def activation(act: Any, gate: Any, up: Any) -> Any:
    _, f, u = factors(act, gate, up)
    return f * u


def activation_bound(act: Any, gate: Any, up: Any, dtype: str, unit: float = 0.0) -> Any:
    """How far h may be from the definition, element by element.

    The function's value is computed by at most 8 operations in float32, of which each is off by a unit of its result, from
    an argument of the exponential of at most max(|beta g|, g^2 + |g|^3 / 10) that is off by 4 units: its error is the
    exponential's relative one. Fast exponentials, of 16-bit types, are off by another 2^-17. GELU's tail is a difference from
    max(g, 0). The product, the offset and the result in T are a unit each, and half the least value is lost below.
    """
    g, f, u = factors(act, np.abs(gate), np.abs(up))
    g, f, u = np.abs(gate), np.maximum(np.abs(f), np.abs(factors(act, gate, up)[1])), np.abs(up)
    u = np.minimum(u, math.inf if act.limit is None else act.limit) + abs(act.up_offset)
    single = unit or (UNIT["float32"] if dtype != "float64" else UNIT["float64"])
    argument = np.maximum(abs(act.beta) * g, g**2 + g**3 / 10) * (act.gate in ("silu", "gelu", "gelu_tanh", "sigmoid"))
    fast = 2.0**-17 if dtype in ("float16", "bfloat16") else 0.0
    relative = single * (12 + 4 * np.minimum(argument, 90)) + fast
    exact = np.abs(activation(act, gate, up))
    return relative * f * u + (UNIT[dtype] * (1 + 2.0**-10)) * (exact + relative * f * u) + LEAST[dtype]


def linear_bound(x: Any, weight: Any, bias: Any, x_error: Any, dtype: str) -> Any:
    """How far x w^T + b may be from exact, in any order of sums in float32, with a result of T."""
    terms = x.shape[-1] + 1
    single = UNIT["float32"] if dtype != "float64" else UNIT["float64"]
    gamma = terms * single / (1 - terms * single)
    magnitude = np.abs(x) @ np.abs(weight).T + (0 if bias is None else np.abs(bias))
    through = x_error @ np.abs(weight).T
    inner = gamma * (magnitude + through) + through
    return inner + UNIT[dtype] * (np.abs(x @ weight.T + (0 if bias is None else bias)) + inner) + LEAST[dtype]
