"""The native functions for CUDA on a simulated device, whose memory is the host's: values, not speed.

`SWIGLU_SIMULATOR` names the directory with its libraries, which the tests of swiglu-cuda build in target/cuda-sim.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

np = pytest.importorskip("numpy", reason="not run: no numpy")

SIMULATOR = os.environ.get("SWIGLU_SIMULATOR")

PROGRAM = """
import ctypes, os
import numpy as np
from swiglu import Activation, ShapeError, SwigluError, _native
from swiglu._arrays import described

driver = ctypes.CDLL(os.path.join(os.environ["SWIGLU_CUDA_LIBRARY_PATH"], "libcuda.so.1"))
context = ctypes.c_void_p()
assert driver.cuInit(0) == 0 and driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
def wait():
    assert driver.cuCtxSetCurrent(context) == 0 and driver.cuCtxSynchronize() == 0
def empty(shape, dtype="float32"):
    wait()
    size = max(int(np.prod(shape)) * np.dtype(dtype).itemsize, 1)
    address = ctypes.c_uint64()
    assert driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)) == 0
    made = np.frombuffer((ctypes.c_byte * size).from_address(address.value), dtype=dtype).reshape(shape)
    made[...] = 0
    return made
rng = np.random.default_rng(1)
def there(a):
    made = empty(a.shape, a.dtype)
    made[...] = a
    return made
def values(*shape):
    return there((rng.standard_normal(shape) / 2).astype("float32"))
def where(a):
    return described("array", a)
def near(a, b, unit):
    wait()
    assert np.all(np.abs(a.astype(float) - b) <= unit * (1 + np.abs(b))), np.abs(a - b).max()
sigmoid = lambda x: 1 / (1 + np.exp(-x))
place = (0, 0)
act = Activation("swiglu")

gate, up, grad = (values(3, 40) for _ in range(3))
h = empty(gate.shape)
_native.cuda_activation(place, act, None, None, where(gate), where(up), where(h))
exact = gate.astype(float) * sigmoid(gate.astype(float)) * up
near(h, exact, 1e-6)
both = there(np.concatenate([up, gate], 1))
_native.cuda_activation(place, act, None, "up-first", where(both), None, where(h))
near(h, exact, 1e-6)

d_gate, d_up = empty(gate.shape), empty(gate.shape)
_native.cuda_activation_backward(
    place, act, None, None, where(grad), where(gate), where(up), where(d_gate), where(d_up))
s = sigmoid(gate.astype(float))
near(d_up, grad * gate * s, 1e-6)
near(d_gate, grad * up * (s + gate * s * (1 - s)), 1e-6)
d_both = empty(both.shape)
_native.cuda_activation_backward(
    place, act, None, "up-first", where(grad), where(both), None, where(d_both), None)
wait()
assert np.array_equal(d_both, np.concatenate([d_up, d_gate], 1))

x, w_gate, w_up, w_down = values(5, 64), values(96, 64), values(96, 64), values(64, 96)
b_gate, b_up, b_down = values(96), values(96), values(64)
def block(w_gate, w_up, w_down, b_gate, b_up, b_down):
    g, u = x.astype(float) @ w_gate.T + b_gate, x @ w_up.T + b_up
    h = g * sigmoid(g) * u
    return h if w_down is None else h @ w_down.T + b_down
for down in (None, w_down):
    parts = (w_gate, w_up, down, b_gate, b_up, None if down is None else b_down)
    layer = _native.Layer.borrow(0, tuple(None if p is None else where(p) for p in parts), act)
    for tokens in (5, 1):
        y = empty((tokens, layer.out_features))
        space = empty((layer.workspace_bytes(tokens) + 256,), "uint8")
        start = -space.ctypes.data % 256
        scratch = (space.ctypes.data + start, space.size - start)
        layer.forward_on(place, where(x[:tokens]), where(y), scratch)
        near(y, block(*parts)[:tokens], 1e-4)
    w_gate *= 2  # read where it lies
    y = empty((5, layer.out_features))
    layer.forward_on(place, where(x), where(y), (0, 0))
    near(y, block(*parts), 1e-4)

# A training step: gate and up are kept, or computed again to the same bits.
class Room:
    def __init__(self, size):
        self.space = empty((size + 256,), "uint8")
        self.space[...] = 0xFF
        asked.append(size)
    def data_ptr(self):
        return self.space.ctypes.data + -self.space.ctypes.data % 256
asked = []
given = lambda *arrays: tuple(None if a is None else where(a) for a in arrays)
weights, biases = given(*parts), [b_gate, b_up, b_down]
kept, again, dy = empty((5, 192)), empty((5, 192)), values(5, 64)
_native.block_forward(place, act, where(x), weights, where(y), where(kept), Room)
near(y, block(*parts), 1e-4)
_native.block_forward(place, act, where(x), weights, None, where(again), Room)
near(kept[:, :96], x.astype(float) @ w_gate.T + b_gate, 1e-5)
assert np.array_equal(kept, again)
y[...] = np.nan
_native.block_forward(place, act, where(x), weights, where(y), None, Room)
near(y, block(*parts), 1e-4)
g, u, dh = kept[:, :96].astype(float), kept[:, 96:].astype(float), dy.astype(float) @ w_down
activated = g * sigmoid(g) * u
d_gate, d_up = dh * u * sigmoid(g) * (1 + g * (1 - sigmoid(g))), dh * g * sigmoid(g)
d_pair = empty((5, 192))
_native.block_backward_gate_up(place, act, where(dy), weights, where(again), where(d_pair), Room)
near(d_pair, np.concatenate([d_gate, d_up], 1), 1e-4)
assert np.array_equal(kept, again)
right_of = [d_gate @ w_gate + d_up @ w_up, d_gate.T @ x, d_up.T @ x, dy.T.astype(float) @ activated]
right_of_biases = [d_gate.sum(0), d_up.sum(0), dy.astype(float).sum(0)]
dense = (*weights[:3], None, None, None)
for consumed, add, wanted in [(False, False, 15), (True, True, 15), (False, True, 6), (True, False, 8), (False, False, 1)]:
    there_before = there(kept)
    into = [values(*e.shape) if wanted >> i & 1 else None for i, e in enumerate(right_of)]
    sums = [values(*e.shape) if wanted >> i & 2 else None for i, e in enumerate(right_of_biases)]
    held = [None if a is None else a.astype(float) for a in (*into, *sums)]
    _native.block_backward(
        place, act, where(x), where(dy), dense, where(there_before), consumed, given(*into), given(*sums),
        (None, None), add, Room)
    for i, (found, before, right) in enumerate(zip((*into, *sums), held, (*right_of, *right_of_biases))):
        if found is not None:
            near(found, right + (before if add and i > 0 else 0), 1e-3)
    assert consumed or np.array_equal(there_before, kept)
assert max(asked) > 0
# Rows of the result that had factors, and the gradients of these, which go through h and the bias.
scale, d_scale, d_x, d_down, d_b = values(5), empty((5,)), empty((5, 64)), empty((64, 96)), empty((64,))
_native.block_backward(
    place, act, where(x), where(dy), (*weights[:5], where(b_down)), where(kept), False, given(d_x, None, None, d_down),
    given(None, None, d_b), given(scale, d_scale), False, Room)
by = scale[:, None].astype(float)
near(d_x, by * right_of[0], 1e-3)
near(d_down, (by * dy).T @ activated, 1e-3)
near(d_b, (by * dy).sum(0), 1e-3)
near(d_scale, (activated * dh).sum(1) + dy.astype(float) @ b_down, 1e-3)
# Packed weights have one place, and so have their biases.
packed, d_packed, d_bias = there(np.concatenate([w_gate, w_up])), empty((192, 64)), empty((192,))
_native.block_backward(
    place, act, where(x), where(dy), given(packed, None, w_down, None, None, None), where(kept), False,
    given(None, d_packed, None, None), given(d_bias, None, None), (None, None), False, Room)
near(d_packed, np.concatenate(right_of[1:3]), 1e-3)
near(d_bias, np.concatenate(right_of_biases[:2]), 1e-3)
for changed, kind in [
    (dict(into=given(dy, None, None, None)), "unsupported"), (dict(into=given(None, packed, None, None)), "shape"),
    (dict(kept=where(kept[:, :95])), "shape"), (dict(kept=where(kept[:4])), "shape"), (dict(parts=(None, *dense[1:])), "unsupported"),
    (dict(factors=given(values(4), None)), "shape"), (dict(factors=given(None, empty((6,)))), "shape"),
]:
    how = dict(parts=dense, kept=where(kept), into=given(None, None, None, empty((64, 96))), factors=(None, None))
    how.update(changed)
    try:
        _native.block_backward(
            place, act, where(x), where(dy), how["parts"], how["kept"], False, how["into"], (None, None, None),
            how["factors"], False, Room)
        raise AssertionError(f"{changed} was taken")
    except (SwigluError, ShapeError) as error:
        assert error.kind == kind, (changed, error)

try:
    _native.cuda_activation(place, act, None, None, where(gate[:, ::2]), where(up[:, ::2]), where(h))
    raise AssertionError("columns that are apart were taken")
except SwigluError as error:
    assert error.kind == "unsupported", error

# A product over tokens, written or added: of small whole numbers, whose sums are exact.
whole = lambda *shape: there(rng.integers(-2, 3, shape).astype("float32"))
grads, inputs, held = whole(7, 24), whole(7, 16), whole(24, 16)
size = _native.cuda_weight_gradient_bytes(0)
space = empty((size + 256,), "uint8")
scratch = (space.ctypes.data + -space.ctypes.data % 256, size)
for tokens in (7, 1, 0):
    for overwrite in (True, False):
        into = there(np.full_like(held, np.nan) if overwrite else held)
        summed = grads[:tokens].T @ inputs[:tokens] + (0 if overwrite else held)
        _native.cuda_weight_gradient(place, where(grads[:tokens]), where(inputs[:tokens]), where(into), overwrite, scratch)
        wait()
        assert np.array_equal(into, summed), (tokens, overwrite)
for wrong, kind in [(whole(16, 24), "shape"), (grads[:, :16], "unsupported")]:
    try:
        _native.cuda_weight_gradient(place, where(grads), where(inputs), where(wrong), False, scratch)
        raise AssertionError("a wrong place was taken")
    except (SwigluError, ShapeError) as error:
        assert error.kind == kind, error

# In a capture of other code nothing is loaded, and the capture goes on.
stream, graph, run = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
assert driver.cuCtxSetCurrent(context) == 0 and driver.cuStreamCreate(ctypes.byref(stream), 1) == 0
beside, other = (0, stream.value), Activation("reglu2")
assert driver.cuStreamBeginCapture_v2(stream, 0) == 0
try:
    _native.cuda_activation(beside, other, None, None, where(gate), where(up), where(h))
    raise AssertionError("a kernel was loaded in a capture")
except SwigluError as error:
    assert error.kind == "capture" and "swiglu.torch.warmup(module" in str(error), error
_native.cuda_activation(beside, act, None, None, where(gate), where(up), where(h))
assert driver.cuStreamEndCapture(stream, ctypes.byref(graph)) == 0
assert driver.cuGraphInstantiateWithFlags(ctypes.byref(run), graph, ctypes.c_uint64(0)) == 0
h[...] = 0
assert driver.cuGraphLaunch(run, stream) == 0 and driver.cuStreamSynchronize(stream) == 0
near(h, exact, 1e-6)
_native.cuda_activation(beside, other, None, None, where(gate), where(up), where(h))
near(h, np.maximum(gate.astype(float), 0) ** 2 * up, 1e-6)

# Tensors by the table of their library, as PyTorch has one: here its functions are Python's.
class Described(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("kind", ctypes.c_int32), ("id", ctypes.c_int32), ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64)]
class Fake:
    def __init__(self, array, kind=2):
        self.array, self.kind, self.negated = array, kind, False
        numbers = ctypes.c_int64 * array.ndim
        self.shape = numbers(*array.shape)
        self.strides = numbers(*(step // array.itemsize for step in array.strides))
    def is_neg(self):
        return self.negated
class Parameter(Fake):
    pass
alive = {}
@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(Described))
def describe(address, place):
    fake = alive[address]
    place[0] = Described(
        fake.array.ctypes.data, fake.kind, 0, fake.array.ndim, *(2, 32) if fake.array.itemsize == 4 else (4, 16), 1, fake.shape, fake.strides, 0)
    return 0
current = [0]
@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_uint64))
def current_stream(kind, device, place):
    place[0] = current[0]
    return 0
class Table(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("others", ctypes.c_void_p * 4),
        ("describe", type(describe)), ("current_stream", type(current_stream))]
table = Table(1, 3, (ctypes.c_void_p * 4)(), describe, current_stream)
capsule = ctypes.pythonapi.PyCapsule_New
capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
assert not _native.describe_by_table(Fake, Parameter)
Fake.__dlpack_c_exchange_api__ = capsule(ctypes.addressof(table), b"dlpack_exchange_api", None)
assert _native.describe_by_table(Fake, Parameter)
def fake(array, kind=2, of=Fake):
    made = of(array, kind)
    alive[id(made)] = made
    return made
class Here:
    _current_level = -1
in_force, wanted, written, last = [False], [False], [], Here()
def room(like):
    return fake(empty(like.array.shape, like.array.dtype))
door = _native.Door(
    [lambda: None, lambda: in_force[0]], Here, lambda: wanted[0], room, written.extend, last, ("here", "there", "where they lie"))
def at_once(layout, gate, up, out, asks=False):
    made = door.activation("op", gate, up, layout, "swiglu", None, out, asks)
    assert made is None or made is NotImplemented or out is None or made is out
    return made
h[...] = 0
f_gate, f_up, f_h = fake(gate), fake(up), fake(h)
assert not at_once(None, f_gate, f_up, f_h), "the stream was not kept"
_native.keep_stream(0, 0)
assert not written and at_once(None, f_gate, f_up, f_h)
near(h, exact, 1e-6)
assert written == [f_h] and last.taken == ("op", "native cuda", "there")
near(at_once(None, f_gate, f_up, None).array, exact, 1e-6)
assert len(written) == 1 and at_once(None, Parameter(gate), f_up, None) is None, "a result of its own kind is nobody's"
# What is in force, and gradients, are asked of calls that come from nowhere.
f_gate.requires_grad = f_h.requires_grad = False
for f_up.requires_grad, wanted[0], in_force[0], Here._current_level in [
    (False, True, False, -1), (True, False, False, -1), (True, True, False, -1), (False, False, True, -1), (False, False, False, 0)]:
    open_ = not (wanted[0] and f_up.requires_grad or in_force[0] or Here._current_level >= 0)
    assert door.nothing_in_force() == (not in_force[0] and Here._current_level < 0)
    assert (at_once(None, f_gate, f_up, f_h, asks=True) is f_h) == open_ and at_once(None, f_gate, f_up, f_h) is f_h
    asked = at_once(None, f_gate, f_up, None, asks=True)
    expected = NotImplemented if wanted[0] and f_up.requires_grad else None
    assert asked is expected if not open_ else isinstance(asked, Fake)
in_force[0], wanted[0], Here._current_level = False, False, -1
for name, numerics in [("none", None), ("swiglu", "none"), (1, None), ("swiglu", 1)]:
    assert door.activation("op", f_gate, f_up, None, name, numerics, f_h, False) is None
h[...] = 0
assert at_once("up-first", fake(both, of=Parameter), None, f_h)
near(h, exact, 1e-6)
for wrong in [
    (None, f_gate, f_up, f_gate), (None, f_gate, f_up, fake(h, 1)), (None, f_gate, f_up, fake(h, 7)), (None, f_gate, f_up, fake(both)), ("up-first", f_h, None, f_gate),
    (None, fake(gate[:, ::2]), fake(up[:, ::2]), fake(h[:, :20])), (None, f_gate, gate, f_h), (None, gate, f_up, f_h),
]:
    assert not at_once(*wrong), wrong
f_up.negated = True
assert not at_once(None, f_gate, f_up, f_h)
f_up.negated = False
current[0] = stream.value
assert not at_once(None, f_gate, f_up, f_h)
current[0] = 0
# bfloat16, as the upper halves of float32.
half = lambda a: there((a.view("uint32") >> 16).astype("uint16"))
whole = lambda a: (a.astype("uint32") << 16).view("float32")
x, *parts = map(half, (x, w_gate, w_up, w_down, b_gate, b_up, b_down))
lent = tuple(map(fake, parts))
y = empty((1, 64), "uint16")
def layer_at_once(x, weights, out):
    made = door.layer("op", x, weights, "gate-first", "swiglu", None, out, False)
    assert made is None or out is None or made is out
    return made
def expect_block():
    wait()
    w_gate, w_up, w_down, b_gate, b_up, b_down = map(whole, parts)
    g, u = whole(x[:1]).astype(float) @ w_gate.T + b_gate, whole(x[:1]) @ w_up.T + b_up
    exact = (g * sigmoid(g) * u) @ w_down.T + b_down
    assert np.all(np.abs(whole(y) - exact) <= 2.0**-6 * np.abs(exact).max()), np.abs(whole(y) - exact).max()
for again in range(2):
    y[...] = 0
    assert layer_at_once(fake(x[:1]), lent, fake(y))
    expect_block()
made = layer_at_once(fake(x[:1]), lent, None)
assert last.taken == ("op", "native cuda", "where they lie")
wait()
assert np.array_equal(made.array, y)
parts[0][...] = half(2 * whole(parts[0]))
assert layer_at_once(fake(x[:1]), lent, fake(y))
expect_block()
assert not layer_at_once(fake(x[:1, :32]), lent, fake(y))
assert not layer_at_once(fake(x[:1]), lent, fake(empty((1, 63), "uint16")))
assert not layer_at_once(fake(x[:1]), (lent[0], lent[1], fake(whole(parts[2])), None, None, None), fake(y))
print("simulated")
"""


@pytest.mark.skipif(SIMULATOR is None, reason="not run: no simulated CUDA device (SWIGLU_SIMULATOR)")
def test_the_native_functions_for_cuda(tmp_path):
    env = {**os.environ, "SWIGLU_CUDA_LIBRARY_PATH": str(SIMULATOR), "SWIGLU_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.strip() == "simulated", done.stderr
