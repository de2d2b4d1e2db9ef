"""The blocks of docs/python.md, in order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/python.md"


@pytest.mark.skipif(not PAGE.exists(), reason="not run: the page is not here")
def test_every_block_of_the_page_runs(monkeypatch):
    for package in ("torch", "transformers", "numpy"):
        pytest.importorskip(package, reason=f"not run: no {package}")
    monkeypatch.chdir(ROOT)
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 4
    names = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
