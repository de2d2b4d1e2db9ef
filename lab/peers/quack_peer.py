#!/usr/bin/env python3
"""quack: `gemm_gated`, a CuTe DSL GEMM with the gate in its epilogue, and its down GEMM.

Options: `way` (activation has none; gated-linear and mlp: gemm_gated; mlp-train: save, recompute, concat, accumulate),
`weights` (out-in or in-out: how
its interleaved weight lies in memory), `graph`. It tunes itself when a shape is first met, up to half
a minute.
"""

import sys
from importlib.metadata import version
from typing import Callable

from common import protocol


def make() -> tuple[protocol.Peer, str]:
    """Imports late: without quack the peer still answers."""
    import torch
    from quack.gemm_interface import gemm, gemm_gated

    from common import torch_server, torch_support
    from common.problem import Unsupported
    from common.torch_support import Way, swiglu_only
    from torch_ways.base import Request
    from torch_ways.mlp_train import halves, in_turn, training

    def interleaved(request: Request) -> torch.Tensor:
        """[k, 2h] with gate and up columns in turn, in the asked-for memory order."""
        data = request.data
        if data.gate is None or data.up is None:
            raise Unsupported("quack has no activation alone")
        rows = torch.stack((data.gate, data.up), 1).flatten(0, 1)  # [2h, k]
        match request.profile.option("weights", "out-in"):
            case "out-in":
                return rows.t()
            case "in-out":
                return rows.t().contiguous()
            case other:
                raise Unsupported(f"weights {other}; known are out-in, in-out")

    def halves_only(request: Request) -> None:
        swiglu_only(request.case)
        if request.case.dtype == "f32":
            raise Unsupported("quack's GEMM takes 16-bit inputs")

    def hidden(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return gemm_gated(x, w, activation="swiglu", store_preact=False)[1]

    def gated_linear(request: Request) -> Way:
        halves_only(request)
        copies = request.rotate(request.data.x, interleaved(request))
        return Way(len(copies), lambda i: hidden(*copies[i]), "fused+fast")

    def mlp(request: Request) -> Way:
        halves_only(request)
        copies = request.rotate(request.data.x, interleaved(request), request.data.down)

        def call(i: int) -> torch.Tensor:
            x, w, down = copies[i]
            return gemm(hidden(x, w), down.t())

        return Way(len(copies), call, "fused+fast")

    def mlp_train(recompute: bool = False, concat: bool = False, adds: bool = False) -> Callable[[Request], Way]:
        """Its MLP: with gate and up not kept, or one behind the other, or with gradients added where they are."""

        def way(request: Request) -> Way:
            from quack.mlp import mlp_func

            halves_only(request)
            gate_up = request.data.gate_up() if concat else interleaved(request).t().contiguous()
            options = {"concat_layout": True} if concat else {}

            def block(x: torch.Tensor, wgu: torch.Tensor, wd: torch.Tensor) -> torch.Tensor:
                return mlp_func(x, wgu, wd, activation="swiglu", fuse_grad_accum=adds, recompute=recompute,
                                **options)

            return training(request, block, (gate_up, request.data.down), halves if concat else in_turn, adds)

        return way

    ways: dict[str, Callable[[Request], Way]] = {
        "gated-linear:gemm_gated": gated_linear,
        "mlp:gemm_gated": mlp,
        "mlp-train:save": mlp_train(),
        "mlp-train:recompute": mlp_train(recompute=True),
        "mlp-train:concat": mlp_train(concat=True),
        "mlp-train:accumulate": mlp_train(adds=True),
    }
    versions = {"quack-kernels": version("quack-kernels"),
                "nvidia-cutlass-dsl": version("nvidia-cutlass-dsl")}
    peer = torch_server.TorchPeer("quack", ways, frozenset({"weights"}), versions, cpu=False)
    return peer, torch_support.default_device()


if __name__ == "__main__":
    sys.exit(protocol.main("quack", make))
