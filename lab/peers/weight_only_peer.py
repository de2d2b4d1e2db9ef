#!/usr/bin/env python3
"""Feed-forward blocks whose weights alone are quantised, in the types of GGUF, by what PyTorch and Triton have for them.

Options: `way` (`decoded`: bfloat16 decoded once, the library's GEMM and one pass; `int4pack`: PyTorch's product of
packed 4-bit weights; `compile`: decoding and products as torch.compile fuses them; `triton`: our own plain kernels),
`graph`, `mode` (of torch.compile), `act` (what follows the packed GEMM).
"""

import sys

from common import protocol


def make() -> tuple[protocol.Peer, str]:
    """Imports torch and triton late: without them the peer still answers."""
    import triton

    from common import torch_support
    from weight_only_ways import peer

    return peer.WeightOnlyPeer({"triton": triton.__version__}), torch_support.default_device()


if __name__ == "__main__":
    sys.exit(protocol.main("weight-only", make))
