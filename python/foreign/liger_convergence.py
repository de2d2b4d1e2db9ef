"""Lets `swiglu.patch` take over the small models that Liger-Kernel trains beside eager ones: a plugin of pytest.

Nothing of Liger's computes. The text is the one of its tests, byte by byte, so that nothing is needed that reads its archive.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Dict, List

import pytest
import swiglu
import swiglu._patch as patching
from torch import nn

LENGTH = 128
_calls = 0


def load_from_disk(path: str) -> List[Dict[str, List[int]]]:
    text = Path(path).with_name("tiny_shakespeare.txt").read_bytes()
    rows = (list(text[i : i + LENGTH]) for i in range(0, len(text) - LENGTH, LENGTH))
    return [{"input_ids": row, "attention_mask": [1] * LENGTH} for row in rows]


datasets = ModuleType("datasets")
datasets.load_from_disk = load_from_disk  # type: ignore[attr-defined]
sys.modules["datasets"] = datasets


class Setup:
    """Of one of Liger's models: patched by us where its test asks for Liger's kernels."""

    def __init__(self, theirs: Any) -> None:
        self.theirs, self.patched, self.mini_model_config = theirs, False, theirs.mini_model_config

    def liger_kernel_patch_func(self, **_: Any) -> None:
        self.patched = True

    def liger_kernel_patch_revert_func(self, **_: Any) -> None:
        self.patched = False

    def model_class(self, config: Any) -> nn.Module:
        model: nn.Module = self.theirs.model_class(config)
        if self.patched:
            report = swiglu.patch(model)
            assert report.patched, report
        return model


_computed = patching._compute


def _counted(*args: Any, **named: Any) -> Any:
    global _calls
    # Not what recognition computes, of a block without an activation's name.
    _calls += bool(args[1].act_name)
    return _computed(*args, **named)


@pytest.fixture(autouse=True)
def ours_computes() -> Any:
    """A model that had gone the original way would agree with itself."""
    before = _calls
    yield
    assert _calls > before


def pytest_collection_modifyitems(items: List[Any]) -> None:
    patching._compute = _counted
    for module in {item.module for item in items}:
        for name, theirs in module.MINI_MODEL_SETUPS.items():
            module.MINI_MODEL_SETUPS[name] = Setup(theirs)
