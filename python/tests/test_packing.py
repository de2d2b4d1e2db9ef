"""Blocks of a CPU's tensors that pack their weights in each call, where PyTorch's products of the type are slow."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="not run: no PyTorch")

import swiglu
import swiglu.nn
import swiglu.torch as ops
from swiglu.torch import _kernels
from test_ops import Here, tensor

HIDDEN, INTERMEDIATE = 40, 72
F = torch.nn.functional
HALVES = [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def packing(monkeypatch):
    """Whatever instructions this CPU has, and whether or not there is a CUDA device."""
    monkeypatch.setattr(Here, "device", "cpu")
    monkeypatch.setattr(_kernels, "PACKED_IN_CALLS", frozenset(HALVES))


def block_of(dtype, biased=False, packed=False):
    shapes = (INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)
    weights = [tensor(*shape, dtype=dtype, seed=5 + i) / shape[1] ** 0.5 for i, shape in enumerate(shapes)]
    biases = [tensor(w.shape[0], dtype=dtype, seed=9 + i) if biased else None for i, w in enumerate(weights)]
    if packed:
        weights = [torch.cat(weights[:2]), None, weights[2]]
        biases = [torch.cat(biases[:2]) if biased else None, None, biases[2]]
    return weights, biases


def composed(x, w_gate, w_up, w_down, biases, save=None):
    b_gate, b_up, b_down = biases
    gate = F.linear(x, w_gate, b_gate)
    gate, up = gate.chunk(2, -1) if w_up is None else (gate, F.linear(x, w_up, b_up))
    return F.linear(F.silu(gate) * up, w_down, b_down)


def off(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


def gradients(layer, x, dtype, weights, biases, dy, save="preact"):
    leaves = [None if t is None else t.detach().to(dtype).requires_grad_() for t in (x, *weights, *biases)]
    y = layer(*leaves[:4], biases=tuple(leaves[4:]), save=save)
    # Twice, so that what was kept has to stay.
    wanted = [t for t in leaves if t is not None]
    first, second = (torch.autograd.grad(y, wanted, dy.to(dtype), retain_graph=again) for again in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    return [y.detach(), *first]


def was_native():
    return ops.explain_last().way == "native cpu"


@pytest.mark.parametrize("table", [True, False])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_are_as_near_as_those_of_eager(dtype, packed, biased, table, monkeypatch):
    if not table:
        monkeypatch.setattr(_kernels, "BY_TABLE", False)
    weights, biases = block_of(dtype, biased, packed)
    tokens, unit = 48, 2.0**-11 if dtype is torch.float16 else 2.0**-8
    rows = tensor(tokens, HIDDEN, dtype=dtype)
    columns = tensor(HIDDEN, tokens, dtype=dtype).t()
    negated = torch._neg_view(rows)
    for x in (rows, columns, rows[:1].expand(tokens, HIDDEN), rows.view(4, 12, HIDDEN), negated):
        for dy in (tensor(HIDDEN, tokens, dtype=dtype, seed=8).t(), torch.ones(1, 1, dtype=dtype).expand(tokens, HIDDEN)):
            dy = dy.reshape(x.shape) if x.dim() > 2 else dy
            given = (weights, biases, dy)
            exact = gradients(composed, x, torch.float64, *given)
            eager = gradients(composed, x, dtype, *given)
            for save in ("preact", "input"):
                found = gradients(ops.mlp, x, dtype, *given, save=save)
                assert was_native(), ops.explain_last()
                for mine, theirs, true in zip(found, eager, exact):
                    assert mine.shape == true.shape
                    assert off(mine, true) <= 2 * off(theirs, true) + 4 * unit / tokens**0.5


@pytest.mark.parametrize("dtype", HALVES)
def test_a_block_keeps_gate_and_up_alone(dtype):
    (w_gate, w_up, w_down), _ = block_of(dtype)
    leaves = [t.requires_grad_() for t in (tensor(20, HIDDEN, dtype=dtype), w_gate, w_up, w_down)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ops.mlp(*leaves)
    own = {t.untyped_storage().data_ptr() for t in leaves}
    rest = [t for t in kept if t.untyped_storage().data_ptr() not in own]
    assert [tuple(t.shape) for t in rest] == [(20, 2 * INTERMEDIATE)]


@pytest.mark.parametrize("wanted", range(16))
def test_each_subset_of_gradients_is_a_part_of_all(wanted):
    weights, biases = block_of(torch.float16)
    leaves = [tensor(17, HIDDEN, dtype=torch.float16), *weights]
    dy = tensor(17, HIDDEN, dtype=torch.float16, seed=3)

    def of(which):
        given = [t.detach().clone().requires_grad_(bool(which >> i & 1)) for i, t in enumerate(leaves)]
        y = ops.mlp(*given)
        if which:
            y.backward(dy)
        assert was_native(), ops.explain_last()
        return y.detach(), [t.grad for t in given]

    (y, all_of_them), (same, some) = of(15), of(wanted)
    assert torch.equal(y, same)
    for i, (whole, part) in enumerate(zip(all_of_them, some)):
        assert torch.equal(whole, part) if wanted >> i & 1 else part is None


def test_few_tokens_of_a_forward_pass_are_for_the_maps():
    (w_gate, w_up, w_down), _ = block_of(torch.float16)
    x = tensor(64, HIDDEN, dtype=torch.float16)
    with torch.no_grad():
        whole = ops.mlp(x, w_gate, w_up, w_down)
        assert was_native()
        into = torch.full_like(whole, float("nan"))
        assert ops.mlp(x, w_gate, w_up, w_down, out=into) is into and torch.equal(into, whole)
        # In the place of x, by new memory.
        over = x.clone()
        assert torch.equal(ops.mlp(over, w_gate, w_up, w_down, out=over), whole) and was_native()
        negated = ops.mlp(torch._neg_view(x), w_gate, w_up, w_down)
        assert was_native() and torch.equal(negated, ops.mlp(-x, w_gate, w_up, w_down))
        # Rows of wider matrices are read where they lie; what is no rows goes to the maps.
        wide = torch.cat([w_gate, w_gate], 1)[:, :HIDDEN]
        assert torch.equal(ops.mlp(x, wide, w_up, w_down), whole) and was_native()
        turned = w_gate.t().contiguous().t()
        assert off(ops.mlp(x, turned, w_up, w_down), whole.double()) < 2.0**-8 and not was_native()
        ops.mlp(x[:15], w_gate, w_up, w_down)
        assert ops.explain_last().way == "composed"
        assert torch.equal(ops.mlp(x, torch.cat([w_gate, w_up]), None, w_down), whole) and was_native()
        assert torch.equal(ops.mlp(x, torch.cat([w_up, w_gate]), None, w_down, layout="up-first"), whole) and was_native()
        ops.mlp(x, w_gate, w_up, w_down, numerics="eager")
        assert not was_native()
        assert torch.equal(torch.ops.swiglu.mlp(x, w_gate, w_up, w_down, None, None, None, "swiglu", "gate-first", None), whole)
    assert ops.mlp(x[:0], w_gate, w_up, w_down).shape == (0, HIDDEN)


def test_out_may_lie_anywhere():
    """In memory that overlaps x, of another storage, and at an odd address."""
    (w_gate, w_up, w_down), _ = block_of(torch.float16)
    values = tensor(65, HIDDEN, dtype=torch.float16).numpy()
    x, out = torch.from_numpy(values[:-1]), torch.from_numpy(values[1:])
    odd = torch.frombuffer(bytearray(1 + 64 * HIDDEN * 2), dtype=torch.float16, offset=1).view(64, HIDDEN)
    with torch.no_grad():
        expected = ops.mlp(x.clone(), w_gate, w_up, w_down)
        ops.mlp(x, w_gate, w_up, w_down, out=odd)
        assert torch.equal(odd, expected) and was_native()
        ops.mlp(x, w_gate, w_up, w_down, out=out)
        assert torch.equal(out, expected) and was_native()


@pytest.mark.parametrize("name", ["reglu", "reglu2"])
def test_what_relu_cuts_off_has_no_gradient(name):
    (w_gate, w_up, w_down), _ = block_of(torch.float16)
    leaves = [t.requires_grad_() for t in (torch.ones(20, HIDDEN, dtype=torch.float16), -w_gate.abs(), 3e3 * w_up.abs(), w_down)]
    for gradient in torch.autograd.grad(ops.mlp(*leaves, activation=name).sum(), leaves):
        assert not gradient.any()


@pytest.mark.parametrize("name", ["geglu", "geglu-tanh", "glu", "bilinear", "clamped-swiglu(alpha=1.702,offset=1,limit=2)"])
def test_gradients_of_the_family(name):
    weights, biases = block_of(torch.float16)
    x, dy = tensor(32, HIDDEN, dtype=torch.float16), tensor(32, HIDDEN, dtype=torch.float16, seed=8)

    def of(call, dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, *weights)]
        return torch.autograd.grad(call(*leaves), leaves, dy.to(dtype))

    def maps(x, w_gate, w_up, w_down):
        return F.linear(ops.silu_mul(F.linear(x, w_gate), F.linear(x, w_up), activation=name), w_down)

    found = of(lambda *leaves: ops.mlp(*leaves, activation=name), torch.float16)
    assert was_native()
    for mine, theirs, true in zip(found, of(maps, torch.float16), of(maps, torch.float64)):
        assert off(mine, true) <= 2 * off(theirs, true) + 2.0**-12


def test_what_lies_elsewhere_is_refused():
    """As a weight that came back to the backward pass on another device."""
    with pytest.raises(swiglu.SwigluError, match="expected one on cpu, where it was kept, given one on meta") as refused:
        _kernels.here(torch.empty(2, 2, device="meta"))
    assert refused.value.kind == "layout"


@pytest.mark.parametrize("save", ["preact", "input"])
def test_a_backward_pass_under_autocast_is_that_of_its_forward_pass(save):
    weights, _ = block_of(torch.float16)
    leaves = [t.requires_grad_() for t in (tensor(20, HIDDEN, dtype=torch.float16), *weights)]
    y = ops.mlp(*leaves, save=save)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
    for mine, other in zip(found, torch.autograd.grad(y.sum(), leaves)):
        assert mine.dtype == torch.float16 and off(mine, other.double()) < 2.0**-9


def test_changed_weights_are_seen():
    block = swiglu.nn.MLP(HIDDEN, INTERMEDIATE, dtype=torch.bfloat16)
    x = tensor(32, HIDDEN, dtype=torch.bfloat16)
    with torch.no_grad():
        before = block(x)
        block.up_proj.weight.mul_(2)
        assert torch.equal(block(x), 2 * before) and was_native()


@pytest.mark.parametrize("main", [torch.float32, torch.float16])
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_are_added_to_main_grad(packed, main):
    dtype = torch.float16
    weights, _ = block_of(dtype, packed=packed)
    weights = [None if w is None else torch.nn.Parameter(w) for w in weights]
    there = [w for w in weights if w is not None]
    for weight in there:
        weight.main_grad = torch.ones(weight.shape, dtype=main)
        weight.grad_added_to_main_grad = False
    # One that holds an infinity would keep it.
    there[-1].main_grad.fill_(float("inf"))
    there[-1].overwrite_main_grad = True
    sums = [0] * len(there)
    for i, m in enumerate((24, 0, 33)):
        x, dy = (tensor(m, HIDDEN, dtype=dtype, seed=s + i) for s in (20, 30))
        ops.mlp(x, *weights, gradient_accumulation_fusion=True).backward(dy)
        assert was_native(), ops.explain_last()
        exact = gradients(composed, x, torch.float64, weights, [None] * 3, dy)[2:]
        sums = [s + e for s, e in zip(sums, exact)]
        sums[-1] = exact[-1]
    for weight, exact in zip(there, sums):
        held = 0 if weight is there[-1] else 1
        assert weight.grad_added_to_main_grad
        # h and its factors have three roundings to 16 bits, and sums in f16 three more.
        assert off(weight.main_grad - held, exact) < (4 if main == torch.float32 else 16) * 2.0**-11


def test_one_main_grad_of_two_weights_is_refused():
    weights = [torch.nn.Parameter(w) for w in block_of(torch.float16)[0]]
    shared = torch.zeros(INTERMEDIATE, HIDDEN)
    for weight, main in zip(weights, (shared, shared, torch.zeros(HIDDEN, INTERMEDIATE))):
        weight.main_grad = main
    y = ops.mlp(tensor(16, HIDDEN, dtype=torch.float16), *weights, gradient_accumulation_fusion=True)
    with pytest.raises(swiglu.SwigluError, match="give each weight a main_grad of its own") as refused:
        y.sum().backward()
    assert refused.value.kind == "unsupported"


def test_a_tied_weight_has_the_sum_in_its_main_grad():
    w, _, w_down = (torch.nn.Parameter(w) for w in block_of(torch.float16)[0])
    x, dy = tensor(16, HIDDEN, dtype=torch.float16), tensor(16, HIDDEN, dtype=torch.float16, seed=2)
    for weight in (w, w_down):
        weight.main_grad = torch.zeros(weight.shape)
    ops.mlp(x, w, w, w_down, gradient_accumulation_fusion=True).backward(dy)
    exact = [t.detach().double().requires_grad_() for t in (w, w_down)]
    composed(x.double(), exact[0], exact[0], exact[1], [None] * 3).backward(dy.double())
    for weight, true in zip((w, w_down), exact):
        assert off(weight.main_grad, true.grad) < 2.0**-9


def test_a_batch_of_gradients_is_refused_beside_main_grad():
    for dtype in (torch.float16, torch.float32):
        block = swiglu.nn.MLP(HIDDEN, INTERMEDIATE, dtype=dtype, gradient_accumulation_fusion=True)
        for weight in block.parameters():
            weight.main_grad = torch.zeros(weight.shape)
        x = tensor(16, HIDDEN, dtype=dtype, grad=True)
        with pytest.raises(swiglu.SwigluError, match="one at a time") as refused:
            torch.autograd.grad(block(x), x, torch.ones(3, 16, HIDDEN, dtype=dtype), is_grads_batched=True)
        assert refused.value.kind == "unsupported"


@pytest.mark.parametrize("save", ["preact", "input"])
def test_weights_may_come_back_in_columns_and_not_in_other_shapes(save):
    leaves = [t.requires_grad_() for t in (tensor(16, HIDDEN, dtype=torch.float16), *block_of(torch.float16)[0])]
    hooks = torch.autograd.graph.saved_tensors_hooks
    expected = torch.autograd.grad(ops.mlp(*leaves, save=save).sum(), leaves)
    with hooks(lambda t: t.detach().t().contiguous(), lambda t: t.t()):
        y = ops.mlp(*leaves, save=save)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(y.sum(), leaves), expected))
    for other in (lambda t: t.flatten(), lambda t: t[:1], lambda t: t.new_empty(0)):
        with hooks(lambda t: t, lambda t, other=other: other(t) if t.shape == (HIDDEN, INTERMEDIATE) else t):
            y = ops.mlp(*leaves, save=save)
        with pytest.raises((swiglu.SwigluError, swiglu.ShapeError)):
            y.sum().backward()


def test_a_second_derivative_is_refused():
    weights, _ = block_of(torch.float16)
    x = tensor(16, HIDDEN, dtype=torch.float16, grad=True)
    (dx,) = torch.autograd.grad(ops.mlp(x, *weights).sum(), x, create_graph=True)
    with pytest.raises(swiglu.SwigluError, match="second derivative"):
        dx.sum().backward()


def test_checkpointing_computes_the_same_bits():
    block = swiglu.nn.MLP(HIDDEN, INTERMEDIATE, dtype=torch.float16)
    x = tensor(18, HIDDEN, dtype=torch.float16)

    def of(call):
        leaf = x.detach().clone().requires_grad_()
        return torch.autograd.grad(call(leaf).square().sum(), [leaf, *block.parameters()])

    again = of(lambda x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False))
    assert was_native() and all(torch.equal(a, b) for a, b in zip(of(block), again))
