"""``python -m swiglu.bench host``: what a call costs the host."""

from __future__ import annotations

import argparse
import statistics
from typing import List, Sequence


def quartiles(values: Sequence[float]) -> List[float]:
    """The first, the median and the third."""
    return statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3


def _host(arguments: argparse.Namespace) -> None:
    import torch

    from . import _host

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device != "cpu" else "CPU"
    print(f"{name}, torch {torch.__version__}: microseconds of the host a call, median (quartiles) of {arguments.rounds} rounds")
    for what, times in _host.measure(device, arguments.rounds).items():
        first, median, third = quartiles(times)
        print(f"  {what:<38} {median:8.2f}  ({first:.2f} … {third:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m swiglu.bench", description=__doc__)
    verbs = parser.add_subparsers(required=True)
    host = verbs.add_parser("host", help="what a call costs the host, beside the bare parts")
    host.add_argument("--device", choices=["cpu", "cuda"])
    host.add_argument("--rounds", type=int, default=25)
    host.set_defaults(run=_host)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
