#!/usr/bin/env python3
"""Writes what PyTorch eager computes on a GPU, for `cargo test -p swiglu-cuda --test all torch_eager`.

    python3 scripts/torch_eager.py DIRECTORY
    SWIGLU_TORCH_EAGER=DIRECTORY cargo test -p swiglu-cuda --test all torch_eager

Inputs are every 16-bit pattern as the gate of f16 and bf16, special values against special values,
and random values over the whole range of the gate; each with its gradients by autograd. Files are
raw little-endian elements; `manifest.json` lists them.
"""

import json
import pathlib
import sys

import torch
import torch.nn.functional as F

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def clamped(gate, up, alpha=1.702, offset=1.0, limit=7.0):
    gate = gate.clamp(max=limit)
    up = up.clamp(min=-limit, max=limit)
    return (up + offset) * (gate * torch.sigmoid(gate * alpha))


# The names are those that swiglu parses.
ACTIVATIONS = {
    "swiglu": lambda g, u: F.silu(g) * u,
    "swiglu(beta=1.702)": lambda g, u: g * torch.sigmoid(1.702 * g) * u,
    "glu": lambda g, u: torch.sigmoid(g) * u,
    "reglu": lambda g, u: F.relu(g) * u,
    "reglu2": lambda g, u: F.relu(g).square() * u,
    "geglu": lambda g, u: F.gelu(g) * u,
    "geglu-tanh": lambda g, u: F.gelu(g, approximate="tanh") * u,
    "bilinear": lambda g, u: g * u,
    "clamped-swiglu": clamped,
}


def inputs(dtype, generator):
    """Gate, up and the output's gradient: [rows, 4096] each."""
    device = generator.device
    parts = []
    if dtype != torch.float32:
        patterns = torch.arange(-32768, 32768, dtype=torch.int32, device=device)
        parts.append(patterns.to(torch.int16).view(dtype))
    info = torch.finfo(dtype)
    special = torch.tensor(
        [0.0, -0.0, 1.0, -1.0, 0.5, 7.0, 7.01, -7.0, -8.0, 20.0, -20.0, 88.0, -88.0, 89.0, -104.0,
         info.max, info.min, info.tiny, info.smallest_normal / 4, info.eps,
         float("inf"), float("-inf"), float("nan")], device=device).to(dtype)
    pairs = torch.cartesian_prod(special, special)
    count = 1 << 18
    normal = torch.randn(count, generator=generator, device=device)
    wide = torch.rand(count, generator=generator, device=device) * 240 - 120
    gates = torch.cat(parts + [pairs[:, 0], normal.to(dtype), (8 * normal).to(dtype), wide.to(dtype)])
    ups = torch.randn(gates.numel(), generator=generator, device=device).to(dtype)
    first = sum(p.numel() for p in parts)
    ups[first:first + pairs.shape[0]] = pairs[:, 1]
    grads = torch.randn(gates.numel(), generator=generator, device=device).to(dtype)
    rows = -(-gates.numel() // 4096)
    padding = rows * 4096 - gates.numel()
    return [F.pad(t, (0, padding), value=0.25).view(rows, 4096) for t in (gates, ups, grads)]


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    if not torch.cuda.is_available():
        sys.exit("torch_eager: not run, PyTorch sees no GPU")
    out = pathlib.Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator(device="cuda").manual_seed(20)
    cases = []

    def write(name, tensor):
        (out / name).write_bytes(tensor.detach().contiguous().view(BITS[tensor.dtype]).cpu().numpy().tobytes())
        return name

    for dtype_name, dtype in DTYPES.items():
        gate, up, grad = inputs(dtype, generator)
        given = {n: write(f"{dtype_name}-{n}.bin", t) for n, t in (("gate", gate), ("up", up), ("grad", grad))}
        for index, (name, function) in enumerate(ACTIVATIONS.items()):
            g, u = gate.clone().requires_grad_(), up.clone().requires_grad_()
            h = function(g, u)
            h.backward(grad)
            results = {"h": h, "gate_grad": g.grad, "up_grad": u.grad}
            files = {n: write(f"{dtype_name}-{index}-{n}.bin", t) for n, t in results.items()}
            cases.append({"activation": name, "dtype": dtype_name, "shape": list(gate.shape), **given, **files})
    (out / "manifest.json").write_text(json.dumps({
        "torch": torch.__version__, "device": torch.cuda.get_device_name(), "cases": cases}, indent=1))
    print(f"torch {torch.__version__}: {len(cases)} cases in {out}")


if __name__ == "__main__":
    main()
