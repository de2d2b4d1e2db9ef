"""The package's commands: what is here, the benchmarks, and the example."""

from __future__ import annotations

import csv
import subprocess
import sys
import time
from pathlib import Path

import pytest

import swiglu

EXAMPLE = Path(__file__).parents[2] / "examples/python/train_llama.py"
if not EXAMPLE.exists():
    EXAMPLE = Path(__file__).parents[2] / "examples/train_llama.py"


def run(*command):
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_info():
    text = run("-m", "swiglu", "info")
    assert f"swiglu {swiglu.__version__}" in text and "libcublasLt" in text and "torch" in text
    assert '"isa"' in run("-m", "swiglu", "info", "--json")


def test_the_benchmark_of_a_block(tmp_path):
    pytest.importorskip("torch", reason="not run: no PyTorch")
    table, picture = tmp_path / "mlp.csv", tmp_path / "mlp.png"
    plot = []
    try:
        import matplotlib  # noqa: F401

        plot = ["--plot", picture]
    except ImportError:
        pass
    text = run(
        "-m", "swiglu.bench", "mlp", "--tokens", "1,5", "--hidden", 128, "--intermediate", 256, "--dtype", "f32",
        "--providers", "torch,quack,swiglu", "--modes", "forward,full", "--rounds", 3, "--csv", table, *plot,
    )  # fmt: skip
    assert text.count("swiglu ") >= 4
    rows = list(csv.DictReader(table.open()))
    ours = [row for row in rows if row["kernel_provider"] == "swiglu"]
    assert {(row["kernel_operation_mode"], row["x_value"]) for row in ours} == {
        (mode, m) for mode in ("forward", "full") for m in ("1", "5")
    }
    for row in rows:
        low, median, high = (float(row[f"y_value_{q}"]) for q in (20, 50, 80))
        assert 0 < low <= median <= high
    if plot:
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_benchmark_takes_no_wrong_results(monkeypatch):
    torch = pytest.importorskip("torch", reason="not run: no PyTorch")
    from swiglu.bench import _mlp

    monkeypatch.setitem(_mlp.PROVIDERS, "wrong", lambda: lambda x, *w: 1.01 * _mlp._torch(x, *w))
    monkeypatch.setitem(_mlp.PROVIDERS, "broken", lambda: lambda x, *w: x.no_such_method())
    shape = _mlp.Shape(64, 96, torch.float32, "cpu")
    rows = _mlp.measure(["torch", "wrong", "broken"], ["forward", "full"], [3], shape, rounds=1)
    why = {(row.provider, row.mode): row.missing for row in rows}
    assert why["torch", "forward"] is None and why["torch", "full"] is None
    assert "y is wrong" in why["wrong", "forward"] and "y is wrong" in why["wrong", "full"]
    assert "AttributeError" in why["broken", "forward"]


def test_the_benchmark_of_a_model(monkeypatch):
    torch = pytest.importorskip("torch", reason="not run: no PyTorch")
    pytest.importorskip("transformers", reason="not run: no transformers")
    from swiglu.bench import _model

    def wrong(model):
        torch.nn.init.zeros_(model.model.layers[0].mlp.up_proj.weight)
        return model

    monkeypatch.setitem(_model.PROVIDERS, "wrong", wrong)
    monkeypatch.setitem(_model.PROVIDERS, "broken", lambda model: model.no_such_method())
    shape = _model.Shape(1, 256, 384, torch.float32, "cpu")
    for case in ("decode:2", "prefill:5", "train:5"):
        rows = _model.measure(["torch", "swiglu", "wrong", "broken"], case, shape, rounds=1)
        why = {row.provider: row.missing for row in rows}
        assert why["torch"] is None and why["swiglu"] is None, why
        assert "wrong: its relative error" in why["wrong"] and "AttributeError" in why["broken"]
        assert all(row.times for row in rows if row.missing is None)


def test_a_case_of_a_model_is_a_mode_and_a_number():
    pytest.importorskip("torch", reason="not run: no PyTorch")
    command = [sys.executable, "-m", "swiglu.bench", "model", "--cases", "decode"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 2 and "as in decode:8" in done.stderr, done.stderr


def test_pictures_have_names_that_say_how_they_are_drawn(tmp_path):
    pytest.importorskip("torch", reason="not run: no PyTorch")
    pytest.importorskip("matplotlib", reason="not run: no matplotlib")
    command = [sys.executable, "-m", "swiglu.bench", "mlp", "--plot", str(tmp_path / "times.zzz")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 2 and ".png" in done.stderr, done.stderr


def test_the_benchmark_of_the_host_ends_where_calls_are_slow(monkeypatch):
    pytest.importorskip("torch", reason="not run: no PyTorch")
    from swiglu.bench import _host

    calls = []
    made = {"slow": lambda: calls.append(time.sleep(0.01)), "quick": lambda: None}
    monkeypatch.setattr(_host, "calls", lambda device: made)
    times = _host.measure("cpu", rounds=3)
    assert len(calls) < 20
    assert [len(t) for t in times.values()] == [3, 3]
    assert "mlp, out=" in run("-m", "swiglu.bench", "host", "--device", "cpu", "--rounds", 2)


def test_a_benchmark_that_measured_nothing_is_no_success():
    pytest.importorskip("torch", reason="not run: no PyTorch")
    options = ["--tokens", "1", "--hidden", "64", "--intermediate", "128", "--device", "cpu", "--rounds", "1"]
    command = [sys.executable, "-m", "swiglu.bench", "mlp", "--providers", "quack", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 1 and "quack" in done.stdout, (done.returncode, done.stderr)


def test_the_example(tmp_path):
    for package in ("torch", "transformers", "matplotlib"):
        pytest.importorskip(package, reason=f"not run: no {package}")
    text = run(EXAMPLE, "--steps", 4, "--plot", tmp_path / "losses.png")
    assert "3 of 3 feed-forward blocks patched" in text
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
