#!/usr/bin/env python3
"""Liger-Kernel: its Triton SiLU-and-multiply, behind torch's GEMMs where there are weights, and its gated GEMM in Triton.

Options: `way` (liger; of mlp-train also packed and mlp), `graph`.
"""

import sys
from importlib.metadata import version
from typing import Callable

from common import protocol


def make() -> tuple[protocol.Peer, str]:
    """Imports late: without Liger the peer still answers."""
    import torch
    import torch.nn.functional as F
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction, swiglu_forward

    from common import torch_server, torch_support
    from common.problem import Unsupported
    from common.torch_support import Way, swiglu_only
    from torch_ways.base import EAGER, Request, with_orientation
    from torch_ways.mlp_train import halves, training

    # It computes silu in float32, rounds it, and multiplies what was rounded: eager's order.
    def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return swiglu_forward(gate, up)[-1]

    def activation(request: Request) -> Way:
        swiglu_only(request.case)
        if request.case.packed_inputs:
            half = request.case.intermediate
            copies = [(p[:, :half], p[:, half:]) for (p, ) in request.rotate(request.data.packed)]
        else:
            copies = request.rotate(request.data.gate, request.data.up)
        if not request.case.packed_inputs:
            return Way(len(copies), lambda i: silu_mul(*copies[i]), EAGER)

        # Its kernel takes one stride for the inputs and the result, so halves of rows are copied first.
        def call(i: int) -> torch.Tensor:
            gate, up = (half.contiguous() for half in copies[i])
            return silu_mul(gate, up)

        return Way(len(copies), call, EAGER, ["copies both halves first"])

    def gated_linear(request: Request) -> Way:
        swiglu_only(request.case)
        data = with_orientation(request).data
        copies = request.rotate(data.x, data.gate, data.up)

        def call(i: int) -> torch.Tensor:
            x, wg, wu = copies[i]
            return silu_mul(F.linear(x, wg), F.linear(x, wu))

        return Way(len(copies), call, EAGER)

    def mlp(request: Request) -> Way:
        swiglu_only(request.case)
        data = with_orientation(request).data
        copies = request.rotate(data.x, data.gate, data.up, data.down)

        def call(i: int) -> torch.Tensor:
            x, wg, wu, wd = copies[i]
            return F.linear(silu_mul(F.linear(x, wg), F.linear(x, wu)), wd)

        return Way(len(copies), call, EAGER)

    def mlp_train(request: Request) -> Way:
        """Its LigerSwiGLUMLP."""
        swiglu_only(request.case)
        request = with_orientation(request)
        data = request.data

        def block(x: torch.Tensor, wg: torch.Tensor, wu: torch.Tensor, wd: torch.Tensor) -> torch.Tensor:
            return F.linear(LigerSiLUMulFunction.apply(F.linear(x, wg), F.linear(x, wu)), wd)

        return training(request, block, (data.gate, data.up, data.down))

    def mlp_train_packed(request: Request) -> Way:
        """Its LigerPhi3SwiGLUMLP: one product for gate and up, whose halves are copied."""
        swiglu_only(request.case)

        def block(x: torch.Tensor, wgu: torch.Tensor, wd: torch.Tensor) -> torch.Tensor:
            return F.linear(LigerSiLUMulFunction.apply(*F.linear(x, wgu).chunk(2, -1)), wd)

        return training(request, block, (request.data.gate_up(), request.data.down), halves)

    def mlp_train_fused(request: Request) -> Way:
        """Its LigerMLP, of 0.8 and later: gated GEMMs of its own in both passes, and for the gradient of x."""
        try:
            from liger_kernel.ops.mlp import LigerMLPFunction
        except ImportError as missing:
            raise Unsupported(f"liger-kernel {version('liger-kernel')} has no LigerMLP") from missing
        swiglu_only(request.case)
        request = with_orientation(request)
        data = request.data

        def block(x: torch.Tensor, wg: torch.Tensor, wu: torch.Tensor, wd: torch.Tensor) -> torch.Tensor:
            # It takes sequences of a batch.
            return LigerMLPFunction.apply(x[None], wg, wu, wd)[0]

        return training(request, block, (data.gate, data.up, data.down))

    # No activation-backward: its kernel writes the gradients over gate and up. Timed again and again it
    # would work on gradients of gradients, of normal inputs more than half zeros after a hundred calls, and
    # putting the inputs back would be timed with it.
    ways: dict[str, Callable[[Request], Way]] = {
        "activation:liger": activation,
        "gated-linear:liger": gated_linear,
        "mlp:liger": mlp,
        "mlp-train:liger": mlp_train,
        "mlp-train:packed": mlp_train_packed,
        "mlp-train:mlp": mlp_train_fused,
    }
    versions = {"liger-kernel": version("liger-kernel")}
    peer = torch_server.TorchPeer("liger", ways, frozenset(), versions, cpu=False)
    return peer, torch_support.default_device()


if __name__ == "__main__":
    sys.exit(protocol.main("liger", make))
