#!/usr/bin/env python3
"""Training steps of a SwiGLU block on the CPU beside PyTorch eager, in turns.

    cargo build --release -p swiglu-cpu --example training_time
    python3 scripts/training_time.py target/release/examples/training_time [--dtype f32] [--seconds 20]

A step is the forward pass that keeps what the backward pass needs, and the backward pass: gradients of x and of the three
weights, written and not added. Packing changed weights anew (`update`) is a column of its own: an optimiser's step needs it
once, PyTorch's weights are used as they lie. The other process is `crates/swiglu-cpu/examples/training_time.rs`; random
inputs of the same kind, results are not compared here (the crate's tests do that). Medians; ratios above 1 are ours.
"""

import argparse
import math
import os
import statistics
import subprocess
import time

import torch

SHAPES = [(896, 4864), (2048, 8192)]
TOKENS = [128, 1024]
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


class Block:
    """The block as users write it."""

    def __init__(self, m, k, h, dtype):
        def normal(*shape, scale=1.0):
            return (torch.randn(shape) * scale).to(dtype)

        self.x = normal(m, k).requires_grad_()
        self.gate, self.up = (normal(h, k, scale=k**-0.5).requires_grad_() for _ in range(2))
        self.down = normal(k, h, scale=h**-0.5).requires_grad_()
        self.dy = normal(m, k)

    def step(self):
        linear = torch.nn.functional.linear
        for leaf in (self.x, self.gate, self.up, self.down):
            leaf.grad = None
        start = time.perf_counter()
        h = torch.nn.functional.silu(linear(self.x, self.gate)) * linear(self.x, self.up)
        linear(h, self.down).backward(self.dy)
        return (time.perf_counter() - start) * 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program")
    parser.add_argument("--dtype", default="f32", choices=DTYPES)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--seconds", type=float, default=20.0, help="for a case, about")
    args = parser.parse_args()
    ours = subprocess.Popen([args.program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(line):
        print(line, file=ours.stdin, flush=True)
        answer = ours.stdout.readline().strip()
        if not answer:
            raise SystemExit(f"{args.program} ended at {line!r}")
        return answer

    print(f"torch {torch.__version__}, {args.dtype}, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}")
    print("threads    M     K/H       torch ms     ours ms  update ms  turns  ratio  with update")
    ratios, updated = [], []
    for threads in map(int, args.threads.split(",")):
        torch.set_num_threads(threads)
        for k, h in SHAPES:
            for m in TOKENS:
                block = Block(m, k, h, DTYPES[args.dtype])
                assert ask(f"{m} {k} {h} {args.dtype} {threads}") == "ready"
                times = {"torch": [], "step": [], "update": []}
                began = time.perf_counter()
                while len(times["torch"]) < 4 or time.perf_counter() - began < args.seconds and len(times["torch"]) < 33:
                    times["torch"].append(block.step())
                    # Idle threads of OpenMP spin for a while.
                    time.sleep(0.02)
                    times["step"].append(float(ask("step")) / 1e3)
                    times["update"].append(float(ask("update")) / 1e3)
                # The first turn warms up.
                theirs, step, update = (statistics.median(t[1:]) for t in times.values())
                ratios.append(theirs / step)
                updated.append(theirs / (step + update))
                print(
                    f"{threads:7} {m:4}  {k:4}/{h:<5} {theirs:10.1f}  {step:10.1f} {update:10.1f} {len(times['torch']) - 1:6}"
                    f"  {ratios[-1]:5.2f}  {updated[-1]:11.2f}",
                    flush=True,
                )
    means = [math.exp(statistics.mean(map(math.log, r))) for r in (ratios, updated)]
    print(f"geometric mean {means[0]:.2f}, with update {means[1]:.2f}")


if __name__ == "__main__":
    main()
