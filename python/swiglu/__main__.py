"""``python -m swiglu info``: version, devices and libraries, and PyTorch's view of them."""

from __future__ import annotations

import argparse
import json
import sys
from importlib import metadata
from typing import List

from . import info


def _others() -> List[str]:
    lines = []
    for package in ("torch", "numpy", "transformers", "kernels", "triton", "liger-kernel", "quack-kernels", "vllm"):
        try:
            lines.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            lines.append(f"{package} is not installed")
    return lines


def _print() -> None:
    found = info()
    print(f"swiglu {found['version']}, Python {sys.version.split()[0]}, {found['isa']}")
    for device in found["devices"]:
        print(f"  {device['name']}: {device['device'] or device['missing']}")
    for library in found["libraries"]:
        print(f"  {library['name']}: {library['path'] or library['missing']}")
    print("packages beside it")
    for line in _others():
        print(f"  {line}")
    if any(line.startswith("torch ") and "not installed" not in line for line in _others()):
        import torch

        cuda = torch.version.cuda
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        print(f"  torch is built for CUDA {cuda} and sees {count} devices")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m swiglu", description=__doc__)
    verb = parser.add_subparsers(required=True).add_parser("info", help="what is here, and why something is not")
    verb.add_argument("--json", action="store_true")
    if parser.parse_args().json:
        print(json.dumps(info(), indent=2))
    else:
        _print()


if __name__ == "__main__":
    main()
