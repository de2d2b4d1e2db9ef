"""``python -m swiglu.bench mlp``, ``model``: beside other implementations; ``host``: what calls cost the host."""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
from pathlib import Path
from typing import Any, List, Optional

import torch

from . import _host, _mlp, _model


def _device(arguments: argparse.Namespace) -> str:
    return arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")


def _missing(arguments: argparse.Namespace) -> Optional[str]:
    """What is known to fail before anything is measured: an option that this machine has nothing for."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        return "--device cuda: PyTorch sees no CUDA device here; python -m swiglu info says more"
    if arguments.run is _run_model and importlib.util.find_spec("transformers") is None:
        return "model: it needs transformers; pip install transformers"
    if arguments.run is _run_model and arguments.hidden % _model.HEAD:
        return f"--hidden {arguments.hidden}: expected a multiple of {_model.HEAD}, the size of an attention head"
    if getattr(arguments, "plot", None) and importlib.util.find_spec("matplotlib") is None:
        return "--plot: it needs matplotlib; pip install matplotlib"
    for option in ("csv", "plot"):
        file = getattr(arguments, option, None)
        if file and not file.parent.is_dir():
            return f"--{option} {file}: expected a file in a folder that exists"
        if file and file.is_dir():
            return f"--{option} {file}: expected a file, given a folder"
    if getattr(arguments, "plot", None):
        from matplotlib.backend_bases import FigureCanvasBase

        known = FigureCanvasBase.get_supported_filetypes()
        if arguments.plot.suffix[1:].lower() not in known:
            return f"--plot {arguments.plot}: expected a name that ends in one of {', '.join('.' + end for end in sorted(known))}"
    return None


def _run_host(arguments: argparse.Namespace) -> bool:
    device, rounds = _device(arguments), arguments.rounds
    print(f"{_mlp.device_name(device)}, torch {torch.__version__}: microseconds of the host a call, median (quartiles)")
    for what, times in _host.measure(device, rounds).items():
        first, median, third = statistics.quantiles(times, n=4, method="inclusive")
        print(f"  {what:<38} {median:8.2f}  ({first:.2f} … {third:.2f})")
    return True


def _dtype(arguments: argparse.Namespace) -> torch.dtype:
    made: torch.dtype = getattr(torch, {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}[arguments.dtype])
    return made


def _run_model(arguments: argparse.Namespace) -> bool:
    sizes = (arguments.layers, arguments.hidden, arguments.intermediate)
    shape = _model.Shape(*sizes, _dtype(arguments), _device(arguments))
    print(f"{_mlp.device_name(shape.device)}, torch {torch.__version__}, a Llama of {shape.layers} layers, "
          f"{shape.hidden} x {shape.intermediate} {arguments.dtype}")  # fmt: skip
    print(f"{'case':<14} {'provider':<15} {'ms':>9}  {'tokens/s':>9}  {'peak MiB':>8}  against {arguments.providers[0]}")
    measured = False
    for case in arguments.cases:
        rows = _model.measure(arguments.providers, case, shape, arguments.rounds)
        for row in rows:
            start = f"{case:<14} {row.provider:<15}"
            if row.missing is not None:
                print(f"{start} {row.missing}")
                continue
            measured = True
            ratio = f"  {rows[0].median() / row.median():.3f} x" if rows[0].missing is None else ""
            print(f"{start} {row.median():9.3f}  {row.tokens / row.median() * 1e3:9.0f}  {row.peak / 2**20:8.0f}{ratio}",
                  flush=True)  # fmt: skip
    return measured


def _run_mlp(arguments: argparse.Namespace) -> bool:
    shape = _mlp.Shape(arguments.hidden, arguments.intermediate, _dtype(arguments), _device(arguments))
    rows = _mlp.measure(arguments.providers, arguments.modes, arguments.tokens, shape, arguments.rounds)
    print(f"{_mlp.device_name(shape.device)}, torch {torch.__version__}, {shape.hidden} x {shape.intermediate} {arguments.dtype}")
    print(f"{'mode':<8} {'tokens':>7}  {'provider':<10} {'ms':>9}  (quartiles), against {arguments.providers[0]}")
    for row in rows:
        start = f"{row.mode:<8} {row.tokens:>7}  {row.provider:<10}"
        if row.missing is not None:
            print(f"{start} {row.missing}")
            continue
        first = next(r for r in rows if (r.mode, r.tokens, r.provider) == (row.mode, row.tokens, arguments.providers[0]))
        ratio = f", {first.quantile(50) / row.quantile(50):.2f} x" if first.missing is None else ""
        print(f"{start} {row.quantile(50):9.4f}  ({row.quantile(25):.4f} … {row.quantile(75):.4f}){ratio}")
    if arguments.csv:
        _mlp.write_csv(arguments.csv, rows, shape)
    measured = any(row.missing is None for row in rows)
    if arguments.plot and measured:
        _mlp.plot(arguments.plot, rows, shape)
    return measured


def _choices(known: Any) -> Any:
    def parse(text: str) -> List[str]:
        for part in text.split(","):
            if part not in known:
                raise argparse.ArgumentTypeError(f"unknown `{part}`; choose from: {', '.join(known)}")
        return text.split(",")

    return parse


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, given `{text}`")
    return int(text)


def _counts(text: str) -> List[int]:
    return [_count(part) for part in text.split(",")]


def _case(text: str) -> List[str]:
    for case in text.split(","):
        mode, _, tokens = case.partition(":")
        if mode not in _model.MODES or not tokens.isdigit() or int(tokens) < 1:
            raise argparse.ArgumentTypeError(f"`{case}` is no case; expected one of {', '.join(_model.MODES)}, "
                                             "a colon and a number of tokens, as in decode:8")  # fmt: skip
    return text.split(",")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m swiglu.bench", description=__doc__)
    verbs = parser.add_subparsers(required=True)
    host = verbs.add_parser("host", help="what a call costs the host, beside the bare parts")
    host.set_defaults(run=_run_host)
    mlp = verbs.add_parser("mlp", help="a block beside other implementations, the first of which is compared with")
    mlp.set_defaults(run=_run_mlp)
    mlp.add_argument("--tokens", type=_counts, default=[1, 16, 256, 4096], help="1,16,256,4096")
    names = ",".join(_mlp.PROVIDERS)
    mlp.add_argument("--providers", type=_choices(_mlp.PROVIDERS), default=["torch", "compile", "swiglu"], help=names)
    mlp.add_argument("--modes", type=_choices(_mlp.MODES), default=["forward"], help=",".join(_mlp.MODES))
    mlp.add_argument("--csv", type=Path, help="a file in the columns of Liger-Kernel's benchmarks")
    mlp.add_argument("--plot", type=Path, help="a picture, by matplotlib")
    model = verbs.add_parser("model", help="a Llama of transformers with its blocks by other implementations")
    model.set_defaults(run=_run_model)
    model.add_argument("--layers", type=_count, default=4)
    model.add_argument("--cases", type=_case, default=["decode:1", "decode:8", "prefill:4096", "train:4096"],
                       help=",".join(f"{mode}:TOKENS" for mode in _model.MODES))  # fmt: skip
    model.add_argument("--providers", type=_choices(_model.PROVIDERS), default=list(_model.PROVIDERS),
                       help=",".join(_model.PROVIDERS))  # fmt: skip
    for verb in (mlp, model):
        verb.add_argument("--hidden", type=_count, default=4096)
        verb.add_argument("--intermediate", type=_count, default=14336)
        verb.add_argument("--dtype", choices=["bf16", "f16", "f32"], default="bf16")
    for verb, rounds in ((host, 25), (mlp, 15), (model, 15)):
        verb.add_argument("--device", choices=["cpu", "cuda"])
        verb.add_argument("--rounds", type=_count, default=rounds, help="turns of each")
    arguments = parser.parse_args()
    missing = _missing(arguments)
    if missing is not None:
        parser.error(missing)
    # That nothing could be measured has been printed, and is no success.
    sys.exit(0 if arguments.run(arguments) else 1)


if __name__ == "__main__":
    main()
