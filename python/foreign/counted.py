"""A plugin of pytest: leaves out what `run.py` lists, says why, and writes what the rest came to."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any, List

from run import SUITES, why_not


def pytest_collection_modifyitems(config: Any, items: List[Any]) -> None:
    suite = next(s for s in SUITES if s.name == os.environ["FOREIGN_SUITE"])
    reasons = {item: why_not(suite, item.name) for item in items}
    config.hook.pytest_deselected(items=[item for item in items if reasons[item]])
    items[:] = [item for item in items if not reasons[item]]
    for why, count in Counter(filter(None, reasons.values())).items():
        print(f"deselected {count}: {why}")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    names = {
        "passed": ("passed",), "failed": ("failed", "error", "xpassed"), "skipped": ("skipped", "xfailed"),
        "deselected": ("deselected",),
    }  # fmt: skip
    stats = terminalreporter.stats
    counts = {name: sum(len(stats.get(key, [])) for key in keys) for name, keys in names.items()}
    Path(os.environ["FOREIGN_REPORT"]).write_text(json.dumps(counts))
