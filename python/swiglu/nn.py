"""Modules: the names of parameters are those of Hugging Face, so that state dicts fit."""

from __future__ import annotations

from typing import Any, Callable, Optional, Tuple, Union

import torch
from torch import Tensor, nn

from . import torch as ops
from ._activation import as_activation, expect_numerics
from ._errors import error, expect_count, expect_flag, expect_layout, said, wrong
from ._native import Activation
from .torch import _check, _kernels

__all__ = ["GLU", "GatedLinear", "MLP"]


class GLU(nn.Module):
    """``act(gate) * up`` of a packed ``[..., 2H]`` tensor, or of two ``[..., H]``."""

    def __init__(
        self,
        activation: Union[str, Activation] = "swiglu",
        *,
        layout: str = "gate-first",
        numerics: Optional[str] = None,
    ) -> None:
        super().__init__()
        self.activation = str(as_activation(activation))
        self.layout = expect_layout(layout)
        self.numerics = expect_numerics(numerics)

    def forward(self, x: Tensor, up: Optional[Tensor] = None) -> Tensor:
        if up is not None:
            if self.layout != "gate-first":
                _check.expect_layout_of(up, self.layout)
            return ops.silu_mul(x, up, activation=self.activation, numerics=self.numerics)
        return ops.glu(x, self.activation, layout=self.layout, numerics=self.numerics)

    def extra_repr(self) -> str:
        numerics = "" if self.numerics is None else f", numerics={self.numerics}"
        return f"{self.activation}, {self.layout}{numerics}"


class _Gated(nn.Module):
    """Gate and up: two maps ``gate_proj`` and ``up_proj``, or one ``gate_up_proj`` whose first half is the gate."""

    gate_proj: nn.Linear
    up_proj: nn.Linear
    gate_up_proj: nn.Linear

    def __init__(
        self,
        activation: Union[str, Activation],
        packed: bool,
        save: str,
        numerics: Optional[str],
        gradient_accumulation_fusion: bool,
    ) -> None:
        super().__init__()
        self.activation = str(as_activation(activation))
        ops._saves(save)
        self.packed, self.save, self.numerics = expect_flag("packed", packed), save, expect_numerics(numerics)
        #: Whether gradients of weights are added to their ``main_grad``.
        self.gradient_accumulation_fusion = ops._fuses(gradient_accumulation_fusion, self.numerics)

    def _make(self, hidden: int, intermediate: int, bias: bool, device: Any, dtype: Any) -> None:
        hidden, intermediate = expect_count("hidden", hidden, 1), expect_count("intermediate", intermediate, 1)
        expect_flag("bias", bias)
        if dtype is not None and dtype not in _check.COMPUTED:
            expected = "torch.float32, float16, bfloat16 or float64"
            raise wrong("dtype", expected, str(dtype) if isinstance(dtype, torch.dtype) else said(dtype), kind="dtype")

        def linear(features: int) -> nn.Linear:
            return nn.Linear(hidden, features, bias=bias, device=device, dtype=dtype)

        if self.packed:
            self.gate_up_proj = linear(2 * intermediate)
        else:
            self.gate_proj, self.up_proj = linear(intermediate), linear(intermediate)

    def _weights(self) -> Tuple[Tensor, Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
        """w_gate, w_up, b_gate, b_up."""
        if self.packed:
            return self.gate_up_proj.weight, None, self.gate_up_proj.bias, None
        return self.gate_proj.weight, self.up_proj.weight, self.gate_proj.bias, self.up_proj.bias

    def _why_called(self) -> Optional[str]:
        """Why maps have to be called: where their weights alone are not what they compute."""
        for name in ("gate_up_proj", "gate_proj", "up_proj", "down_proj"):
            why = _check.changed(self._modules, name) if name in self._modules else None
            if why is not None:
                return why
        return None

    def _h_of_called(self, x: Tensor) -> Optional[Tensor]:
        """h by maps that are called; None where their weights say what they compute."""
        why = self._why_called()
        if why is None:
            return None
        if self.gradient_accumulation_fusion:
            raise error("unsupported", "gradient_accumulation_fusion", f"{why}, and its weights' gradients are its own")
        how: Any = {"activation": self.activation, "numerics": self.numerics}
        if self.packed:
            return ops.glu(self.gate_up_proj(x), **how)
        gate, up = self.gate_proj(x), self.up_proj(x)
        # As PyTorch's product; who gives something else than tensors is told by the operation.
        if isinstance(gate, Tensor) and isinstance(up, Tensor) and gate.dtype != up.dtype:
            dtype = torch.promote_types(gate.dtype, up.dtype)
            gate, up = gate.to(dtype), up.to(dtype)
        return ops.silu_mul(gate, up, **how)

    def _shape_of_gate(self) -> Tuple[int, int]:
        shape = (self.gate_up_proj if self.packed else self.gate_proj).weight.shape
        if len(shape) != 2:
            raise AttributeError("a map whose weight says no sizes")
        return shape[0], shape[1]

    @property
    def hidden(self) -> int:
        """Input features, K."""
        return self._shape_of_gate()[1]

    @property
    def intermediate(self) -> int:
        """H."""
        features = self._shape_of_gate()[0]
        return features // 2 if self.packed else features

    def reset_parameters(self) -> None:
        """As ``torch.nn.Linear``; the halves of a packed weight are one map's."""
        for module in self.children():
            if isinstance(module, nn.Linear):
                module.reset_parameters()

    def extra_repr(self) -> str:
        numerics = f", numerics={self.numerics}" if self.numerics else ""
        try:
            sizes = f"{self.hidden} -> {self.intermediate}, "
        except (AttributeError, RuntimeError):
            # A map has no such weight, or one without a shape as yet: it is printed below.
            sizes = ""
        return f"{sizes}{self.activation}, save={self.save}{numerics}"


class GatedLinear(_Gated):
    """h = act(x·Wg + bg, x·Wu + bu)."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        *,
        bias: bool = False,
        activation: Union[str, Activation] = "swiglu",
        packed: bool = False,
        save: str = "preact",
        numerics: Optional[str] = None,
        gradient_accumulation_fusion: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(activation, packed, save, numerics, gradient_accumulation_fusion)
        self._make(hidden, intermediate, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        called = self._h_of_called(x)
        if called is not None:
            return called
        w_gate, w_up, b_gate, b_up = self._weights()
        return ops.gated_linear(
            x, w_gate, w_up, b_gate, b_up, activation=self.activation, save=self.save, numerics=self.numerics,
            gradient_accumulation_fusion=self.gradient_accumulation_fusion,
        )  # fmt: skip


class MLP(_Gated):
    """The feed-forward block y = h·Wd + bd of Llama and its kin, or an expert, whose rows a router weighs: ``row_scale``."""

    down_proj: nn.Linear

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        *,
        bias: bool = False,
        activation: Union[str, Activation] = "swiglu",
        packed: bool = False,
        save: str = "preact",
        numerics: Optional[str] = None,
        gradient_accumulation_fusion: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(activation, packed, save, numerics, gradient_accumulation_fusion)
        self._make(hidden, intermediate, bias, device, dtype)
        self.down_proj = nn.Linear(intermediate, hidden, bias=bias, device=device, dtype=dtype)

    @classmethod
    def from_module(
        cls,
        module: nn.Module,
        *,
        save: str = "preact",
        numerics: Optional[str] = None,
        gradient_accumulation_fusion: bool = False,
    ) -> "MLP":
        """A block over the parameters of a Llama-like one, which both then have: nothing is copied.

        Raises ``SwigluError`` with the reason where :func:`swiglu.patch` would leave the module alone.
        """
        from ._patch import recognise

        found = recognise(module)
        made = cls.__new__(cls)
        _Gated.__init__(made, found.activation, found.packed, save, numerics, gradient_accumulation_fusion)
        for name in found.linears:
            setattr(made, name, getattr(module, name))
        made.train(module.training)
        return made

    def forward(self, x: Tensor, row_scale: Optional[Tensor] = None) -> Tensor:
        called = self._h_of_called(x)
        if called is not None:
            return ops._times(self.down_proj(called), x, row_scale)
        w_gate, w_up, b_gate, b_up = self._weights()
        biases = (b_gate, b_up, self.down_proj.bias)
        return ops.mlp(
            x, w_gate, w_up, self.down_proj.weight,
            biases=biases, activation=self.activation, save=self.save, numerics=self.numerics,
            gradient_accumulation_fusion=self.gradient_accumulation_fusion, row_scale=row_scale,
        )  # fmt: skip

    def freeze(self) -> "Frozen":
        """A block for inference on a CPU over a packed copy of the weights, which later changes of these do not reach."""
        return Frozen(self)


class Frozen(nn.Module):
    """A feed-forward block whose packed weights are constants: made by :meth:`MLP.freeze`.

    It has no parameters, computes tensors of the element type it was made of on a CPU, and gives no gradient. Neither is
    converted or moved, nor is it saved: convert, move or save the block, and freeze that.
    """

    def __init__(self, block: MLP) -> None:
        super().__init__()
        if not isinstance(block, MLP):
            raise wrong("block", "a swiglu.nn.MLP", said(block), "swiglu.nn.MLP.from_module(module) makes one")
        why = block._why_called()
        if why is not None:
            raise error("unsupported", "freezing a block", f"{why}, and more than its weights would be lost")
        w_gate, w_up, b_gate, b_up = (None if t is None else t.detach() for t in block._weights())
        assert w_gate is not None
        w_down = block.down_proj.weight.detach()
        b_down = None if block.down_proj.bias is None else block.down_proj.bias.detach()
        self._layer = _kernels.packed(
            (w_gate, w_up, w_down, b_gate, b_up, b_down), block.activation, block.numerics
        )
        self.dtype = w_gate.dtype

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu") and isinstance(x, Tensor) and x.dtype in _check.COMPUTED - {torch.float64}:
            # As linear maps: any of these types in, that of the region out.
            y: Tensor = _kernels.packed_forward(self._layer, x.to(self.dtype))
            return y.to(torch.get_autocast_dtype("cpu"))
        y = _kernels.packed_forward(self._layer, x)
        return y

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> "Frozen":
        # What ``half``, ``to`` and their kin do to parameters, of which there are none here.
        there = fn(torch.empty(0, dtype=self.dtype))
        if there.dtype != self.dtype or there.device.type != "cpu":
            given = f"{there.dtype} on {there.device.type}"
            advice = "convert or move the block it was made of, and call freeze() on that"
            raise wrong("packed weights", f"to stay {self.dtype} on cpu", given, advice, "unsupported")
        return self

    def __reduce__(self) -> Tuple[Any, ...]:
        text = "its weights are packed for this machine; save the block it was made of, and call freeze() where it is loaded"
        raise error("unsupported", "pickling a frozen block", text)

    def extra_repr(self) -> str:
        return repr(self._layer)

    def __copy__(self) -> "Frozen":
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: Any) -> "Frozen":
        # Constants are shared.
        made = self.__class__.__new__(self.__class__)
        nn.Module.__init__(made)
        made._layer, made.dtype, made.training = self._layer, self.dtype, self.training
        return made
