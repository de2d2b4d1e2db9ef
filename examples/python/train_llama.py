"""Trains a small Llama from the same weights on the same text, as it is and patched, and plots both losses.

Training lets differences in the last bit grow. How much is shown by a third run: as it is, with each weight of one norm moved
to the next value. What training leaves to chance is shown by further runs, as it is, from weights of other seeds.

    pip install swiglu torch transformers matplotlib
    python examples/python/train_llama.py --steps 200 --seeds 5 --plot losses.png

The text is this repository's documentation, byte by byte. On a GPU `--dtype bf16` trains in bfloat16.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path

import swiglu
import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]


def text() -> torch.Tensor:
    pages = [page.read_bytes() for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])]
    return torch.frombuffer(bytearray(b"\n".join(pages)), dtype=torch.uint8).long()


def batches(steps: int, rows: int = 8, length: int = 96) -> list[torch.Tensor]:
    generator, data = torch.Generator().manual_seed(1), text()
    starts = torch.randint(len(data) - length, (steps, rows), generator=generator)
    return [torch.stack([data[s : s + length] for s in row]) for row in starts.tolist()]


def train(model: LlamaForCausalLM, steps: list[torch.Tensor], device: str) -> tuple[list[float], float]:
    """The loss of each step, and seconds."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, start = [], time.perf_counter()
    for ids in steps:
        ids = ids.to(device)
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, time.perf_counter() - start


def small_llama(seed: int, device: str, dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=344, num_hidden_layers=3, num_attention_heads=4, vocab_size=256,
        attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device, dtype)


def at_the_end(losses: list[float]) -> float:
    """The mean loss of a tenth of the steps, the last."""
    last = losses[-max(len(losses) // 10, 1) :]
    return sum(last) / len(last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="of training")
    parser.add_argument("--seeds", type=int, default=3, help="of eager's weights; the others begin with those of the first")
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--plot", type=Path, default=Path("losses.png"))
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    dtype = torch.bfloat16 if arguments.dtype == "bf16" else torch.float32
    eager = small_llama(1, device, dtype)
    patched = copy.deepcopy(eager)
    moved = copy.deepcopy(eager)
    with torch.no_grad():
        norm = moved.model.norm.weight
        norm.copy_(torch.nextafter(norm, 2 * norm))
    print(swiglu.patch(patched))

    steps = batches(arguments.steps)
    losses = {}
    for name, model in (("eager", eager), ("patched", patched), ("moved", moved)):
        losses[name], seconds = train(model, steps, device)
        print(f"{name:<8}loss {losses[name][0]:.4f} -> {losses[name][-1]:.4f} in {seconds:.1f} s")
    ends = [at_the_end(losses["eager"])]
    for seed in range(2, arguments.seeds + 1):
        others, _ = train(small_llama(seed, device, dtype), steps, device)
        ends.append(at_the_end(others))
    print(f"at the end: patched {at_the_end(losses['patched']):.4f}, eager {min(ends):.4f} to {max(ends):.4f} by {len(ends)} seeds")
    apart = {n: [a - b for a, b in zip(losses[n], losses["eager"])] for n in ("patched", "moved")}
    for name, differences in apart.items():
        print(f"{name:<8}at most {max(map(abs, differences)):.1e} from eager")

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for name, style in (("eager", {"lw": 3, "alpha": 0.5}), ("patched", {"lw": 1})):
        left.plot(losses[name], label=name, **style)
    left.set(xlabel="step", ylabel="loss", title=f"a small Llama on {device}, {arguments.dtype}")
    left.legend()
    for name, label in (("patched", "patched"), ("moved", "one norm's weights a bit off")):
        right.plot([abs(d) for d in apart[name]], lw=1, label=label)
    right.set(xlabel="step", ylabel="difference from eager's loss", yscale="log", title="what rounding does to a training run")
    right.legend()
    figure.tight_layout()
    figure.savefig(arguments.plot, dpi=110)
    print(arguments.plot)


if __name__ == "__main__":
    main()
