"""Every peer keeps to the protocol, and computes what it says it computes."""

from __future__ import annotations

import importlib.util
import math
import unittest
from typing import Any

import numpy as np

from tests import quantized
from tests.client import CASE, ROUNDOFF, ROUNDOFF_Q8, Peer, expected, result

ACTIVATION = {"op": "activation", "hidden": 0}
BACKWARD = {"op": "activation-backward", "hidden": 0}
MLP = {"op": "mlp"}
TRAIN = {"op": "mlp-train"}


def lacks_ggml() -> str | None:
    """Why ggml's tests are not run, if they are not."""
    from common.ggml import Library
    from common.protocol import Unavailable

    try:
        Library()
    except Unavailable as why:
        return f"not run: {why}"
    return None


NO_GGML = lacks_ggml()


def has(*modules: str) -> bool:
    return all(importlib.util.find_spec(m) for m in modules)


class Conversation(unittest.TestCase):
    """Of the copy peer, which needs no more than numpy."""

    def test_requests_and_replies(self) -> None:
        with Peer("copy") as peer:
            hello = peer.hello()
            self.assertEqual((hello["type"], hello["name"]), ("hello", "copy"))
            self.assertIn("python", hello["versions"])
            prepared = peer.prepare(ACTIVATION, id=9)
            self.assertEqual((prepared["type"], prepared["id"]), ("prepared", 9))
            self.assertEqual((prepared["bytes"], prepared["flops"]), (5 * 40 * 3 * 4, 5 * 40))
            gradients = peer.prepare({**BACKWARD, "dtype": "f16"}, id=8)
            self.assertEqual((gradients["bytes"], gradients["flops"]), (5 * 40 * 5 * 2, 2 * 5 * 40))
            samples = peer.ask("sample", id=9, turns=2, budget_us=100)
            self.assertEqual(samples["type"], "samples")
            self.assertGreaterEqual(len(samples["us"]), 2)
            self.assertTrue(all(us > 0 and math.isfinite(us) for us in samples["us"]))
            self.assertEqual(peer.ask("verify", id=9, rows=[5])["type"], "failed")
            self.assertEqual(peer.ask("clocks"), {"type": "clocks"})
            self.assertEqual(peer.ask("release", id=9), {"type": "released", "id": 9})
            self.assertEqual(peer.ask("sample", id=9)["type"], "failed")
            self.assertEqual(peer.quit(), 0)

    def test_what_is_not_understood_gets_a_reply_and_the_peer_lives_on(self) -> None:
        with Peer("copy") as peer:
            peer.hello()
            for garbage in ("{", "[]", "3", '"hello"', '{"type": "dance"}', '{"type": "prepare"}', "{}"):
                self.assertEqual(peer.line(garbage)["type"], "failed", garbage)
            for bad, kind in (({"dtype": "int8"}, "unsupported"), ({"m": 0}, "unsupported"),
                              ({"bias": True}, "unsupported"), ({"op": "attention"}, "unsupported"),
                              ({"weights": "Q4_0"}, "unsupported"),
                              ({"m": "many"}, "failed")):
                self.assertEqual(peer.prepare(bad)["type"], kind, bad)
            unknown = peer.prepare(ACTIVATION, {"turbo": True})
            self.assertEqual(unknown["type"], "failed")
            self.assertIn("turbo", unknown["reason"])
            self.assertEqual(peer.prepare(ACTIVATION)["type"], "prepared")

    def test_another_protocol_is_refused(self) -> None:
        with Peer("copy") as peer:
            reply = peer.ask("hello", protocol=99)
            self.assertEqual(reply["type"], "unavailable")
            self.assertEqual(peer.process.wait(20), 0)

    def test_the_end_of_the_input_ends_the_peer(self) -> None:
        with Peer("copy") as peer:
            peer.hello()
            assert peer.process.stdin
            peer.process.stdin.close()
            self.assertEqual(peer.process.wait(20), 0)
            peer.process.stdin = None

    def test_a_peer_without_its_library_or_device_says_so(self) -> None:
        for name in ("torch", "triton", "liger", "quack", "ggml"):
            with self.subTest(name), Peer(name, PYTHONNOUSERSITE="1") as peer:
                reply = peer.hello("cuda")
                self.assertIn(reply["type"], ("hello", "unavailable"))
                if reply["type"] == "unavailable":
                    self.assertTrue(reply["reason"])
                    self.assertEqual(peer.process.wait(20), 0)


class Results(unittest.TestCase):
    """Each way of each peer against float64."""

    def check(self, peer: Peer, case: dict[str, Any], options: dict[str, Any]) -> None:
        label = f"{case} {options}"
        prepared = peer.prepare(case, options)
        self.assertEqual(prepared["type"], "prepared", f"{label}: {prepared}")
        self.assertRegex(prepared["notes"][0], r"^rounds as (fused|pre_round|eager)\+(precise|fast)$")
        whole = {**CASE, **case}
        rows = [0, 2, whole["m"] - 1]
        if whole["op"] == "mlp-train":
            # One of each part at least, and of all alike: their sizes are of one order.
            rows += [m := whole["m"], *(2 * m + i * whole["intermediate"] + i for i in range(3))]
        reply = peer.ask("verify", id=1, rows=rows)
        self.assertEqual(reply["type"], "verified", f"{label}: {reply}")
        reference = expected(case)
        self.assertEqual(tuple(reply["shape"]), reference.shape)
        worst = np.abs(result(reply) - reference[rows]).max() / np.abs(reference).max()
        limit = ROUNDOFF_Q8 if whole.get("weights") else ROUNDOFF[whole["dtype"]]
        self.assertLess(worst, limit, label)
        samples = peer.ask("sample", id=1, turns=1, budget_us=200)
        self.assertEqual(samples["type"], "samples", f"{label}: {samples}")
        self.assertTrue(samples["us"] and all(us > 0 for us in samples["us"]))
        peer.ask("release", id=1)

    @unittest.skipUnless(has("torch"), "not run: torch is not installed")
    def test_torch(self) -> None:
        gated = ("eager", "eager_packed", "cublas_packed_act", "alloc_each_call", "pack_each_call",
                 "alloc_and_pack_each_call")
        with Peer("torch") as peer:
            peer.hello()
            for dtype in ("f32", "bf16", "f16"):
                for way in gated:
                    self.check(peer, {"dtype": dtype}, {"way": way, "act": "eager", "threads": 1})
                for way in ("eager", "eager_packed", "cublas_packed_act"):
                    self.check(peer, {**MLP, "dtype": dtype}, {"way": way, "act": "eager"})
                self.check(peer, {**TRAIN, "dtype": dtype}, {"way": "eager", "threads": 1})
                for way in ("eager", "eager_composed", "eager_into"):
                    self.check(peer, {**ACTIVATION, "dtype": dtype}, {"way": way})
                for arrangement in ("separate", "gate-first"):
                    case = {**BACKWARD, "dtype": dtype, "arrangement": arrangement}
                    self.check(peer, case, {"way": "eager_into"})
            self.check(peer, {"orientation": "in-out"}, {"way": "eager"})
            self.check(peer, {**TRAIN, "orientation": "in-out"}, {"way": "eager"})
            self.check(peer, {**ACTIVATION, "arrangement": "gate-first"}, {"way": "eager"})
            self.check(peer, {**ACTIVATION, "heat": "cold", "m": 64}, {"way": "eager"})
            self.assertEqual(peer.prepare({}, {"way": "magic"})["type"], "unsupported")
            self.assertEqual(peer.prepare({"activation": "clamped-swiglu"})["type"], "unsupported")
            for bad in ({"activation": "geglu"}, {"arrangement": "up-first"}):
                self.assertEqual(peer.prepare({**BACKWARD, **bad})["type"], "unsupported", bad)
            self.assertEqual(peer.prepare({"device": "cuda"}, {})["type"],
                             "prepared" if _cuda() else "unsupported")

    @unittest.skipUnless(has("torch"), "not run: torch is not installed")
    def test_torch_compile(self) -> None:
        with Peer("torch") as peer:
            peer.hello()
            for case, way in (({}, "compile"), (MLP, "compile"), (TRAIN, "compile"), (ACTIVATION, "compile"),
                              (ACTIVATION, "compile_into"), ({}, "cublas_packed_act"),
                              (BACKWARD, "compile_into"),
                              ({**BACKWARD, "arrangement": "gate-first"}, "compile_into")):
                self.check(peer, {**case, "dtype": "bf16"}, {"way": way})

    @unittest.skipUnless(has("torch"), "not run: torch is not installed")
    def test_onednn(self) -> None:
        with Peer("torch") as peer:
            peer.hello()
            for case in ({}, MLP):
                if peer.prepare(case, {"way": "onednn_postops"})["type"] == "unsupported":
                    self.skipTest("not run: this torch lacks oneDNN")
                self.check(peer, {**case, "m": 6}, {"way": "onednn_postops"})

    @unittest.skipUnless(has("torch"), "not run: torch is not installed")
    def test_rotated_copies_hold_the_same_data(self) -> None:
        with Peer("torch") as peer:
            peer.hello()
            self.assertEqual(peer.prepare({}, {"way": "eager"}, rotations=3)["type"], "prepared")
            first = peer.ask("verify", id=1, rows=[1])["data"]
            peer.ask("sample", id=1, turns=1, budget_us=50)
            self.assertEqual(peer.ask("verify", id=1, rows=[1])["data"], first)

    @unittest.skipUnless(has("torch", "triton"), "not run: torch or triton is not installed")
    def test_triton_kernels_interpreted(self) -> None:
        with Peer("triton", TRITON_INTERPRET="1") as peer:
            self.assertEqual(peer.hello()["type"], "hello")
            # The interpreter multiplies bfloat16 as the integers that it keeps them in.
            for dtype in ("f32", "f16"):
                self.check(peer, {"dtype": dtype, "m": 17, "intermediate": 70, "hidden": 130},
                           {"way": "dual"})
            self.check(peer, {"orientation": "in-out"}, {"way": "dual"})
            self.check(peer, {"m": 17, "intermediate": 70, "hidden": 130}, {"way": "dual_mma_sync"})
            self.check(peer, {**ACTIVATION, "intermediate": 70}, {})
            self.check(peer, {**ACTIVATION, "arrangement": "gate-first", "dtype": "bf16"}, {})
            for dtype in ("f32", "f16", "bf16"):
                for arrangement in ("separate", "gate-first"):
                    case = {**BACKWARD, "dtype": dtype, "arrangement": arrangement}
                    self.check(peer, {**case, "intermediate": 70}, {})
            self.check(peer, {**MLP, "m": 3}, {"way": "dual"})
            self.check(peer, {**MLP, "m": 18, "intermediate": 130, "hidden": 70, "dtype": "f16"},
                       {"way": "sequential"})

    @unittest.skipIf(NO_GGML, NO_GGML)
    def test_ggml(self) -> None:
        shape = {"m": 5, "hidden": 256, "intermediate": 512}
        with Peer("ggml") as peer:
            peer.hello()
            for case in ({}, MLP):
                for way in ("separate", "packed"):
                    self.check(peer, {**case, **shape}, {"way": way, "threads": 1})
                    for block in quantized.DECODERS:
                        quantised = {**case, **shape, "weights": block}
                        self.check(peer, quantised, {"way": way, "threads": 2, "activations": "q8"})
                        for dtype in ("bf16", "f16"):
                            self.check(peer, {**quantised, "dtype": dtype}, {"way": way, "threads": 1})
                        options = {"way": way, "repack": True, "threads": 1}
                        if peer.prepare(quantised, options)["type"] == "prepared":
                            self.check(peer, quantised, options)
            for bad in ({"weights": "Q3_K"}, {"weights": "Q4_K"}, {"dtype": "bf16"},
                        {"activation": "glu"}, ACTIVATION, BACKWARD, {**ACTIVATION, "weights": "Q4_0"},
                        {"weights": "Q4_0", **MLP, "hidden": 64, "intermediate": 40}):
                self.assertEqual(peer.prepare(bad)["type"], "unsupported", bad)
            self.assertEqual(peer.prepare({}, {"way": "magic"})["type"], "unsupported")
            self.assertEqual(peer.prepare({}, {"activations": "f16"})["type"], "unsupported")
            self.assertEqual(peer.prepare({**shape}, {}, rotations=3)["type"], "prepared")
            first = peer.ask("verify", id=1, rows=[1])["data"]
            peer.ask("sample", id=1, turns=1, budget_us=50)
            self.assertEqual(peer.ask("verify", id=1, rows=[1])["data"], first)

    def test_a_library_that_is_not_there_is_named(self) -> None:
        with Peer("ggml", SWIGLU_GGML_LIBRARY="/nowhere") as peer:
            reply = peer.hello()
            self.assertEqual(reply["type"], "unavailable")
            self.assertIn("/nowhere", reply["reason"])

    @unittest.skipUnless(has("torch"), "not run: torch is not installed")
    def test_a_copy_copies(self) -> None:
        with Peer("copy") as peer:
            peer.hello()
            self.check(peer, {"op": "copy", "hidden": 0, "dtype": "f16"}, {})

    def test_a_ceiling_is_timed(self) -> None:
        with Peer("copy") as peer:
            peer.hello()
            for case in (ACTIVATION, BACKWARD, {}, MLP, TRAIN):
                self.assertEqual(peer.prepare(case)["type"], "prepared")
                self.assertTrue(peer.ask("sample", id=1, turns=1, budget_us=10)["us"])


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    unittest.main()
