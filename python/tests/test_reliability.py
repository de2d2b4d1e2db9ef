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


def ends_well(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


# PyTorch's operations in a child would wait for threads of the parent.
FORKED = """
import ctypes, os, numpy as np, torch, swiglu
x = torch.randn(64, 4096) + 1
if {before}:
    import swiglu.nn, swiglu.torch
    frozen = swiglu.nn.MLP(4096, 256).freeze()
def outputs():
    import swiglu.torch as ops
    with torch.no_grad():
        made = [frozen(x)] if {before} else []
        return [t.numpy() for t in (ops.silu_mul(x, x), *made)] + [swiglu.silu_mul(x.numpy(), x.numpy())]
right = outputs() if {before} else None
child = {fork}()
if child == 0:
    made = outputs()
    os._exit(0 if right is None or all(map(np.array_equal, made, right)) else 1)
assert os.waitpid(child, 0)[1] == 0
assert right is None or all(map(np.array_equal, outputs(), right))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="not run: no fork here")
@pytest.mark.parametrize("before", [True, False], ids=["computed before", "first in the child"])
@pytest.mark.parametrize("fork", ["os.fork", "ctypes.PyDLL(None).fork"])
def test_a_forked_child_of_a_process_with_threads_computes(fork, before):
    if fork != "os.fork" and not before:
        pytest.skip("not run: nobody tells a module that its process is a forked one")
    ends_well(FORKED.format(fork=fork, before=before))


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


THREADS = """
import os, torch, swiglu, swiglu.torch as ops
from concurrent.futures import ThreadPoolExecutor
own = swiglu.info()["cpu_threads"]["own"]
x, y = torch.randn(2, 64, 8192)
def name_of(task):
    try:
        return open(f"/proc/self/task/{task}/comm").read()
    except FileNotFoundError:
        return "" # PyTorch's own end when they like.
right = ops.silu_mul(x, y)
for count in (1, own, own + 2):
    torch.set_num_threads(count)
    assert swiglu.info()["cpu_threads"]["of_pytorch"] == min(count, own)
    def rounds(n):
        for _ in range(n):
            torch.add(x, y)
            assert torch.equal(ops.silu_mul(x, y), right)
    rounds(3)
    there = set(os.listdir("/proc/self/task"))
    # Neither computes on a team of another size, for which threads would end and others start; nor on threads of ours.
    rounds(20)
    new = set(os.listdir("/proc/self/task")) - there
    assert not new, (count, new)
    names = [name_of(task) for task in there]
    assert not any(name.startswith("swiglu") for name in names), names
with ThreadPoolExecutor(4) as callers:
    list(callers.map(rounds, [20] * 4))
assert swiglu.silu_mul(x.numpy(), y.numpy()).shape == x.shape
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="not run: no /proc here")
def test_tensors_of_a_cpu_are_computed_on_pytorchs_threads():
    ends_well(THREADS)


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
