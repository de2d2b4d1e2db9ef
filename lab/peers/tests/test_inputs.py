"""The seeded inputs: the same bits as the Rust definition, however they are derived."""

from __future__ import annotations

import importlib.util
import json
import unittest
from pathlib import Path

import numpy as np

from tests import client  # noqa: F401 - sets the path
from tests import quantized
from common import inputs

VECTORS = json.loads((Path(__file__).with_name("vectors.json")).read_text(encoding="utf-8"))


class Inputs(unittest.TestCase):
    def test_the_published_first_output_of_splitmix(self) -> None:
        self.assertEqual(int(inputs.bits(0, 0, 1)[0]), 0xE220_A839_7B1D_CDAF)

    def test_vectors_that_the_rust_tests_hold_too(self) -> None:
        for vector in VECTORS["normal"]:
            value = inputs.normal(vector["seed"], vector["index"], 1)
            self.assertEqual(int(value.view(np.uint32)[0]), vector["f32_bits"], vector)
        for vector in VECTORS["matrices"]:
            scale = inputs.weight_scale(vector["inputs"])
            made = inputs.normal_matrix(vector["seed"], vector["rows"], vector["cols"], scale)
            words = inputs.as_dtype(made, vector["dtype"])
            words = words.view({4: np.uint32, 2: np.uint16}[words.itemsize]).ravel()
            self.assertEqual([int(w) for w in words], vector["words"], vector["dtype"])

    def test_quantised_blocks_that_the_rust_tests_hold_too(self) -> None:
        for vector in VECTORS["quantized"]:
            deviation = inputs.weight_scale(vector["inputs"])
            made = inputs.quantized_matrix(vector["seed"], vector["type"], vector["rows"], vector["cols"],
                                           deviation)
            self.assertEqual(made.tobytes().hex(), vector["bytes"], vector["type"])

    def test_random_blocks_have_the_deviation_asked_for(self) -> None:
        for block in quantized.DECODERS:
            made = inputs.quantized_matrix(3, block, 5, 512 * 8, np.float32(0.25))
            values = quantized.decode(block, made, 5, 512 * 8)
            self.assertAlmostEqual(values.std(), 0.25, delta=0.06, msg=block)
            self.assertAlmostEqual(values.mean(), 0.0, delta=0.06, msg=block)

    def test_chunks_make_no_difference(self) -> None:
        whole = inputs.normal_matrix(3, 2, inputs.CHUNK, np.float32(0.5)).ravel()
        parts = [inputs.normal(3, first, 999) * np.float32(0.5) for first in (0, 999, 70_000)]
        for first, part in zip((0, 999, 70_000), parts, strict=True):
            np.testing.assert_array_equal(whole[first:first + 999], part)

    def test_bfloat16_ties_go_to_even(self) -> None:
        values = np.array([1.0, 1.00390625, 1.01171875, -3.0e38, 0.0, -0.0], dtype=np.float32)
        self.assertEqual([hex(w) for w in inputs.round_bf16(values)],
                         ["0x3f80", "0x3f80", "0x3f82", "0xff62", "0x0", "0x8000"])

    @unittest.skipUnless(importlib.util.find_spec("torch"), "not run: torch is not installed")
    def test_torch_derives_the_same(self) -> None:
        from common import torch_support

        for dtype in ("f32", "f16", "bf16"):
            scale = inputs.weight_scale(896)
            mine = torch_support.normal_matrix(2**63 + 11, 3, 100_001, float(scale), dtype, "cpu")
            words = {"f32": np.uint32}.get(dtype, np.uint16)
            theirs = inputs.as_dtype(inputs.normal_matrix(2**63 + 11, 3, 100_001, scale), dtype)
            integers = torch_support.torch.int32 if dtype == "f32" else torch_support.torch.int16
            np.testing.assert_array_equal(mine.view(integers).numpy().view(words), theirs.view(words))


if __name__ == "__main__":
    unittest.main()
