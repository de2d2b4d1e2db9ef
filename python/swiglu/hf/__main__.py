"""``python -m swiglu.hf export DIR``: this package as a folder for Hugging Face's hub of kernels."""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import re
import shutil
from pathlib import Path
from typing import List

from .. import SwigluError, __version__, _native
from .._errors import error, wrong

_PACKAGE = Path(__file__).parents[1]
#: What a layer does not need.
_LEFT_OUT = {"bench", "vllm.py", "__main__.py", "__pycache__"}
#: The native module is of no version of PyTorch's or of CUDA's; a name has both.
_BACKENDS = {"cpu": ("cpu", "cpu"), "cu120": ("cuda", "cu120"), "cu130": ("cuda", "cu130")}


def export(directory: Path) -> List[Path]:
    """Writes ``build/VARIANT`` for this processor; returns the variants. Operators have a namespace of their own."""
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise wrong("DIR", "a folder, or a name for a new one", f"the file {directory}")
    try:
        return _write(directory)
    except OSError as failed:
        raise error("io", str(directory), f"{failed}; expected a folder that can be written") from None


def _write(directory: Path) -> List[Path]:
    native = Path(_native.__file__ or "")
    unique = f"swiglu_{hashlib.sha256(native.read_bytes()).hexdigest()[:12]}"
    made = []
    for backend, version in _BACKENDS.values():
        variant = directory / "build" / f"torch-stable-abi26-{version}-{platform.machine()}-linux"
        shutil.rmtree(variant, ignore_errors=True)
        shutil.copytree(_PACKAGE, variant, ignore=lambda _, names: _LEFT_OUT & set(names))
        if not (variant / native.name).exists():
            shutil.copy(native, variant)
        for source in variant.rglob("*.py"):
            text = re.sub(r'(torch\.ops\.|Library\("|f")swiglu(?=::|"|\b)', rf"\1{unique}", source.read_text("utf-8"))
            source.write_text(text, "utf-8")
        with open(variant / "__init__.py", "a", encoding="utf-8") as init:
            init.write("\nfrom .hf import layers as layers  # noqa: E402\n")
        metadata = {
            "name": "swiglu",
            "id": f"_{unique}_{version}",
            "version": 1,
            "license": "MIT OR Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
        made.append(variant)
    readme = f"---\nlibrary_name: kernels\nlicense: mit\ntags: [kernels]\n---\n\nswiglu {__version__}: gated activations and blocks.\n"
    (directory / "README.md").write_text(readme)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m swiglu.hf", description=__doc__)
    verbs = parser.add_subparsers(required=True)
    verb = verbs.add_parser("export", help="writes the folder")
    verb.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    try:
        made = export(directory)
    except SwigluError as refused:
        verb.error(str(refused))
    print(*made, sep="\n")


if __name__ == "__main__":
    main()
