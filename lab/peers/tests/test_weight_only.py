"""Every way of computing with quantised weights, in this process, against float64."""

from __future__ import annotations

import importlib.util
import os
import unittest
from typing import Any

from tests.client import CASE, SEED

HAVE = all(importlib.util.find_spec(name) for name in ("torch", "triton"))
#: Triton's kernels run in its interpreter, or on a GPU.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@unittest.skipUnless(HAVE, "not run: torch or triton is not installed")
class Blocks(unittest.TestCase):
    """Results, and what is refused."""

    def setUp(self) -> None:
        import torch
        import weight_only_peer
        from common.protocol import Server

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.server = Server(weight_only_peer.make()[0], self.device)

    def ask(self, type_: str, **fields: Any) -> dict[str, Any]:
        reply = self.server.answer({"type": type_, "id": 1, **fields})
        assert reply is not None
        return reply

    def case(self, weights: str, m: int, **more: Any) -> dict[str, Any]:
        shape = {"hidden": 256, "intermediate": 384, "m": m, "dtype": "bf16"}
        return {**CASE, "device": self.device, **shape, "op": "mlp", "weights": weights, **more}

    def result(self, case: dict[str, Any], way: str) -> Any:
        import base64

        import numpy as np

        profile = {"id": "under-test", "options": {"way": way, "act": "eager"}}
        reply = self.ask("prepare", case=case, profile=profile, seed=SEED, rotations=2)
        self.assertEqual(reply["type"], "prepared", reply)
        rows = list(range(case["m"]))
        data = base64.b64decode(self.ask("verify", rows=rows)["data"])
        self.ask("sample", turns=1, budget_us=50)
        self.ask("release")
        if case["dtype"] == "f16":
            values = np.frombuffer(data, "<f2")
        else:
            values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
        return values.reshape(case["m"], case["hidden"]).astype(np.float64)

    def expected(self, case: dict[str, Any]) -> Any:
        import numpy as np

        from common import inputs
        from tests.quantized import decode

        k, h = case["hidden"], case["intermediate"]

        def matrix(tag: int, rows: int, cols: int) -> Any:
            scale = inputs.weight_scale(cols)
            blocks = inputs.quantized_matrix(SEED ^ tag, case["weights"], rows, cols, scale)
            return decode(case["weights"], blocks, rows, cols)

        x = inputs.normal_matrix(SEED ^ inputs.X, case["m"], k, np.float32(1.0))
        x = inputs.as_dtype(x, case["dtype"])
        x = ((x.astype(np.uint32) << 16).view(np.float32) if case["dtype"] == "bf16" else x).astype(np.float64)
        gate, up = x @ matrix(inputs.GATE, h, k).T, x @ matrix(inputs.UP, h, k).T
        return (gate / (1 + np.exp(-gate)) * up) @ matrix(inputs.DOWN, k, h).T

    def expect_close(self, weights: str, m: int, way: str, dtype: str = "bf16") -> None:
        import numpy as np

        case, roundoff = self.case(weights, m, dtype=dtype), {"bf16": 2.0**-9, "f16": 2.0**-12}[dtype]
        found, expected = self.result(case, way), self.expected(case)
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        # Weights, the values between and the result are rounded, each by this at most.
        self.assertLess(error, 4 * roundoff, f"{weights} {m} {way}")
        worst = np.abs(found - expected).max() / np.abs(expected).max()
        self.assertLess(worst, 16 * roundoff, f"{weights} {m} {way}")

    def test_decoded_and_compiled(self) -> None:
        for weights in ("Q8_0", "Q4_0"):
            for m, way in ((1, "decoded"), (5, "decoded"), (1, "compile"), (3, "compile")):
                self.expect_close(weights, m, way)

    def test_triton(self) -> None:
        if self.device == "cpu" and not INTERPRETED:
            self.skipTest("not run: needs a GPU, or TRITON_INTERPRET=1")
        # The interpreter cuts values to bfloat16 instead of rounding them.
        dtypes = ("bf16", "f16") if self.device == "cuda" else ("f16", )
        for weights in ("Q8_0", "Q4_0"):
            for m in (1, 2, 16):
                for dtype in dtypes:
                    self.expect_close(weights, m, "triton", dtype)

    def test_packed_four_bits(self) -> None:
        if self.device == "cpu":
            self.skipTest("not run: needs a GPU")
        for m in (1, 7, 16):
            self.expect_close("Q4_0", m, "int4pack")

    def test_what_cannot_be_computed_is_refused(self) -> None:
        from common.problem import Unsupported

        for case, way, part in ((self.case("Q5_0", 1), "decoded", "Q5_0 weights"),
                                (self.case("Q4_0", 17), "triton", "17 tokens"),
                                (self.case("Q8_0", 1), "int4pack", "Q4_0"),
                                (self.case("Q4_0", 1, op="gated-linear"), "decoded", "gated-linear")):
            profile = {"id": "under-test", "options": {"way": way}}
            with self.assertRaises(Unsupported) as refused:
                self.ask("prepare", case=case, profile=profile, seed=SEED, rotations=1)
            self.assertIn(part, str(refused.exception))


if __name__ == "__main__":
    unittest.main()
