#!/usr/bin/env python3
"""PyTorch: eager, composed, compiled, and the library's GEMM on packed weights with one pass after it.

Options: `way`, `graph` (CUDA: replay a captured graph), `threads` (CPU), `mode` (of torch.compile), `act`
(what follows the packed GEMM: triton, compile or eager).
"""

import sys

from common import protocol


def make() -> tuple[protocol.Peer, str]:
    """Imports torch late: without it the peer still answers."""
    from common import torch_server, torch_support
    from torch_ways import activation, activation_backward, gated_linear, mlp, mlp_train, onednn

    modules = (("activation", activation), ("activation-backward", activation_backward),
               ("gated-linear", gated_linear), ("mlp", mlp), ("mlp-train", mlp_train))
    ways = {f"{op}:{name}": way for op, module in modules for name, way in module.WAYS.items()}
    ways |= {f"{op}:onednn_postops": way for op, way in onednn.WAYS.items()}
    peer = torch_server.TorchPeer("torch", ways, frozenset({"mode", "act"}))
    return peer, torch_support.default_device()


if __name__ == "__main__":
    sys.exit(protocol.main("torch", make))
