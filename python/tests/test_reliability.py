"""Forks, threads, garbage, and tensors that are not what they seem."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref

import pytest

torch = pytest.importorskip("torch", reason="not run: no PyTorch")
np = pytest.importorskip("numpy", reason="not run: no numpy")

import swiglu
import swiglu.nn
import swiglu.torch as ops
from test_ops import Here, call, device, tensor  # noqa: F401

F = torch.nn.functional


@pytest.mark.skipif(not hasattr(os, "fork"), reason="not run: no fork here")
def test_a_forked_child_of_a_process_with_threads_computes():
    program = """
import os, numpy as np, torch, swiglu.torch as ops, swiglu.nn
x = torch.randn(64, 4096)
frozen = swiglu.nn.MLP(4096, 256).freeze()
def outputs():
    with torch.no_grad():
        return [ops.silu_mul(x, x).numpy(), frozen(x).numpy(), swiglu.silu_mul(x.numpy(), x.numpy())]
right = outputs()
child = os.fork()
if child == 0:
    # PyTorch's operations would wait for threads of the parent.
    ok = all(np.array_equal(a, b) for a, b in zip(outputs(), right))
    os._exit(0 if ok else 1)
assert os.waitpid(child, 0)[1] == 0
assert all(np.array_equal(a, b) for a, b in zip(outputs(), right))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


class Alive:
    """Which tensors the addresses of a call are of, and whether they are there still when the call is made."""

    def __init__(self, monkeypatch):
        self.seen = []
        described = ops._kernels._described

        def remembered(t):
            self.seen.append(weakref.ref(t))
            return described(t)

        monkeypatch.setattr(ops._kernels, "_described", remembered)

    def __call__(self, *_):
        assert self.seen and all(there() is not None for there in self.seen)
        self.seen.clear()


def test_what_is_copied_for_a_call_lives_until_it_is_made(monkeypatch, device):
    alive = Alive(monkeypatch)
    a, b = tensor(6, 7, seed=1).t(), torch._neg_view(tensor(7, 6, seed=2))
    if device == "cpu":
        # What has a negative bit is copied for the packed weights.
        frozen = type("Frozen", (), {"kind": "mlp", "dtype": "f32", "place": "cpu", "hidden": 6, "out_features": 6, "forward": staticmethod(alive)})
        ops._kernels.packed_forward(frozen, b)
    else:
        monkeypatch.setattr(ops._kernels._native, "cuda_activation", alive)
        ops._kernels.activation_into("silu_mul", a, b.resolve_neg(), None, "swiglu", None, None)
        monkeypatch.setattr(ops._kernels._native, "cuda_activation_backward", alive)
        ops._kernels.activation_backward("silu_mul_backward", a, a, a, None, "swiglu", None)
    assert not alive.seen


def test_pytorchs_threads_compute_on_a_cpu():
    assert swiglu.info()["cpu_threads"] == {"of": "PyTorch", "count": torch.get_num_threads()}
    x, y = torch.randn(2, 64, 4096)
    right = ops.silu_mul(x, y)
    here = torch.get_num_threads()
    try:
        for count in (1, 2, here + 3):
            torch.set_num_threads(count)
            assert swiglu.info()["cpu_threads"]["count"] == count
            assert torch.equal(ops.silu_mul(x, y), right)
    finally:
        torch.set_num_threads(here)


def test_workers_of_a_data_loader_compute():
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, i):
            x = torch.full((16,), float(i))
            return ops.silu_mul(x, x)

    ops.silu_mul(torch.randn(256, 512), torch.randn(256, 512))
    found = torch.cat(list(torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=2)))
    rows = torch.arange(8.0)[:, None].expand(8, 16)
    torch.testing.assert_close(found, F.silu(rows) * rows)


def test_threads_train_and_patch_at_once():
    """Modules of a thread's own, and one that all share."""
    shared = swiglu.nn.MLP(16, 32, device=Here.device)
    x = tensor(4, 16)
    with torch.no_grad():
        right = shared(x)
    wrong = []

    def work(seed):
        try:
            own = swiglu.nn.MLP(16, 32, save="input" if seed % 2 else "preact", device=Here.device)
            for _ in range(20):
                own(tensor(3, 16, seed=seed, grad=True)).sum().backward()
                with torch.no_grad():
                    if not torch.equal(shared(x), right):
                        wrong.append(seed)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not wrong, wrong


def test_what_was_taken_is_each_threads_own():
    gate = tensor(2, 3)
    ops.silu_mul(gate, gate)
    found = []
    thread = threading.Thread(target=lambda: found.append(ops.explain_last()))
    thread.start()
    thread.join()
    assert found == [None] and ops.explain_last() is not None


def test_nothing_is_kept_alive():
    gate, up = tensor(4, 8, grad=True), tensor(4, 8, grad=True, seed=1)
    block = swiglu.nn.MLP(8, 16, device=Here.device)
    y = block(ops.silu_mul(gate, up))
    y.sum().backward()
    alive = [weakref.ref(t) for t in (gate, up, y, block, *block.parameters())]
    del gate, up, y, block
    gc.collect()
    assert not any(ref() is not None for ref in alive)


class Tagged(torch.Tensor):
    pass


class Logged(torch.Tensor):
    """A sub-class that wraps another tensor and sees each operator."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner, self.seen = inner, []

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        seen = next(a.seen for a in args if isinstance(a, cls))
        seen.append(str(func))
        return func(*(a.inner if isinstance(a, cls) else a for a in args), **(kwargs or {}))


def test_sub_classes_go_their_own_way():
    gate, up = tensor(3, 4), tensor(3, 4, seed=1)
    right = ops.silu_mul(gate, up)
    tagged = ops.silu_mul(gate.as_subclass(Tagged), up)
    assert type(tagged) is Tagged and torch.equal(tagged.as_subclass(torch.Tensor), right)
    logged = Logged(gate)
    assert torch.equal(ops.silu_mul(logged, up), right) and logged.seen == ["swiglu.silu_mul.default"]
    w = [tensor(8, 4, seed=2), tensor(8, 4, seed=3), tensor(4, 8, seed=4)]
    logged = Logged(gate)
    with torch.no_grad():
        assert torch.equal(ops.mlp(logged, *w), ops.mlp(gate, *w)) and logged.seen == ["swiglu.mlp.default"]


def test_complex_conjugated_negated_and_sparse_tensors():
    z = torch.view_as_complex(tensor(3, 4, 2))
    for wrong in (z, z.conj()):
        with pytest.raises(swiglu.SwigluError, match="floating point") as caught:
            ops.silu_mul(wrong, wrong)
        assert caught.value.kind == "dtype"
    # The imaginary part of a conjugated tensor is negated where it is read.
    lazily = z.conj().imag
    assert lazily.is_neg()
    assert torch.equal(ops.silu_mul(lazily, z.real), ops.silu_mul(-z.imag, z.real))
    with pytest.raises((RuntimeError, NotImplementedError)):
        ops.silu_mul(tensor(3, 4).to_sparse(), tensor(3, 4))
    quantised = torch.quantize_per_tensor(tensor(3, 4).cpu(), 0.1, 0, torch.qint8)
    with pytest.raises((RuntimeError, NotImplementedError)):
        ops.silu_mul(quantised, quantised)


def test_wrong_devices_and_types_are_refused_by_name():
    x = tensor(3, 4)
    there = torch.empty(3, 4, device="meta")
    for refused, kind in [
        (lambda: ops.silu_mul(x, x.double()), "dtype"),
        (lambda: ops.silu_mul(x, x, out=x.double()), "dtype"),
        (lambda: call("silu_mul", x, x.bool()), "dtype"),
        (lambda: ops.mlp(x, x.half(), x, x.t()), "dtype"),
        (lambda: ops.silu_mul(x, x, activation="no such"), "argument"),
        (lambda: ops.silu_mul(x, x, numerics="no such"), "argument"),
        (lambda: ops.glu(x, layout="interleaved-0"), "argument"),
    ]:
        with pytest.raises(RuntimeError) as caught:
            refused()
        assert isinstance(caught.value, swiglu.SwigluError) and caught.value.kind == kind, caught.value
    assert ops.silu_mul(there, there).device.type == "meta"
    with pytest.raises(RuntimeError):
        ops.silu_mul(x, there)


def test_streams_of_interpreters_without_a_lock():
    if sys.version_info < (3, 13) or sys._is_gil_enabled():
        pytest.skip("not run: this interpreter has a global lock")
    test_threads_train_and_patch_at_once()
