"""What only a CUDA device has: streams, captures, memory of its own. Values of operators there are in the other files.

One file, because its tests share the fixtures of a device."""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch", reason="not run: no PyTorch")
np = pytest.importorskip("numpy", reason="not run: no numpy")
if not torch.cuda.is_available():
    pytest.skip("not run: no CUDA device", allow_module_level=True)

import swiglu
import swiglu.nn
import swiglu.torch as ops
from test_ops import Here, block_reference, name_of, tensor, within

HALVES = [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def there():
    Here.device = "cuda"


def block_of(hidden=64, intermediate=128, dtype=torch.bfloat16):
    shapes = (intermediate, hidden), (intermediate, hidden), (hidden, intermediate)
    return [tensor(*shape, dtype=dtype, seed=i) / shape[1] ** 0.5 for i, shape in enumerate(shapes)]


def expect(y, x, weights):
    exact, bound = block_reference(x, (*weights, None, None, None), "swiglu", name_of(x.dtype))
    within(y, exact, bound)


def busy(milliseconds=100):
    """Work on the current stream that takes a while, also for a host whose processors have other work."""
    torch.cuda._sleep(int(milliseconds * 2e6))


# Layers of files.


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("kind", ["mlp", "gated_linear"])
def test_a_layer_of_a_file_takes_tensors_of_its_device(layer_file, kind, dtype):
    there, host = (swiglu.load(layer_file, kind=kind, device=d, dtype=dtype, numerics="pre_round") for d in ("cuda", "cpu"))
    for shape in [(288,), (5, 288), (2, 3, 288), (0, 288), (40, 288)]:
        x = tensor(*shape, dtype=dtype, seed=sum(shape))
        y = there(x)
        assert ops.explain_last().way == "native cuda", ops.explain_last()
        assert y.is_cuda and y.dtype == dtype and y.shape == (*shape[:-1], there.out_features) and not y.requires_grad
        # The same kernels as from the host's memory.
        assert torch.equal(y.cpu(), there(x.cpu()))
        expected = host(x.cpu()).float()
        error = (y.cpu().float() - expected).norm() / expected.norm().clamp_min(1e-30)
        # Each within two roundings and those of its sums, of at most 768 terms in float32, of the exact result.
        assert error <= 2 * (torch.finfo(dtype).eps + 768**0.5 * 2**-24), error
    strided = tensor(288, 6, dtype=dtype).t()
    assert torch.equal(there(strided), there(strided.contiguous()))
    into = torch.full((7, 2 * there.out_features), float("nan"), dtype=dtype, device="cuda")[:, ::2]
    x = tensor(7, 288, dtype=dtype)
    assert there.forward_into(x, into) is into and torch.equal(into, there(x))


def test_a_layer_of_a_file_on_other_streams_and_in_graphs(layer_file):
    layer = swiglu.load(layer_file, device="cuda")
    x = tensor(3, 288)
    expected = layer(x)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    for stream in (first, second):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            busy()
            late = x * 2
            y = layer(late / 2)
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(y, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    x.copy_(tensor(3, 288, seed=9))
    graph.replay()
    assert torch.equal(y, layer(x)) and not torch.equal(y, expected)
    # What is on the way outlives its layer.
    busy()
    y = layer(x)
    del layer
    gc.collect()
    again = swiglu.load(layer_file, device="cuda")
    assert torch.equal(y, again(x))


def test_what_a_layer_of_a_file_refuses_on_a_device(layer_file):
    layer, host = swiglu.load(layer_file, device="cuda"), swiglu.load(layer_file, device="cpu")
    x = tensor(3, 288)
    for call, kind, text in [
        (lambda: host(x), "layout", "x: expected a tensor on cpu, given one on cuda:0"),
        (lambda: layer(x[:, :5]), "shape", "x: expected [..., 288], given [3, 5]"),
        (lambda: layer(x.half()), "dtype", "x: expected f32 elements, given torch.float16"),
        (lambda: layer(x.clone().requires_grad_()), "unsupported", "torch.no_grad()"),
        (lambda: layer.forward_into(x, torch.empty(3, 288)), "layout", "out: expected a tensor on cuda:0, given one on cpu"),
        (lambda: layer.forward_into(x, torch.empty(2, 288, device="cuda")), "shape", "out: expected [3, 288]"),
    ]:
        with pytest.raises((swiglu.SwigluError, swiglu.ShapeError)) as refused:
            call()
        assert refused.value.kind == kind and text in str(refused.value), refused.value
    with torch.no_grad():
        assert torch.equal(layer(x.clone().requires_grad_()), layer(x))


# Memory.


def test_weights_are_read_where_they_lie():
    x, weights = tensor(4, 64), block_of(dtype=torch.float32)
    first = ops.mlp(x, *weights)
    assert ops.explain_last().way == "native cuda", ops.explain_last()
    expect(first, x, weights)
    before = torch.cuda.memory_allocated()
    ops.mlp(x, *weights)
    # What a call leaves is its result, which is gone.
    assert torch.cuda.memory_allocated() == before
    weights[0].mul_(2)
    expect(ops.mlp(x, *weights), x, weights)


@pytest.mark.parametrize("tokens", [1, 5, 300])
@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
def test_layers_of_real_widths(tokens, dtype):
    x, weights = tensor(tokens, 576, dtype=dtype), block_of(576, 1536, dtype)
    expect(ops.mlp(x, *weights), x, weights)
    assert ops.explain_last().way == "native cuda", ops.explain_last()
    y = torch.full_like(x, float("nan"))
    ops.mlp(x, *weights, out=y)
    expect(y, x, weights)


def test_what_a_training_step_keeps_is_4h_bytes_a_token():
    tokens, hidden, intermediate = 256, 512, 1536
    weights = [w.requires_grad_() for w in block_of(hidden, intermediate)]
    x = tensor(tokens, hidden, dtype=torch.bfloat16, grad=True)
    kept = {}
    for save in ("preact", "input"):
        ops.mlp(x, *weights, save=save).sum().backward()
        gc.collect()
        before = torch.cuda.memory_allocated()
        y = ops.mlp(x, *weights, save=save)
        kept[save] = torch.cuda.memory_allocated() - before - y.numel() * 2
        del y
    per_token = 2 * 2 * intermediate
    # h is kept by the down map besides; the allocator rounds to 512 bytes.
    assert kept["input"] <= 4096, kept
    assert kept["preact"] <= tokens * (per_token + 2 * intermediate) + 4096, kept


@pytest.mark.parametrize("biases", [False, True])
def test_gate_and_up_that_are_computed_again_are_those_that_were_kept(biases):
    x, weights = tensor(200, 128, dtype=torch.bfloat16), block_of(128, 192)
    bias = tuple(tensor(n, dtype=torch.bfloat16, seed=n) for n in (192, 192, 128)) if biases else None
    dy, grads = tensor(200, 128, dtype=torch.bfloat16, seed=9), []
    for save in ("preact", "input"):
        leaves = [t.detach().clone().requires_grad_() for t in (x, *weights, *(bias or ()))]
        y = ops.mlp(*leaves[:4], biases=tuple(leaves[4:]) or None, save=save)
        assert ops.explain_last().way == "native cuda", ops.explain_last()
        grads.append(torch.autograd.grad(y, leaves, dy))
    for kept, again in zip(*grads):
        assert torch.equal(kept, again), (kept - again).abs().max()


# Streams.


def test_calls_are_on_the_current_stream():
    weights, side = block_of(), torch.cuda.Stream()
    x = torch.zeros(4, 64, dtype=torch.bfloat16, device="cuda")
    values = tensor(4, 64, dtype=torch.bfloat16)
    gate, up = tensor(8, 96), tensor(8, 96, seed=1)
    later = torch.zeros_like(gate)
    # The first call of its kind loads a kernel, for which the driver waits.
    ops.mlp(x, *weights), ops.silu_mul(gate, up)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        busy()
        x.copy_(values)
        later.copy_(gate)
        y, h = ops.mlp(x, *weights), ops.silu_mul(later, up)
        assert not side.query(), "the calls waited for the stream"
    torch.cuda.current_stream().wait_stream(side)
    expect(y, values, weights)
    assert torch.equal(h, ops.silu_mul(gate, up))


def test_streams_do_not_share_scratch_memory():
    weights = block_of(576, 1536)
    inputs = [tensor(16, 576, dtype=torch.bfloat16, seed=s) for s in range(6)]
    expected = [ops.mlp(x, *weights) for x in inputs]
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in inputs], []
    for _ in range(20):
        for stream, x in zip(streams, inputs):
            with torch.cuda.stream(stream):
                found.append(ops.mlp(x, *weights))
    torch.cuda.synchronize()
    assert all(torch.equal(y, expected[i % len(inputs)]) for i, y in enumerate(found))


def test_threads_with_streams_of_their_own():
    weights = block_of()
    inputs = [tensor(n, 64, dtype=torch.bfloat16, seed=n) for n in range(1, 9)]
    expected = [ops.mlp(x, *weights) for x in inputs]
    torch.cuda.synchronize()
    wrong = []

    def work(x, right):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                if not torch.equal(ops.mlp(x, *weights), right):
                    wrong.append(x.shape[0])

    threads = [threading.Thread(target=work, args=pair) for pair in zip(inputs, expected)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not wrong


# Captures.


def captured(call, warm=True):
    """PyTorch's recipe: warmed up on one stream, captured on another."""
    if warm:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


@pytest.mark.parametrize("tokens", [1, 4, 40])
def test_a_captured_block_computes_again(tokens):
    x, weights = tensor(tokens, 576, dtype=torch.bfloat16), block_of(576, 1536)
    graph, y = captured(lambda: ops.mlp(x, *weights))
    for seed in (7, 8):
        x.copy_(tensor(tokens, 576, dtype=torch.bfloat16, seed=seed))
        graph.replay()
        expect(y, x, weights)
    # On another stream, and after others have used theirs.
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        ops.mlp(x, *weights)
        graph.replay()
        torch.cuda.synchronize()
    expect(y, x, weights)


def test_a_captured_training_step_computes_again():
    weights = [w.requires_grad_() for w in block_of()]
    x = tensor(8, 64, dtype=torch.bfloat16)

    def step():
        for w in weights:
            w.grad = None
        ops.mlp(x, *weights).float().square().sum().backward()
        return [w.grad for w in weights]

    graph, grads = captured(step)
    x.copy_(tensor(8, 64, dtype=torch.bfloat16, seed=5))
    graph.replay()
    found = [g.clone() for g in grads]
    assert all(torch.equal(a, b) for a, b in zip(found, step()))


def test_graphs_share_a_pool():
    weights, inputs = block_of(), [tensor(m, 64, dtype=torch.bfloat16) for m in (1, 2, 3)]
    for x in inputs:
        ops.mlp(x, *weights)
    pool = torch.cuda.graph_pool_handle()
    graphs = []
    for x in inputs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            y = ops.mlp(x, *weights)
        graphs.append((graph, x, y))
    for graph, x, y in graphs:
        graph.replay()
        expect(y, x, weights)


def test_garbage_collection_during_a_capture():
    x, weights = tensor(4, 64, dtype=torch.bfloat16), block_of()
    ops.mlp(x, *weights)

    class Cycle:
        def __init__(self):
            self.me = self
            self.layer = swiglu.torch._kernels._borrow(x, (*weights, None, None, None), "swiglu", None)
            self.weights = block_of()
            self.y = ops.mlp(x, *self.weights)

    cycle = Cycle()
    torch.cuda.synchronize()
    gc.disable()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.mlp(x, *weights)
        del cycle
        ops._kernels._borrowed.clear()
        gc.collect()
        z = ops.mlp(x, *weights)
    gc.enable()
    graph.replay()
    expect(y, x, weights)
    assert torch.equal(y, z)


def test_many_graphs_and_layers_leave_nothing():
    """Of PyTorch's memory: what the device has left is others' business too."""
    kept = []
    for _ in range(4):
        for _ in range(10):
            weights = block_of(256, 512)
            x = tensor(4, 256, dtype=torch.bfloat16)
            captured(lambda: ops.mlp(x, *weights))
        ops._kernels._borrowed.clear()
        del weights, x
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        kept.append(torch.cuda.memory_reserved())
    assert kept[-1] <= kept[0], kept


FIRST = """
import torch, swiglu, swiglu.nn, swiglu.torch as ops
block = swiglu.nn.MLP(64, 128, device="cuda", dtype=torch.bfloat16).eval()
x = torch.randn(3, 64, device="cuda", dtype=torch.bfloat16)
def capture():
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = block(x)
    return graph, y
def refused():
    # What refuses leaves the capture as it was.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        try:
            with torch.no_grad():
                block(x)
        except swiglu.SwigluError as error:
            assert error.kind == "capture" and "swiglu.torch.warmup(module" in str(error), (error.kind, str(error))
            print(error)
            x + 1
        else:
            raise AssertionError("nothing was refused")
refused()
ops.silu_mul(x, x)
refused()
with torch.cuda.stream(torch.cuda.Stream()):
    assert ops.warmup(block, tokens=[3]) == 1
graph, y = capture()
graph.replay()
torch.cuda.synchronize()
with torch.no_grad():
    assert torch.equal(y, block(x))
"""


def test_a_capture_that_would_load_is_refused_by_name_and_goes_on():
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("patched", [False, True])
def test_graphed(patched):
    block = swiglu.nn.MLP(576, 1536, device="cuda", dtype=torch.bfloat16)
    if patched:
        from test_patch import Block

        block = Block(576, 1536, dtype=torch.bfloat16)
        assert swiglu.patch(block).patched
    weights = block.gate_proj.weight, block.up_proj.weight, block.down_proj.weight
    call = ops.graphed(block, tokens=[1, 4, 16])
    assert list(call.buckets) == [1, 4, 16] and "tokens=[1, 4, 16]" in repr(call)
    with torch.no_grad():
        for m in (1, 3, 4, 5, 16, 0):
            x = tensor(m, 576, dtype=torch.bfloat16)
            y = call(x)
            if m:
                expect(y, x, weights)
            assert y.shape == x.shape
        x = tensor(2, 3, 576, dtype=torch.bfloat16)
        y = call(x)
        assert y.shape == x.shape and not torch.equal(y, call(2 * x))
        # What an optimiser writes is read.
        block.down_proj.weight.mul_(2)
        expect(call(x).reshape(6, 576), x.reshape(6, 576), weights)
    aliased = ops.graphed(block, tokens=[2], copy=False)
    with torch.no_grad():
        assert aliased(x[0, :2]).data_ptr() == aliased.buckets[2].y.data_ptr()
    for wrong, kind in [
        (torch.zeros(17, 576, dtype=torch.bfloat16, device="cuda"), "shape"),
        (torch.zeros(2, 575, dtype=torch.bfloat16, device="cuda"), "shape"),
        (torch.zeros(2, 576, device="cuda"), "dtype"),
        (torch.zeros(2, 576, dtype=torch.bfloat16), "layout"),
        (torch.zeros(2, 576, dtype=torch.bfloat16, device="cuda", requires_grad=True), "unsupported"),
    ]:
        with pytest.raises((swiglu.SwigluError, swiglu.ShapeError)) as caught:
            call(wrong)
        assert caught.value.kind == kind, caught.value
    with pytest.raises(swiglu.SwigluError, match="autocast"), torch.no_grad(), torch.autocast("cuda"):
        call(x)
    block.gate_proj.weight = torch.nn.Parameter(block.gate_proj.weight.detach().clone())
    with pytest.raises(swiglu.SwigluError, match="call graphed"), torch.no_grad():
        call(x)


def test_what_cannot_be_graphed_is_refused():
    for module, kind in [
        (torch.nn.Linear(4, 4), "argument"),
        (torch.nn.Sequential(swiglu.nn.MLP(8, 16, device="cuda")), "argument"),
        (swiglu.nn.MLP(8, 16), "layout"),
    ]:
        with pytest.raises(swiglu.SwigluError) as caught:
            ops.graphed(module)
        assert caught.value.kind == kind, caught.value
    with pytest.raises(swiglu.SwigluError, match="numbers from 1"):
        ops.graphed(swiglu.nn.MLP(8, 16, device="cuda"), tokens=[])


def test_reduce_overhead():
    if not any(map(shutil.which, ("gcc", "cc", "clang"))):
        pytest.skip("not run: no C compiler for Triton")
    import torch._dynamo.utils

    torch._dynamo.reset()
    block = swiglu.nn.MLP(64, 128, device="cuda", dtype=torch.bfloat16)
    weights = block.gate_proj.weight, block.up_proj.weight, block.down_proj.weight
    compiled = torch.compile(block, mode="reduce-overhead", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        for seed in range(5):
            x = tensor(4, 64, dtype=torch.bfloat16, seed=seed)
            torch.compiler.cudagraph_mark_step_begin()
            expect(compiled(x).clone(), x, weights)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    # Training too.
    for seed in range(4):
        x = tensor(4, 64, dtype=torch.bfloat16, seed=seed, grad=True)
        torch.compiler.cudagraph_mark_step_begin()
        (found,) = torch.autograd.grad(compiled(x).float().sum(), x)
        doubles = [t.detach().double().requires_grad_() for t in (x, *weights)]
        (exact,) = torch.autograd.grad(composed_block(*doubles).sum(), doubles[0])
        (theirs,) = torch.autograd.grad(composed_block(x, *weights).float().sum(), x)
        assert off(found.clone(), exact) <= 2 * off(theirs, exact) + 4 * 2.0**-8 / x.numel() ** 0.5


# Devices.


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="not run: one CUDA device")
def test_devices_beside_each_other():
    weights = block_of()
    there = [w.to("cuda:1") for w in weights]
    x = tensor(4, 64, dtype=torch.bfloat16)
    expected = ops.mlp(x, *weights)
    assert torch.cuda.current_device() == 0
    y = ops.mlp(x.to("cuda:1"), *there)
    assert y.device.index == 1 and torch.cuda.current_device() == 0
    assert torch.equal(y.to("cuda:0"), expected)
    gate = x.to("cuda:1").requires_grad_()
    ops.silu_mul(gate, gate).sum().backward()
    assert gate.grad.device.index == 1
    with pytest.raises(swiglu.SwigluError, match="expected a tensor on cuda:0"):
        ops.mlp(x.to("cuda:1"), *weights)
    with pytest.raises(swiglu.SwigluError):
        ops.silu_mul(x, x.to("cuda:1"))


def test_tensors_of_a_cpu_are_refused_beside_those_of_a_device():
    x, weights = tensor(4, 64, dtype=torch.bfloat16), block_of()
    for call in (
        lambda: ops.silu_mul(x, x.cpu()),
        lambda: ops.silu_mul(x.cpu(), x),
        lambda: ops.mlp(x.cpu(), *weights),
        lambda: ops.mlp(x, weights[0], weights[1].cpu(), weights[2]),
        lambda: ops.silu_mul(x, x, out=x.cpu()),
    ):
        with pytest.raises(swiglu.SwigluError, match="expected a tensor on") as caught:
            call()
        assert caught.value.kind == "layout"


FORK = """
import multiprocessing, os, torch, swiglu, swiglu.torch as ops
x = torch.ones(2, 64, device="cuda")
ops.silu_mul(x, x)
def child(queue):
    try:
        here = torch.ones(2, 4)
        assert torch.equal(ops.silu_mul(here, here), torch.nn.functional.silu(here) * here)
        place = (0, 0)
        one = (x.data_ptr(), (2, 64), (64, 1), "f32", True)
        try:
            ops._kernels._native.cuda_activation(place, swiglu.Activation("swiglu"), None, None, one, one, one)
            queue.put("nothing was refused")
        except swiglu.SwigluError as error:
            queue.put(str(error))
    except BaseException as error:
        queue.put(repr(error))
queue = multiprocessing.get_context("fork").Queue()
process = multiprocessing.get_context("fork").Process(target=child, args=(queue,))
process.start()
print(queue.get(timeout=60))
process.join(60)
ops.silu_mul(x, x)
torch.cuda.synchronize()
print("parent goes on")
"""


def test_a_forked_child_is_told():
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.strip().splitlines()
    assert "fork" in first and second == "parent goes on", done.stdout


# Training.


def composed_block(x, w_gate, w_up, w_down, b_gate=None, b_up=None, b_down=None):
    linear = torch.nn.functional.linear
    if w_up is None:
        gate, up = linear(x, w_gate, b_gate).chunk(2, -1)
    else:
        gate, up = linear(x, w_gate, b_gate), linear(x, w_up, b_up)
    return linear(torch.nn.functional.silu(gate) * up, w_down, b_down)


def traced(call):
    """Compiled as far as gradients are, without a compiler of kernels."""
    torch._dynamo.reset()
    return torch.compile(call, fullgraph=True, backend="aot_eager_decomp_partition")


def off(grad, exact):
    return ((grad.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("hidden, intermediate, tokens", [(64, 136, 130), (192, 172, 7), (2048, 264, 65)])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_a_block(dtype, hidden, intermediate, tokens, packed, biased, compiled):
    def leaf(*shape, seed, scale=1.0):
        return (tensor(*shape, dtype=dtype, seed=seed) * scale).detach().requires_grad_()

    wide = 2 * intermediate if packed else intermediate
    leaves = {
        "x": leaf(2, tokens, hidden, seed=1),
        "w_gate": leaf(wide, hidden, seed=2, scale=hidden**-0.5),
        "w_up": None if packed else leaf(intermediate, hidden, seed=3, scale=hidden**-0.5),
        "w_down": leaf(hidden, intermediate, seed=4, scale=intermediate**-0.5),
        "b_gate": leaf(wide, seed=5) if biased else None,
        "b_up": leaf(intermediate, seed=6) if biased and not packed else None,
        "b_down": leaf(hidden, seed=7) if biased else None,
    }
    grad = tensor(2, tokens, hidden, dtype=dtype, seed=8)
    wanted = [t for t in leaves.values() if t is not None]

    x, w_gate, w_up, w_down, *biases = leaves.values()
    y = (traced(ops.mlp) if compiled else ops.mlp)(x, w_gate, w_up, w_down, biases=tuple(biases))
    expected = "gate and up leave the forward kernel" if compiled else "gradients leave that of the result"
    assert expected in str(ops.explain_last()), ops.explain_last()
    # Which way a pass took is known in its own thread.
    with torch.autograd.set_multithreading_enabled(False):
        ours = torch.autograd.grad(y, wanted, grad, retain_graph=True)
    if compiled:
        assert "gradients of gate and up leave that of the result" in str(ops.explain_last()), ops.explain_last()
    again = torch.autograd.grad(y, wanted, grad)
    assert all(torch.equal(a, b) for a, b in zip(ours, again)), "a second backward pass differs"

    eager = torch.autograd.grad(composed_block(*leaves.values()), wanted, grad)
    doubles = [None if t is None else t.detach().double().requires_grad_() for t in leaves.values()]
    exact = torch.autograd.grad(
        composed_block(*doubles), [t for t in doubles if t is not None], grad.double()
    )
    unit = 2.0**-11 if dtype is torch.float16 else 2.0**-8
    for name, mine, theirs, true in zip((n for n, t in leaves.items() if t is not None), ours, eager, exact):
        # Twice PyTorch's own error, and its luck over few roundings.
        limit = 2 * off(theirs, true) + 4 * unit / (2 * tokens) ** 0.5
        assert off(mine, true) <= limit, (name, off(mine, true), off(theirs, true))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_block_keeps_gate_and_up_alone(compiled):
    weights = [w.requires_grad_() for w in block_of(128, 512)]
    x = tensor(256, 128, dtype=torch.bfloat16).requires_grad_()
    mlp = traced(ops.mlp) if compiled else ops.mlp
    mlp(x, *weights).sum().backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = mlp(x, *weights)
    kept = torch.cuda.memory_allocated() - before - y.numel() * y.element_size()
    assert kept <= 2 * 256 * 512 * 2 + 2048, kept


def test_compiled_training_under_autocast():
    singles = [tensor(*w.shape, dtype=torch.float32, seed=i).requires_grad_() for i, w in enumerate(block_of())]
    x = tensor(33, 64, dtype=torch.bfloat16).requires_grad_()
    grads = []
    for mlp in (ops.mlp, traced(ops.mlp)):
        with torch.autocast("cuda", torch.bfloat16):
            y = mlp(x, *singles)
        assert y.dtype == torch.bfloat16 and ops.explain_last().way == "native cuda", ops.explain_last()
        grads.append(torch.autograd.grad(y.float().sum(), [x, *singles]))
    doubles = [t.detach().double().requires_grad_() for t in (x, *singles)]
    exact = torch.autograd.grad(composed_block(*doubles).sum(), doubles)
    for theirs, mine, true in zip(*grads, exact):
        assert mine.dtype == theirs.dtype
        assert off(mine, true) <= 2 * off(theirs, true) + 4 * 2.0**-8 / 33**0.5


class Wrapped(torch.Tensor):
    """A weight that is one of PyTorch's operations alone, as quantised ones are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    def __repr__(self):
        return "Wrapped"

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, _, shape, stride):
        return Wrapped(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        if op.namespace == "swiglu":
            raise NotImplementedError(f"{op} of a wrapped weight")
        made = op(*(a.inner if isinstance(a, cls) else a for a in args), **(kwargs or {}))
        aten = torch.ops.aten
        return cls(made) if op in (aten.t.default, aten.detach.default, aten.alias.default) else made


def test_weights_of_sub_classes_are_left_to_their_maps_in_compiled_training():
    weights = block_of()
    x = tensor(5, 64, dtype=torch.bfloat16).requires_grad_()
    y = traced(ops.mlp)(x, *map(Wrapped, weights))
    torch.testing.assert_close(y, composed_block(x, *weights), rtol=2.0**-6, atol=2.0**-6 * y.abs().max().item())
    (grad,) = torch.autograd.grad(y.float().sum(), x)
    assert torch.isfinite(grad).all()


def test_compiled_training_of_weights_that_lie_otherwise():
    weights = block_of()
    x = tensor(5, 64, dtype=torch.bfloat16).requires_grad_()
    for lie in (lambda w: w.t().contiguous().t(), lambda w: torch.cat((w.flatten()[:1], w.flatten()))[1:].view(w.shape)):
        there = [lie(w).detach().requires_grad_() for w in weights]
        leaves = [x, *there]
        y = traced(ops.mlp)(*leaves)
        # Columns that are apart are known at the trace; memory at any address is the operator's to take.
        assert ops.explain_last().op == ("silu_mul" if there[0].stride(1) != 1 else "mlp_saving"), ops.explain_last()
        found = torch.autograd.grad(y.float().sum(), leaves)
        doubles = [t.detach().double().requires_grad_() for t in leaves]
        exact = torch.autograd.grad(composed_block(*doubles).sum(), doubles)
        theirs = torch.autograd.grad(composed_block(*leaves).float().sum(), leaves)
        for mine, their, true in zip(found, theirs, exact):
            assert off(mine, true) <= 2 * off(their, true) + 4 * 2.0**-8 / 5**0.5


def test_subsets_of_gradients_and_one_value_for_all():
    weights = block_of()
    for subset in range(1, 16):
        leaves = [t.detach().requires_grad_(bool(subset >> i & 1)) for i, t in enumerate([tensor(33, 64, dtype=torch.bfloat16), *weights])]
        ops.mlp(*leaves).sum().backward()
        for i, leaf in enumerate(leaves):
            assert (leaf.grad is not None) == bool(subset >> i & 1)
            assert leaf.grad is None or torch.isfinite(leaf.grad).all()


@pytest.mark.parametrize("table", [False, True], ids=["without a table", "by table"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
def test_gradients_are_as_near_as_those_of_eager(dtype, packed, biased, table, monkeypatch):
    """Of x that lies in rows, in columns, and of one row for all; twice, so that what was kept has to stay."""
    if not table:
        monkeypatch.setattr(ops._kernels, "BY_TABLE", False)
    tokens, weights = 256, block_of(dtype=dtype)
    bias = [tensor(w.shape[0], dtype=dtype, seed=3 + i) for i, w in enumerate(weights)]
    if packed:
        weights, bias = [torch.cat(weights[:2]), None, weights[2]], [torch.cat(bias[:2]), None, bias[2]]

    def gradients(x, dtype, layer, save="preact"):
        leaves = [None if t is None else t.detach().to(dtype).requires_grad_() for t in (x, *weights, *bias)]
        y = layer(*leaves[:4], biases=tuple(leaves[4:]) if biased else None, save=save)
        wanted = [t for t in (leaves if biased else leaves[:4]) if t is not None]
        # In columns: copies of x and of it are as large.
        dy = tensor(y.shape[-1], tokens, dtype=torch.bfloat16, seed=8).to(dtype).t()
        first, second = (torch.autograd.grad(y, wanted, dy, retain_graph=again) for again in (True, False))
        assert all(torch.equal(a, b) for a, b in zip(first, second))
        return first

    def composed(x, w_gate, w_up, w_down, biases, save):
        b_gate, b_up, b_down = biases or (None, None, None)
        gate = torch.nn.functional.linear(x, w_gate, b_gate)
        gate, up = gate.chunk(2, -1) if w_up is None else (gate, torch.nn.functional.linear(x, w_up, b_up))
        return torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, w_down, b_down)

    unit = 2.0**-11 if dtype is torch.float16 else 2.0**-8
    rows, columns = tensor(tokens, 64, dtype=dtype), tensor(64, tokens, dtype=dtype).t()
    for x in (rows, columns, rows[:1].expand(tokens, 64), rows.view(8, 32, 64)):
        flat = x.reshape(tokens, 64)
        eager, exact = (gradients(flat, t, composed) for t in (dtype, torch.float64))
        for save in ("preact", "input"):
            for mine, theirs, true in zip(gradients(x.detach(), dtype, of_shape, save), eager, exact):
                assert off(mine.reshape(true.shape), true) <= 2 * off(theirs, true) + 4 * unit / tokens**0.5
                assert ops.explain_last().way == "native cuda", ops.explain_last()


def of_shape(x, *weights, **how):
    return ops.mlp(x, *weights, **how).reshape(-1, x.shape[-1])


def test_a_step_is_the_same_where_pytorch_has_no_table(monkeypatch):
    """As before PyTorch 2.10 or so, whose tensors are described in Python, on a stream that is borrowed for each call."""
    dy = tensor(40, 64, dtype=torch.bfloat16, seed=4)

    def step(save):
        leaves = [t.requires_grad_() for t in (tensor(40, 64, dtype=torch.bfloat16), *block_of())]
        y = ops.mlp(*leaves, save=save)
        assert ops.explain_last().way == "native cuda", ops.explain_last()
        return (y, *torch.autograd.grad(y, leaves, dy))

    for save in ("preact", "input"):
        with monkeypatch.context() as without, torch.cuda.stream(torch.cuda.Stream()):
            without.setattr(ops._kernels, "BY_TABLE", False)
            found = step(save)
            torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, step(save)))


def test_a_biased_block_that_is_warm_is_captured_in_training():
    block = swiglu.nn.MLP(96, 160, bias=True, device="cuda", dtype=torch.bfloat16)
    x = tensor(11, 96, dtype=torch.bfloat16)
    ops.warmup(block, tokens=[11])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        block(x).float().square().sum().backward()
    graph.replay()
    torch.cuda.synchronize()
    found = [p.grad.clone() for p in block.parameters()]
    block.zero_grad()
    block(x).float().square().sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(found, block.parameters()))


def test_what_does_not_fit_is_refused_as_on_a_cpu_where_a_gradient_is_wanted():
    x, (gate, up, down) = tensor(3, 64, dtype=torch.bfloat16), block_of()
    both, bias = torch.cat([gate, up]), tensor(128, dtype=torch.bfloat16)
    two = torch.cat([bias, bias])
    calls = [
        (x, gate, up, None), (x, None, up, down), (x, gate[0], up, down), (x, gate[None], up, down), (x, gate, up[None], down),
        (x, gate, up, down[None]), (x, gate, up[0, 0], down), (x[:, :32], gate, up, down), (x, gate, up[:64], down),
        (x, gate, up, down[:, :64]), (x, gate, up, down.float()), (x[0, 0], gate, up, down), (x, both[:1], None, down),
        (x, both, None, down, (two, bias, None)), (x, both, None, down, (None, bias, None)), (x, both, None, down, (bias[0], None, None)),
        (x, both, None, down, (two[None], None, None)), (x, gate, up, down, (bias[None], None, None)), (x, gate, up, down, (None, None, bias)),
    ]  # fmt: skip

    def refusal(x, gate, up, down, biases, device):
        def there(t):
            return None if t is None else t.detach().to(device).requires_grad_()

        biases = None if biases is None else tuple(map(there, biases))
        with pytest.raises((swiglu.SwigluError, swiglu.ShapeError)) as refused:
            ops.mlp(there(x), there(gate), there(up), there(down), biases=biases)
        return refused.value.kind, str(refused.value)

    for x, gate, up, down, *biases in calls:
        by_device = [refusal(x, gate, up, down, biases[0] if biases else None, device) for device in ("cuda", "cpu")]
        assert by_device[0] == by_device[1]
    with torch.no_grad(), pytest.raises(swiglu.SwigluError, match="w_down"):
        ops.mlp(x, gate, up, None)


def test_a_block_without_tokens_has_zeros_for_gradients():
    weights = [w.requires_grad_() for w in block_of()]
    x = tensor(0, 64, dtype=torch.bfloat16).requires_grad_()
    ops.mlp(x, *weights).sum().backward()
    assert x.grad.shape == (0, 64) and all((w.grad == 0).all() for w in weights)


def test_a_second_derivative_of_a_block_is_refused():
    weights = [w.requires_grad_() for w in block_of()]
    x = tensor(3, 64, dtype=torch.bfloat16).requires_grad_()
    (grad,) = torch.autograd.grad(ops.mlp(x, *weights).sum(), x, create_graph=True)
    with pytest.raises(swiglu.SwigluError, match="second derivative"):
        grad.sum().backward()


def test_weights_that_change_before_the_backward_pass_are_noticed():
    weights = [w.requires_grad_() for w in block_of()]
    y = ops.mlp(tensor(3, 64, dtype=torch.bfloat16), *weights)
    with torch.no_grad():
        weights[2].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_checkpointing_a_block_with_weights_that_are_gone():
    from torch.utils.checkpoint import checkpoint

    singles = [tensor(*w.shape, dtype=torch.float32, seed=i).requires_grad_() for i, w in enumerate(block_of())]
    x = tensor(33, 64, dtype=torch.bfloat16).requires_grad_()

    def block(x):
        return ops.mlp(x, *(w.bfloat16() for w in singles))

    grads = []
    for kept in (False, True):
        y = checkpoint(block, x, use_reentrant=False) if kept else block(x)
        # What the casts of the forward pass had is given to others.
        filled = [torch.full((128 * 64,), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(16)]
        grads.append(torch.autograd.grad(y.float().square().sum(), [x, *singles]))
        del filled
    assert all(torch.equal(a, b) for a, b in zip(*grads))
