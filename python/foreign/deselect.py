"""A plugin of pytest: leaves out what `run.py` lists, and counts it."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any, List

from run import SUITES, why_not


def pytest_collection_modifyitems(config: Any, items: List[Any]) -> None:
    suite = next(s for s in SUITES if s.name == os.environ["FOREIGN_SUITE"])
    reasons = {item: why_not(suite, item.name) for item in items}
    out = [item for item in items if reasons[item]]
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if not reasons[item]]
    Path(os.environ["FOREIGN_INTO"], f"{suite.name}.deselected").write_text(str(len(out)))
    for why, count in Counter(reasons[item] for item in out).items():
        print(f"deselected {count}: {why}")
