"""quack's modules and functions by our operators, for its own tests: the package `quack` in the places that they import.

Only what has a gate is ours; everything else is missing, and its tests are deselected.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, Optional, Tuple

import swiglu.torch as ours
import torch
from torch import Tensor, nn
from torch.nn import functional as F

ACTIVATIONS = {
    "swiglu": "swiglu", "reglu": "reglu", "geglu": "geglu-tanh", "glu": "glu",
    "swiglu_oai": "clamped-swiglu(alpha=1.702,offset=1,limit=3e38)",
}  # fmt: skip
DEFINITIONS = {
    "swiglu": lambda g, u: F.silu(g) * u,
    "swiglu_oai": lambda g, u: g * torch.sigmoid(1.702 * g) * (u + 1),
    "reglu": lambda g, u: F.relu(g) * u,
    "geglu": lambda g, u: F.gelu(g, approximate="tanh") * u,
    "glu": lambda g, u: torch.sigmoid(g) * u,
}


def _layout(concat: Any) -> str:
    return "gate-first" if concat else "interleaved"


def mlp_func(
    x: Tensor, weight1: Tensor, weight2: Tensor, activation: str, bias1: Optional[Tensor] = None,
    bias2: Optional[Tensor] = None, fuse_grad_accum: bool = False, tuned: bool = True, recompute: bool = False,
    concat_layout: bool = False,
) -> Tensor:  # fmt: skip
    # Biases of another type than the weights: ours are of one.
    biases = (None if b is None else b.to(weight1.dtype) for b in (bias1, bias2))
    first, last = biases
    return ours.mlp(
        x, weight1, None, weight2, biases=(first, None, last), activation=ACTIVATIONS[activation],
        layout=_layout(concat_layout), save="input" if recompute else "preact",
    )  # fmt: skip


class MLP(nn.Module):
    def __init__(
        self, in_features: int, hidden_features: int, out_features: Optional[int] = None, bias1: bool = False,
        bias2: bool = False, activation: str = "swiglu", device: Any = None, dtype: Any = None, tuned: bool = True,
        recompute: bool = False, concat_layout: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.fc1 = nn.Linear(in_features, 2 * hidden_features, bias=bias1, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden_features, out_features or in_features, bias=bias2, device=device, dtype=dtype)
        self.activation, self.recompute, self.concat_layout = activation, recompute, concat_layout

    def forward(self, x: Tensor) -> Tensor:
        return mlp_func(
            x, self.fc1.weight, self.fc2.weight, self.activation, self.fc1.bias, self.fc2.bias,
            recompute=self.recompute, concat_layout=self.concat_layout,
        )  # fmt: skip


def gemm_gated(
    x: Tensor, weight: Tensor, bias: Optional[Tensor] = None, activation: str = "swiglu", store_preact: bool = True,
    tuned: bool = True, concat_layout: Any = None,
) -> Tuple[Optional[Tensor], Tensor]:  # fmt: skip
    """gate and up of x·weight in turns, if they are wanted, and h."""
    layout, w = _layout(concat_layout), weight.t()
    if bias is not None:
        bias = bias.to(x.dtype)
        # A bias lies as the weights do, or in turns where only these do not.
        if concat_layout and "bias" not in concat_layout:
            bias = bias.unflatten(0, (-1, 2)).t().flatten()
    name = ACTIVATIONS[activation]
    h = ours.gated_linear(x, w, None, bias, activation=name, layout=layout)
    preact = F.linear(x, w, bias) if store_preact else None
    if preact is not None and concat_layout:
        preact = preact.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return preact, h


def gemm_gated_ref(
    x: Tensor, weight: Tensor, bias: Optional[Tensor] = None, activation: str = "swiglu", store_preact: bool = True,
    concat_layout: Any = None,
) -> Tuple[Optional[Tensor], Tensor]:  # fmt: skip
    """What the tests compare with, by PyTorch's operations alone."""
    w = weight.t()
    both = F.linear(x, w)
    if concat_layout:
        both = both.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    if bias is not None:
        if concat_layout and "bias" in concat_layout:
            bias = bias.unflatten(0, (2, -1)).t().flatten()
        both = (both + bias).to(x.dtype)
    h = DEFINITIONS[activation](both[..., ::2], both[..., 1::2])
    return both if store_preact else None, h


def gemm_dgated(
    grad: Tensor, weight: Tensor, preact: Tensor, colvec_scale: Any = None, activation: str = "swiglu",
    colvec_reduce: bool = False, tuned: bool = True,
) -> Tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of gate and up in turns through h·weight, and h."""
    how = ACTIVATIONS[activation], "interleaved", None
    preact = preact.detach()
    return torch.ops.swiglu.glu_backward(grad @ weight, preact, *how), torch.ops.swiglu.glu(preact, *how)


def gemm_dgated_ref(grad: Tensor, weight: Tensor, preact: Tensor, activation: str) -> Tuple[Tensor, Tensor]:
    leaf = preact.detach().requires_grad_()
    h = DEFINITIONS[activation](leaf[..., ::2], leaf[..., 1::2])
    (found,) = torch.autograd.grad(h, leaf, grad @ weight)
    return found, h.detach()


def linear_gated_func(
    x: Tensor, weight: Tensor, activation: str, bias: Optional[Tensor] = None, store_preact: bool = True, **_: Any
) -> Tuple[Tensor, Tensor]:
    preact = F.linear(x, weight, bias)
    return preact, ours.glu(preact, ACTIVATIONS[activation], layout="interleaved").detach()


def gated_linear_func(preact: Tensor, weight: Tensor, h: Tensor, activation: str, **_: Any) -> Tensor:
    return F.linear(ours.glu(preact, ACTIVATIONS[activation], layout="interleaved"), weight)


def _missing(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("not of a gate: its tests are deselected")


class _Module(ModuleType):
    """A module of quack's, in which everything that is not here is missing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _missing


_OURS = dict(
    MLP=MLP, mlp_func=mlp_func, gemm_gated=gemm_gated, gemm_gated_ref=gemm_gated_ref, gemm_dgated=gemm_dgated,
    gemm_dgated_ref=gemm_dgated_ref, gemm_act=gemm_gated, gemm_dact=gemm_dgated, linear_gated_func=linear_gated_func,
    gated_linear_func=gated_linear_func, gated_to_pytorch_fn_map=DEFINITIONS, act_to_pytorch_fn_map={},
    get_device_capacity=lambda device: torch.cuda.get_device_capability(device),
)  # fmt: skip
for _name in ("", ".mlp", ".linear", ".gemm_interface", ".cute_dsl_utils", ".gemm_config", ".rounding", ".rms_final_reduce"):
    _made = _Module(f"quack{_name}")
    _made.__path__ = []  # type: ignore[attr-defined]
    _made.__dict__.update(_OURS)
    sys.modules[f"quack{_name}"] = _made
