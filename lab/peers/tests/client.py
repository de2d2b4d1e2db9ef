"""The host's side of the protocol, for tests, and the results that peers must agree with."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

PEERS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PEERS))

from common import inputs  # noqa: E402
from tests import quantized  # noqa: E402

SEED = 7

CASE: dict[str, Any] = {
    "device": "cpu", "op": "gated-linear", "m": 5, "hidden": 48, "intermediate": 40, "dtype": "f32",
    "activation": "swiglu", "numerics": "fused+precise", "arrangement": "separate",
    "orientation": "out-in", "bias": False, "heat": "hot",
}

#: A bound on |error| / max|result| that no way of computing exceeds and a wrong result does.
ROUNDOFF = {"f32": 1e-5, "f16": 4e-3, "bf16": 3e-2}
#: Where inputs of products with quantised weights are rounded to 8 bits.
ROUNDOFF_Q8 = 3e-2


class Peer:
    """A peer's process. Every request gets its one reply; a silent peer fails the test by its timeout."""

    def __init__(self, name: str, **environment: str) -> None:
        command = [sys.executable, str(PEERS / f"{name}_peer.py")]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, env={**os.environ, **environment})

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def line(self, text: str) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def ask(self, type_: str, **fields: Any) -> dict[str, Any]:
        return self.line(json.dumps({"type": type_, **fields}))

    def hello(self, device: str = "cpu") -> dict[str, Any]:
        return self.ask("hello", protocol=1, device=device)

    def prepare(self, case: dict[str, Any], options: dict[str, Any] | None = None, id: int = 1,
                rotations: int | str = "auto") -> dict[str, Any]:
        profile = {"id": "under-test", "options": options or {}}
        return self.ask("prepare", id=id, case={**CASE, **case}, profile=profile, seed=SEED,
                        rotations=rotations)

    def quit(self) -> int:
        assert self.process.stdin
        self.process.stdin.write('{"type": "quit"}\n')
        self.process.stdin.flush()
        return self.process.wait(20)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """To the dtype and back, as float64."""
    return decode(inputs.as_dtype(values, dtype).tobytes(), dtype).reshape(values.shape)


def decode(data: bytes, dtype: str) -> np.ndarray:
    match dtype:
        case "f32":
            return np.frombuffer(data, "<f4").astype(np.float64)
        case "f16":
            return np.frombuffer(data, "<f2").astype(np.float64)
        case _:
            return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def expected(case: dict[str, Any]) -> np.ndarray:
    """The result in float64."""
    case = {**CASE, **case}
    m, k, h, dtype = case["m"], case["hidden"], case["intermediate"], case["dtype"]
    matrix = lambda tag, rows, cols, scale: rounded(
        inputs.normal_matrix(SEED ^ tag, rows, cols, np.float32(scale)), dtype)
    silu = lambda z: z / (1.0 + np.exp(-z))
    if case["op"] == "copy":
        return matrix(inputs.X, m, h, 1.0)
    if case["op"].startswith("activation"):
        gate = matrix(inputs.GATE, m, h, inputs.ACTIVATION_SCALE)
        up = matrix(inputs.UP, m, h, inputs.ACTIVATION_SCALE)
        if case["op"] == "activation":
            return silu(gate) * up
        out_grad = matrix(inputs.OUT_GRAD, m, h, 1.0)
        sigmoid = 1.0 / (1.0 + np.exp(-gate))
        slope = sigmoid + silu(gate) * (1.0 - sigmoid)
        return np.concatenate([out_grad * up * slope, out_grad * silu(gate)], 1)
    def weight(tag: int, rows: int, cols: int) -> np.ndarray:
        scale, block = inputs.weight_scale(cols), case.get("weights")
        if block is None:
            return matrix(tag, rows, cols, scale)
        made = inputs.quantized_matrix(SEED ^ tag, block, rows, cols, scale)
        return quantized.decode(block, made, rows, cols)

    x = matrix(inputs.X, m, k, 1.0)
    if case["op"] == "mlp-train":
        gate_w, up_w, down_w = weight(inputs.GATE, h, k), weight(inputs.UP, h, k), weight(inputs.DOWN, k, h)
        dy, gate, up = matrix(inputs.OUT_GRAD, m, k, 1.0), x @ gate_w.T, x @ up_w.T
        sigmoid, dh = 1.0 / (1.0 + np.exp(-gate)), dy @ down_w
        d_gate, d_up = dh * up * (sigmoid + silu(gate) * (1.0 - sigmoid)), dh * silu(gate)
        h = silu(gate) * up
        return np.concatenate([h @ down_w.T, d_gate @ gate_w + d_up @ up_w, d_gate.T @ x, d_up.T @ x, h.T @ dy])
    hidden = silu(x @ weight(inputs.GATE, h, k).T) * (x @ weight(inputs.UP, h, k).T)
    return hidden if case["op"] == "gated-linear" else hidden @ weight(inputs.DOWN, k, h).T


def result(reply: dict[str, Any]) -> np.ndarray:
    """The rows that a `verified` reply holds."""
    values = decode(base64.b64decode(reply["data"]), reply["dtype"])
    return values.reshape(len(reply["rows"]), reply["shape"][1])
