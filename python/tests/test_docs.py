"""The blocks of docs/python.md, in order, that of README, and the examples of docstrings."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE, README = ROOT / "docs/python.md", ROOT / "README.md"


@pytest.mark.skipif(not PAGE.exists(), reason="not run: the page is not here")
def test_every_block_of_the_page_runs(monkeypatch):
    for package in ("torch", "transformers", "numpy"):
        pytest.importorskip(package, reason=f"not run: no {package}")
    monkeypatch.chdir(ROOT)
    blocks = blocks_of(PAGE)
    assert len(blocks) >= 4
    names = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)


def blocks_of(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.skipif(not README.exists(), reason="not run: the page is not here")
def test_the_block_of_readme_runs(capsys):
    nn = pytest.importorskip("torch.nn", reason="not run: no PyTorch")
    import swiglu

    (block,) = blocks_of(README)
    exec(compile(block, str(README), "exec"), {"swiglu": swiglu, "model": nn.Linear(2, 2)})
    assert "feed-forward blocks patched" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["swiglu", "swiglu.hf"])
def test_examples_of_docstrings_run(name):
    needed = {"swiglu": ["numpy"], "swiglu.hf": ["torch", "transformers", "kernels"]}[name]
    for package in needed:
        pytest.importorskip(package, reason=f"not run: no {package}")
    import importlib

    module = importlib.import_module(name)
    try:
        failed, tried = doctest.testmod(module)
    finally:
        if name == "swiglu.hf":
            module.unapply()
    assert tried > 0 and failed == 0
