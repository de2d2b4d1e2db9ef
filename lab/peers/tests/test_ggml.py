"""What the ggml peer takes from ggml is given back, also where a copy of the data cannot be made. The
library is played by a double, so nothing has to be installed."""

from __future__ import annotations

import unittest
from typing import Any

from tests.client import CASE, SEED
from common.problem import Case, Unsupported
from common.ggml_server import Copy, Weights


class Library:
    """Counts contexts, buffers and plans; fails where it is told to."""

    device = 1

    def __init__(self, fails: str | None) -> None:
        self.held: set[tuple[str, int]] = set()
        self._fails, self._next, self._buffers = fails, 0, 0

    def _take(self, kind: str) -> int:
        self._next += 1
        self.held.add((kind, self._next))
        return self._next

    def context(self) -> int:
        return self._take("context")

    def free(self, context: int) -> None:
        self.held.remove(("context", context))

    def backend_alloc_ctx_tensors_from_buft(self, *_: int) -> int:
        self._buffers += 1
        return 0 if self._fails == f"buffer {self._buffers}" else self._take("buffer")

    def backend_buffer_free(self, buffer: int) -> None:
        self.held.remove(("buffer", buffer))

    def backend_dev_supports_op(self, *_: int) -> bool:
        return self._fails != "support"

    def backend_tensor_set(self, *_: Any) -> None:
        if self._fails == "data":
            raise OSError("no data")

    def backend_graph_plan_create(self, *_: int) -> int:
        return self._take("plan")

    def backend_graph_plan_free(self, _: int, plan: int) -> None:
        self.held.remove(("plan", plan))

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 1


class Copies(unittest.TestCase):
    def make(self, library: Library) -> Copy:
        case = Case.parse({**CASE, "op": "mlp", "hidden": 32, "intermediate": 64}, "cpu")
        return Copy(library, 1, case, Weights.of(case, SEED, "separate"), b"", 1)

    def test_a_copy_that_fails_holds_nothing(self) -> None:
        for fails, error in (("buffer 1", MemoryError), ("buffer 2", MemoryError),
                             ("support", Unsupported), ("data", OSError)):
            library = Library(fails)
            with self.assertRaises(error):
                self.make(library)
            self.assertEqual(library.held, set(), fails)

    def test_a_copy_is_given_back(self) -> None:
        library = Library(None)
        copy = self.make(library)
        self.assertEqual(len(library.held), 5)
        copy.free()
        self.assertEqual(library.held, set())


if __name__ == "__main__":
    unittest.main()
