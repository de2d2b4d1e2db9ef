"""What did not run is said at the end: a skip is never counted among what passed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

LAYER = Path(__file__).parents[2] / "crates/swiglu-fixtures/layers/stories15m-layer0/layer.safetensors"


@pytest.fixture
def layer_file() -> Path:
    if not LAYER.exists():
        pytest.skip("not run: no file of a layer here")
    return LAYER


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests not run: their reasons are above")
