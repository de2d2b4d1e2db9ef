"""What stays between preparations of a case, and what does not: compiled code, and data."""

from __future__ import annotations

import gc
import importlib.util
import unittest
from dataclasses import replace
from typing import Any
from unittest import mock

from tests.client import CASE, SEED
from common.problem import Unsupported

#: Enough elements that a tensor of them is one of the case's, and no constant of torch.
LARGE = 32 * 40
SHAPE = {"hidden": 64, "intermediate": 40, "m": 32, "dtype": "bf16"}
#: Every way that compiles something, with what it needs.
WAYS = (({"op": "gated-linear"}, {"way": "compile"}),
        ({"op": "gated-linear"}, {"way": "cublas_packed_act", "act": "compile"}),
        ({"op": "mlp"}, {"way": "compile"}),
        ({"op": "mlp-train"}, {"way": "compile"}),
        ({"op": "activation", "hidden": 0}, {"way": "compile"}),
        ({"op": "activation", "hidden": 0, "arrangement": "gate-first"}, {"way": "compile_into"}),
        ({"op": "activation-backward", "hidden": 0}, {"way": "compile_into"}),
        ({"op": "activation-backward", "hidden": 0, "arrangement": "gate-first"}, {"way": "compile_into"}))


@unittest.skipUnless(importlib.util.find_spec("torch"), "not run: torch is not installed")
class Preparations(unittest.TestCase):
    """The torch peer in this process, so that what it holds can be seen."""

    def setUp(self) -> None:
        import torch_peer
        from common.protocol import Server

        self.server = Server(torch_peer.make()[0], "cpu")

    def ask(self, type_: str, **fields: Any) -> dict[str, Any]:
        reply = self.server.answer({"type": type_, "id": 1, **fields})
        assert reply is not None
        return reply

    def prepare(self, case: dict[str, Any], options: dict[str, Any], rotations: int = 2) -> None:
        profile = {"id": "under-test", "options": options}
        reply = self.ask("prepare", case={**CASE, **SHAPE, **case}, profile=profile, seed=SEED,
                         rotations=rotations)
        self.assertEqual(reply["type"], "prepared", reply)

    def compiled(self) -> int:
        from torch._dynamo.utils import counters

        return int(counters["stats"]["unique_graphs"])

    def test_five_preparations_compile_once(self) -> None:
        for case, options in WAYS:
            before, results = self.compiled(), set()
            for _ in range(5):
                self.prepare(case, options)
                results.add(self.ask("verify", rows=[0, 3])["data"])
                self.ask("sample", turns=2, budget_us=50)
                self.ask("release")
            self.assertEqual(self.compiled() - before, 1, f"{case} {options}")
            self.assertEqual(len(results), 1, f"{case} {options}")

    def test_whatever_the_code_depends_on_is_compiled_apart(self) -> None:
        one = {"way": "compile", "threads": 1}
        variants = [({}, one), ({}, {**one, "threads": 2}), ({}, {"way": "compile"}),
                    ({"activation": "geglu"}, one), ({"m": 33}, one), ({"orientation": "in-out"}, one),
                    ({"dtype": "f32"}, one), ({}, {**one, "mode": "max-autotune-no-cudagraphs"})]
        for case, options in variants:
            before = self.compiled()
            self.prepare(case, options)
            self.assertEqual(self.compiled() - before, 1, f"{case} {options}")

    def test_profiles_of_a_case_take_turns_without_compiling_again(self) -> None:
        ways = [{"way": "compile"}, {"way": "cublas_packed_act", "act": "compile"},
                {"way": "compile", "threads": 1}]
        before = self.compiled()
        for turn in range(3):
            for options in ways[turn:] + ways[:turn]:
                self.prepare({}, options)
                self.ask("verify", rows=[1])
        self.assertEqual(self.compiled() - before, len(ways))

    def test_nothing_that_was_prepared_outlives_its_release(self) -> None:
        import torch

        def live() -> set[int]:
            gc.collect()
            tensors = (t for t in gc.get_objects() if type(t) is torch.Tensor)
            return {t.data_ptr() for t in tensors if t.numel() >= LARGE and t.data_ptr()}

        eager = (({"op": "mlp"}, {"way": "eager"}),
                 ({"op": "activation-backward", "hidden": 0}, {"way": "eager_into"}))
        for case, options in (*WAYS, *eager):
            self.prepare(case, options, rotations=1)
            # Without weights, x or the inputs, the case's own data have no tensor so large.
            source = {t.data_ptr() for t in vars(self.source(case)).values() if t is not None}
            self.assertTrue(source <= live(), options)
            self.assertTrue(live() - source, f"{options}: copies are seen")
            self.ask("release")
            self.assertEqual(live(), source, f"{case} {options}")

    def source(self, case: dict[str, Any]) -> Any:
        from common.problem import Case

        return self.server._peer._source.of(Case.parse({**CASE, **SHAPE, **case}, "cpu"), SEED)

    def test_copies_are_all_new(self) -> None:
        from common.problem import Case
        from common.protocol import Profile
        from torch_ways.base import Compiled, Request

        case, data = Case.parse({**CASE, **SHAPE}, "cpu"), self.source({})
        request = Request(case, Profile("p"), data, 3, Compiled())
        places = {t.data_ptr() for copy in request.rotate(data.x, data.gate) for t in copy}
        self.assertEqual(len(places), 6)
        self.assertFalse(places & {data.x.data_ptr(), data.gate.data_ptr()})
        stored = request.rotate(data.gate.t())[0][0]
        self.assertEqual(stored.stride(), data.gate.t().stride())

    def test_compiled_code_holds_no_data_and_no_graphs(self) -> None:
        from common.problem import Case
        from common.protocol import Profile
        from torch_ways.base import Compiled, Request

        case, data = Case.parse({**CASE, **SHAPE}, "cpu"), self.source({})
        request = Request(case, Profile("p", {"mode": "max-autotune"}), data, 1, Compiled())
        weight = data.gate
        with self.assertRaisesRegex(TypeError, "data must be arguments"):
            request.compiled(lambda x: x @ weight.t())
        on_cuda = replace(request, case=replace(case, device="cuda"))
        with self.assertRaisesRegex(Unsupported, "graphs of its own"):
            on_cuda.compiled(lambda x: x)


def installed(*modules: str) -> bool:
    return all(importlib.util.find_spec(module) for module in modules)


@unittest.skipUnless(installed("torch", "triton", "liger_kernel"), "not run: liger-kernel is not installed")
class Liger(unittest.TestCase):
    """Its kernel needs a GPU; what it is given does not."""

    def test_it_says_that_it_has_no_gradients(self) -> None:
        import liger_peer
        from common.problem import Case
        from common.protocol import Profile

        case = Case.parse({**CASE, "op": "activation-backward"}, "cuda")
        with self.assertRaisesRegex(Unsupported, "liger does not compute activation-backward"):
            liger_peer.make()[0]._build(case, Profile("p"))

    def test_its_kernel_is_given_whole_tensors(self) -> None:
        import torch
        import liger_peer
        from common.problem import Case
        from common.protocol import Profile
        from common.torch_support import Tensors
        from torch_ways.base import Compiled, Request

        def kernel(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
            self.assertTrue(gate.is_contiguous() and up.is_contiguous())
            return gate, up, torch.nn.functional.silu(gate) * up

        results = []
        with mock.patch("liger_kernel.ops.swiglu.swiglu_forward", kernel):
            peer = liger_peer.make()[0]
            for arrangement in ("separate", "gate-first"):
                shape = {"op": "activation", "m": 3, "intermediate": 8, "arrangement": arrangement}
                case = Case.parse({**CASE, **shape}, "cpu")
                request = Request(case, Profile("p"), Tensors.derive(case, SEED), 2, Compiled())
                results.append(peer._ways["activation:liger"](request).call(1))
        self.assertTrue(torch.equal(*results))


if __name__ == "__main__":
    unittest.main()
