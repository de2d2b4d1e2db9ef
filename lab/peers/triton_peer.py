#!/usr/bin/env python3
"""Triton: our own plain kernels with a small space of configurations, as a user of Triton would write
them. Options: `way` (activation, activation-backward: fused; gated-linear: dual, dual_mma_sync; mlp: dual, sequential), `graph`.

With TRITON_INTERPRET=1 the kernels are interpreted on the CPU: results without speed, for tests.
"""

import sys

from common import protocol


def make() -> tuple[protocol.Peer, str]:
    """Imports torch and triton late: without them the peer still answers."""
    import triton

    from common import torch_server, torch_support
    from triton_ways import kernels, ways

    versions = {"triton": triton.__version__}
    peer = torch_server.TorchPeer("triton", ways.WAYS, frozenset(), versions, cpu=kernels.INTERPRETED)
    return peer, torch_support.default_device()


if __name__ == "__main__":
    sys.exit(protocol.main("triton", make))
