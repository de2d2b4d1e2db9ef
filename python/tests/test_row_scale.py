"""Blocks whose rows have factors, as a router weighs the tokens of an expert: values, gradients, and what is kept for them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="not run: no PyTorch")

import swiglu
import swiglu.nn
import swiglu.torch as ops
import test_packing
from swiglu.torch import _kernels
from test_ops import Here, device, tensor  # noqa: F401
from test_packing import HALVES, HIDDEN, INTERMEDIATE, block_of, off

TOKENS = 24
REFUSALS = (swiglu.SwigluError, swiglu.ShapeError)
DTYPES = [*HALVES, torch.float32, torch.float64]


@pytest.fixture
def packing(monkeypatch):
    """The kernels for blocks on a CPU, whatever instructions it has."""
    monkeypatch.setattr(_kernels, "PACKED_IN_CALLS", frozenset(HALVES))


def ours(x, w_gate, w_up, w_down, biases, row_scale, save="preact"):
    return ops.mlp(x, w_gate, w_up, w_down, biases=biases, row_scale=row_scale, save=save)


def composed(x, w_gate, w_up, w_down, biases, row_scale, save=None):
    y = test_packing.composed(x, w_gate, w_up, w_down, biases)
    return (y * row_scale.unsqueeze(-1)).to(y.dtype)


def gradients(layer, tensors, dtype, row_scale, dy, save="preact"):
    """The result and all gradients: of x, the weights, the biases, and the factors."""
    x, weights, biases = tensors
    leaves = [None if t is None else t.detach().to(dtype).requires_grad_() for t in (x, *weights, *biases)]
    factors = (row_scale.double() if dtype is torch.float64 else row_scale).detach().requires_grad_()
    y = layer(*leaves[:4], tuple(leaves[4:]), factors, save)
    wanted = [t for t in (*leaves, factors) if t is not None]
    # Twice, so that what was kept has to stay.
    first, second = (torch.autograd.grad(y, wanted, dy.to(dtype), retain_graph=again) for again in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    return [y.detach(), *first]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_multiplied_wherever_they_go(dtype):
    weights, biases = block_of(dtype, biased=True)
    x = tensor(2, 3, HIDDEN, dtype=dtype)
    for factors in (tensor(2, 3, dtype=torch.float32), tensor(3, 2, dtype=dtype).t(), tensor(1, 1, dtype=dtype).expand(2, 3)):
        y = ops.mlp(x, *weights, biases=biases)
        expected = (y * factors.unsqueeze(-1)).to(dtype)
        assert torch.equal(ops.mlp(x, *weights, biases=biases, row_scale=factors), expected)
        out = torch.empty_like(x)
        assert ops.mlp(x, *weights, biases=biases, row_scale=factors, out=out) is out and torch.equal(out, expected)
        # Ways of a training step are others.
        leaf = x.detach().requires_grad_()
        trained = (ops.mlp(leaf, *weights, biases=biases) * factors.unsqueeze(-1)).to(dtype)
        assert torch.equal(ours(leaf, *weights, biases, factors), trained)


@pytest.mark.parametrize("save", ["preact", "input"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_are_as_near_as_those_of_eager(dtype, packed, biased, save, packing):
    tensors = tensor(TOKENS, HIDDEN, dtype=dtype), *block_of(dtype, biased, packed)
    unit = 2.0**-11 if dtype is torch.float16 else 2.0**-8
    dy = tensor(HIDDEN, TOKENS, dtype=dtype, seed=8).t()
    for kind in (torch.float32, dtype):
        row_scale = tensor(TOKENS, dtype=kind, seed=3)
        row_scale[5] = 0
        exact = gradients(composed, tensors, torch.float64, row_scale, dy)
        eager = gradients(composed, tensors, dtype, row_scale, dy)
        found = gradients(ours, tensors, dtype, row_scale, dy, save)
        assert ops.explain_last().way.startswith("native")
        assert found[-1].dtype == kind and found[-1].shape == row_scale.shape
        for i, (ours_of, eagers, exactly) in enumerate(zip(found, eager, exact)):
            assert ours_of.dtype == eagers.dtype and ours_of.shape == eagers.shape
            assert off(ours_of, exactly) <= 2 * off(eagers, exactly) + unit, i
        # A row without weight gives x no gradient, and its factor one nevertheless.
        assert (found[1][5] == 0).all() and found[-1][5] != 0


def test_each_subset_of_gradients_is_a_part_of_all(packing):
    dtype = torch.float16
    x, row_scale, dy = tensor(TOKENS, HIDDEN, dtype=dtype), tensor(TOKENS, seed=3), tensor(TOKENS, HIDDEN, dtype=dtype, seed=4)
    weights, biases = block_of(dtype, biased=True)
    tensors = [x, *weights, *biases, row_scale]

    def of(wanted):
        leaves = [t.detach().requires_grad_(want) for t, want in zip(tensors, wanted)]
        y = ours(*leaves[:4], tuple(leaves[4:7]), leaves[7])
        return torch.autograd.grad(y, [t for t in leaves if t.requires_grad], dy)

    every = of([True] * 8)
    for alone in range(8):
        for wanted in ([i == alone for i in range(8)], [i != alone for i in range(8)]):
            expected = [grad for grad, want in zip(every, wanted) if want]
            assert all(torch.equal(a, b) for a, b in zip(of(wanted), expected)), wanted


def test_the_result_is_not_kept(packing):
    dtype = torch.bfloat16
    weights, biases = block_of(dtype)
    kept = []

    def keep(t):
        kept.append(t)
        return t

    x, row_scale = tensor(TOKENS, HIDDEN, dtype=dtype, grad=True), tensor(TOKENS, grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = ours(x, *weights, biases, row_scale)
    shapes = [tuple(t.shape) for t in kept]
    # x alone has the shape of the result.
    assert shapes.count(tuple(y.shape)) == 1 and (TOKENS, 2 * INTERMEDIATE) in shapes


def test_modes_see_the_backward_pass(packing):
    from torch.fx.experimental.proxy_tensor import make_fx

    dtype = torch.bfloat16
    tensors = tensor(TOKENS, HIDDEN, dtype=dtype), *block_of(dtype, biased=True)
    row_scale, dy = tensor(TOKENS, seed=3), tensor(TOKENS, HIDDEN, dtype=dtype, seed=8)
    exact = gradients(composed, tensors, torch.float64, row_scale, dy)
    eager = gradients(composed, tensors, dtype, row_scale, dy)
    leaves = [t.detach().requires_grad_() for t in (tensors[0], *tensors[1], *tensors[2], row_scale)]
    y = ours(*leaves[:4], tuple(leaves[4:7]), leaves[7])

    def backward(dy):
        return torch.autograd.grad(y, leaves, dy, retain_graph=True)

    def within(found):
        for i, (a, b, exactly) in enumerate(zip(found, eager[1:], exact[1:])):
            assert a.dtype == b.dtype and off(a, exactly) <= 2 * off(b, exactly) + 2.0**-8, i

    graph = make_fx(backward)(dy)
    assert len(graph.graph.nodes) > 10
    within(graph(dy))
    batch = torch.autograd.grad(y, leaves, torch.stack((dy, 2 * dy)), retain_graph=True, is_grads_batched=True)
    within([grad[0] for grad in batch])
    assert all(off(grad[1], 2 * grad[0].double()) < 2.0**-6 for grad in batch)
    with torch.autocast(Here.device, dtype=torch.bfloat16):
        within(backward(dy))
    grads = torch.func.grad(lambda *args: (ours(*args[:4], args[4:7], args[7]) * dy).float().sum(), tuple(range(8)))
    within(grads(*(t.detach() for t in leaves)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_code_has_factors(dtype):
    tensors = tensor(TOKENS, HIDDEN, dtype=dtype), *block_of(dtype)
    row_scale, dy = tensor(TOKENS, seed=3), tensor(TOKENS, HIDDEN, dtype=dtype, seed=8)
    layer = torch.compile(ours, backend="aot_eager", fullgraph=True)
    exact = gradients(composed, tensors, torch.float64, row_scale, dy)
    eager = gradients(composed, tensors, dtype, row_scale, dy)
    unit = torch.finfo(dtype).eps
    for a, b, exactly in zip(gradients(layer, tensors, dtype, row_scale, dy), eager, exact):
        assert off(a, exactly) <= 2 * off(b, exactly) + unit


def test_weights_with_main_grad_have_factors_too(packing):
    weights, _ = block_of(torch.bfloat16)
    x, row_scale = tensor(TOKENS, HIDDEN, dtype=torch.bfloat16), tensor(TOKENS, grad=True)
    sums = []
    for fused in (False, True):
        leaves = [w.detach().requires_grad_() for w in weights]
        for leaf in leaves:
            leaf.main_grad = torch.zeros(leaf.shape, device=Here.device)
        y = ops.mlp(x, *leaves, row_scale=row_scale, gradient_accumulation_fusion=fused)
        row_scale.grad = None
        y.sum().backward()
        sums.append([leaf.main_grad if fused else leaf.grad.float() for leaf in leaves] + [row_scale.grad])
    for plain, into in zip(*sums):
        assert off(into, plain.double()) < 2.0**-7


def test_out_may_hold_the_factors_and_has_no_gradient():
    weights, biases = block_of(torch.float32, biased=True)
    x, out = tensor(TOKENS, HIDDEN), tensor(TOKENS, HIDDEN, seed=2)
    expected = ops.mlp(x, *weights, biases=biases) * out[:, :1]
    assert torch.equal(ops.mlp(x, *weights, biases=biases, row_scale=out[:, 0], out=out), expected)
    with pytest.raises(swiglu.SwigluError, match="row_scale: .*out"):
        ops.mlp(x, *weights, row_scale=tensor(TOKENS, grad=True), out=out)
    assert not out.requires_grad


@pytest.mark.parametrize("biases", [(), [None], 5, False, "abc", torch.zeros(3, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_biases_are_refused_as_without_factors(biases, dtype, packing):
    weights, _ = block_of(dtype)
    x = tensor(TOKENS, HIDDEN, dtype=dtype, grad=True)
    said = []
    for factors in ({}, {"row_scale": tensor(TOKENS)}):
        with pytest.raises(swiglu.SwigluError) as refused:
            ops.mlp(x, *weights, biases=biases, **factors)
        said.append(str(refused.value))
    assert said[0] == said[1]


def test_factors_that_come_back_in_another_shape(packing):
    dtype = torch.float16
    weights, biases = block_of(dtype)
    x, row_scale = tensor(TOKENS, HIDDEN, dtype=dtype, grad=True), tensor(TOKENS, grad=True)
    expected = torch.autograd.grad(ours(x, *weights, biases, row_scale).float().sum(), [x, row_scale])

    def back(t):
        return t.unsqueeze(-1) if t.shape == (TOKENS,) else t

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, back):
        found = torch.autograd.grad(ours(x, *weights, biases, row_scale).float().sum(), [x, row_scale])
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_symbolic_traces_keep_the_argument():
    module, x, row_scale = swiglu.nn.MLP(HIDDEN, INTERMEDIATE, device=Here.device), tensor(TOKENS, HIDDEN), tensor(TOKENS)
    for hooked in (False, True):
        if hooked:
            module.gate_proj.register_forward_hook(lambda *_: None)
        traced = torch.fx.symbolic_trace(module)
        torch.testing.assert_close(traced(x), module(x))
        torch.testing.assert_close(traced(x, row_scale), module(x, row_scale))


def test_a_module_takes_factors():
    module = swiglu.nn.MLP(HIDDEN, INTERMEDIATE, device=Here.device)
    x, row_scale = tensor(TOKENS, HIDDEN), tensor(TOKENS, seed=3)
    expected = module(x) * row_scale.unsqueeze(-1)
    torch.testing.assert_close(module(x, row_scale=row_scale), expected)
    calls = []
    module.gate_proj.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(module(x, row_scale), expected)
    assert calls
    with pytest.raises(REFUSALS, match=r"row_scale: expected \[24\], given \[23\]"):
        module(x, row_scale[1:])


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: tensor(TOKENS - 1), r"row_scale: expected \[24\], given \[23\]"),
        (lambda: tensor(TOKENS, 1), r"row_scale: expected \[24\], given \[24, 1\]"),
        (lambda: torch.ones(TOKENS, dtype=torch.int64, device=Here.device), "row_scale: expected floating point elements"),
        (lambda: torch.ones(TOKENS, device="meta"), "row_scale: expected a tensor on"),
        (lambda: 0.5, "row_scale: expected a torch.Tensor"),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_what_is_no_factor_of_each_row_is_refused(make, why, grad):
    weights, _ = block_of(torch.bfloat16)
    with pytest.raises(REFUSALS, match=why):
        ops.mlp(tensor(TOKENS, HIDDEN, dtype=torch.bfloat16, grad=grad), *weights, row_scale=make())


def test_no_rows_have_no_factors(packing):
    weights, biases = block_of(torch.bfloat16, biased=True)
    leaves = [t.requires_grad_() for t in (*weights, *biases)]
    x, row_scale = tensor(0, HIDDEN, dtype=torch.bfloat16, grad=True), tensor(0, grad=True)
    y = ours(x, *leaves[:3], tuple(leaves[3:]), row_scale)
    grads = torch.autograd.grad(y.sum(), [x, *leaves, row_scale])
    assert grads[0].shape == (0, HIDDEN) and grads[-1].shape == (0,)
    assert all((grad == 0).all() for grad in grads[1:-1])
