#!/usr/bin/env python3
"""ggml's CPU backend: three matrix products and its swiglu, as one graph that is planned once.

Weights are f32 or quantised. ggml's inputs and outputs are f32: of a case in f16 or bf16 with quantised weights it has
the inputs, rounded to that type, as f32, and its results are rounded when they are read, which is not timed. Inputs of
quantised products are rounded to 8 bits in blocks by ggml itself, which a definition says by `activations = "q8"`:
results are judged accordingly.

Options: `way` (`separate`, or `packed`: gate and up in one tensor and one product), `repack` (weights in
the buffer that rearranges them for the processor), `threads`, `activations` (`q8`, which is what ggml does; the
host judges by it).
"""

from __future__ import annotations

import sys

from common import protocol


def make() -> tuple[protocol.Peer, str]:
    """Imports numpy and ggml late: without them the peer still answers."""
    from common.ggml_server import GgmlPeer

    return GgmlPeer(), "cpu"


if __name__ == "__main__":
    sys.exit(protocol.main("ggml", make))
