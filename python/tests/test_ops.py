"""Operators of PyTorch: values, registration, gradients, compile, autocast, vmap, threads.

One file, because each kind of test goes through one list of operators."""

from __future__ import annotations

import itertools
import shutil
import threading

import pytest

torch = pytest.importorskip("torch", reason="not run: no PyTorch")
np = pytest.importorskip("numpy", reason="not run: no numpy")

import swiglu
import swiglu.torch as ops
from reference import FAMILY, activation, activation_bound, linear_bound
from swiglu.torch import _door, _formulas

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="not run: no CUDA device")


class Here:
    """Where a test makes its tensors."""

    device = "cpu"


@pytest.fixture(autouse=True, params=["cpu", pytest.param("cuda", marks=needs_cuda)])
def device(request):
    Here.device = request.param
    return request.param


def tensor(*shape, dtype=torch.float32, grad=False, seed=None):
    generator = torch.Generator().manual_seed(sum(shape) if seed is None else seed)
    made = torch.randn(shape, generator=generator, dtype=torch.float64).to(Here.device, dtype)
    return made.requires_grad_(grad)


DEFAULTS = {
    "silu_mul": (None, None, "swiglu", None),
    "glu": (None, "swiglu", "gate-first", None),
    "gated_linear": (None,) * 5 + ("swiglu", "gate-first", None),
    "mlp": (None,) * 7 + ("swiglu", "gate-first", None),
}


def call(name, *args, **options):
    """An operator, with all of its arguments."""
    op = getattr(torch.ops.swiglu, name)
    return (op.out if "out" in options else op)(*filled(name, args), **options)


def filled(name, args):
    return (*args, *DEFAULTS[name][len(args) :])


def double(t):
    return None if t is None else t.detach().cpu().double().numpy()


def name_of(dtype):
    return str(dtype).split(".")[1]


def within(result, exact, bound):
    assert np.all(np.abs(double(result) - exact) <= bound), np.max(np.abs(double(result) - exact) / bound)


def block_reference(x, parts, act, dtype):
    """h or y in float64 and how far a result may be; gate and up may be rounded to T between, and h is."""
    w_gate, w_up, w_down, b_gate, b_up, b_down = map(double, parts)
    x, act = double(x), swiglu.Activation(act)
    gate, up = (x @ w.T + (0 if b is None else b) for w, b in ((w_gate, b_gate), (w_up, b_up)))
    none = np.zeros_like(x)
    gate_off, up_off = (linear_bound(x, w, b, none, dtype) for w, b in ((w_gate, b_gate), (w_up, b_up)))
    h = activation(act, gate, up)
    # The steepest of these functions has a slope below 1.13, of relu2 at most 2|g|; a limit makes none steeper.
    slope = np.where(act.gate == "relu2", 2 * (np.abs(gate) + gate_off), 1.13)
    f, u = np.abs(activation(act, gate, np.ones_like(up) * (1 - act.up_offset))), np.abs(up) + abs(act.up_offset)
    through = slope * gate_off * (u + up_off) + f * up_off
    h_off = activation_bound(act, np.abs(gate) + gate_off, np.abs(up) + up_off, dtype) + 2 * through
    if w_down is None:
        return h, h_off
    return h @ w_down.T + (0 if b_down is None else b_down), linear_bound(h, w_down, b_down, h_off, dtype)


# Values.


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("name", FAMILY)
def test_activations_are_within_their_bounds(name, dtype, device):
    gate, up = (3 * tensor(3, 131, dtype=dtype, seed=s) for s in (1, 2))
    act = swiglu.Activation(name)
    exact = activation(act, double(gate), double(up))
    bound = activation_bound(act, double(gate), double(up), name_of(dtype))
    separate = ops.silu_mul(gate, up, activation=name)
    within(separate, exact, bound)
    within(ops.glu(torch.cat([up, gate], -1), name, layout="up-first"), exact, bound)
    # What PyTorch composes is the same function.
    within(_formulas.forward(act, None, gate, up), exact, bound)


@pytest.mark.parametrize("layout", ["gate-first", "up-first", "interleaved", "interleaved-3"])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=name_of)
def test_packed_layouts_have_the_bits_of_separate_tensors(layout, dtype):
    gate, up = tensor(4, 9, dtype=dtype, seed=1), tensor(4, 9, dtype=dtype, seed=2)
    x = _formulas.join(gate, up, layout)
    assert torch.equal(ops.glu(x, layout=layout), ops.silu_mul(gate, up))
    assert all(torch.equal(a, b) for a, b in zip(_formulas.split(x, layout), (gate, up)))


F = torch.nn.functional
#: On a CPU PyTorch's exponentials are its own.
PYTORCHS = {
    "reglu": torch.relu,
    "bilinear": lambda g: g,
    "swiglu": F.silu,
    "glu": torch.sigmoid,
    "geglu": F.gelu,
    "geglu-tanh": lambda g: F.gelu(g, approximate="tanh"),
}


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=name_of)
@pytest.mark.parametrize("name", PYTORCHS)
def test_eager_numerics_have_the_bits_of_pytorch_where_it_has_the_function(name, dtype, device):
    if device == "cpu" and name not in ("reglu", "bilinear"):
        pytest.skip("not run: defined so on CUDA devices alone")
    gate, up = 4 * tensor(128, 513, dtype=dtype, seed=1), tensor(128, 513, dtype=dtype, seed=2)
    found = ops.silu_mul(gate, up, activation=name, numerics="eager")
    expected = PYTORCHS[name](gate) * up
    assert torch.equal(found, expected), f"{(found != expected).sum()} of {found.numel()} differ"


VIEWS = {
    "transposed": lambda t: t.t(),
    "expanded rows": lambda t: t[:1].expand(t.shape),
    "expanded columns": lambda t: t[:, :1].expand(t.shape),
    "every other": lambda t: t[::2, 1::2],
    "no rows": lambda t: t[:0],
    "no features": lambda t: t[:, :0],
    "one row": lambda t: t[0],
    "three dimensions": lambda t: t.reshape(2, 3, -1).transpose(0, 1),
    "negated": lambda t: torch._neg_view(t),
    "flipped": lambda t: t.flip(1),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_any_strides(view, device):
    gate, up = view(tensor(6, 7, seed=1)), view(tensor(6, 7, seed=2))
    expected = ops.silu_mul(gate.contiguous(), up.contiguous())
    assert torch.equal(ops.silu_mul(gate, up), expected)
    assert torch.equal(call("silu_mul", gate, up), expected)
    out = torch.full((*gate.shape[:-1], 2 * gate.shape[-1]), 7.0, device=device)[..., ::2]
    assert ops.silu_mul(gate, up, out=out) is out and torch.equal(out, expected)


def test_an_output_may_be_an_input():
    x = tensor(5, 8)
    expected = ops.glu(x.clone())
    ops.glu(x, out=x[:, 1:5])
    assert torch.equal(x[:, 1:5], expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("m, hidden, intermediate", [(3, 17, 31), (1, 8, 24), (0, 5, 7)])
@pytest.mark.parametrize("bias", [False, True])
def test_layers_are_within_their_bounds(m, hidden, intermediate, bias, dtype, device):
    x = tensor(m, hidden, dtype=dtype, seed=1)
    w_gate, w_up = (tensor(intermediate, hidden, dtype=dtype, seed=s) for s in (2, 3))
    w_down = tensor(hidden, intermediate, dtype=dtype, seed=4)
    biases = [tensor(n, dtype=dtype, seed=5 + n) if bias else None for n in (intermediate, intermediate, hidden)]
    for act in ("swiglu", "geglu-tanh", "clamped-swiglu"):
        parts = (w_gate, w_up, None, *biases[:2], None)
        exact, bound = block_reference(x, parts, act, name_of(dtype))
        for numerics in (None, "fused", "pre_round"):
            h = ops.gated_linear(x, w_gate, w_up, *biases[:2], activation=act, numerics=numerics)
            within(h, exact, bound)
        exact, bound = block_reference(x, (w_gate, w_up, w_down, *biases), act, name_of(dtype))
        within(ops.mlp(x, w_gate, w_up, w_down, biases=tuple(biases), activation=act), exact, bound)


@pytest.mark.parametrize("layout", ["gate-first", "up-first", "interleaved"])
def test_packed_weights(layout):
    x, w_gate, w_up = tensor(3, 5), tensor(7, 5, seed=1), tensor(7, 5, seed=2)
    packed = _formulas.join(w_gate.t(), w_up.t(), layout).t()
    bias = _formulas.join(tensor(7, seed=3), tensor(7, seed=4), layout)
    h = ops.gated_linear(x, packed, b_gate=bias, layout=layout)
    expected = ops.gated_linear(x, w_gate, w_up, tensor(7, seed=3), tensor(7, seed=4))
    torch.testing.assert_close(h, expected, rtol=1e-5, atol=1e-5)


# Registration.


def samples(dtype, grad):
    def t(*shape):
        return tensor(*shape, dtype=dtype, grad=grad)

    return {
        "silu_mul": [(t(3, 5), t(3, 5)), (t(2, 3, 4), t(2, 3, 4), "geglu", "eager"), (t(0, 5), t(0, 5))],
        "glu": [(t(3, 6),), (t(3, 8), "clamped-swiglu", "interleaved-2"), (t(8), "swiglu", "up-first", "fused")],
        "gated_linear": [
            (t(3, 4), t(7, 4), t(7, 4)),
            (t(2, 3, 4), t(7, 4), t(7, 4), t(7), None, "geglu"),
            (t(3, 4), t(6, 4), None, t(6), None, "swiglu", "interleaved"),
        ],
        "mlp": [
            (t(3, 4), t(7, 4), t(7, 4), t(5, 7)),
            (t(3, 4), t(7, 4), t(7, 4), t(4, 7), t(7), t(7), t(4), "reglu2"),
            (t(3, 4), t(6, 4), None, t(4, 3), None, None, t(4)),
        ],
    }


CASES = [(name, i) for name, all_of in samples(torch.float32, False).items() for i in range(len(all_of))]
DYNAMIC = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("name, i", CASES)
def test_opcheck(name, i, dtype):
    torch.library.opcheck(getattr(torch.ops.swiglu, name).default, filled(name, samples(dtype, True)[name][i]), test_utils=DYNAMIC)


@pytest.mark.parametrize("name, i", CASES)
def test_opcheck_of_out(name, i):
    args = filled(name, samples(torch.float32, False)[name][i])
    out = torch.empty_like(getattr(torch.ops.swiglu, name)(*args))
    torch.library.opcheck(getattr(torch.ops.swiglu, name).out, args, {"out": out}, test_utils=DYNAMIC)
    getattr(torch.ops.swiglu, name).out(*args, out=out)
    assert torch.equal(out, getattr(torch.ops.swiglu, name)(*args))


def test_opcheck_of_gradients():
    grad, gate, up = (tensor(3, 6, seed=s) for s in (1, 2, 3))
    torch.library.opcheck(torch.ops.swiglu.silu_mul_backward.default, (grad, gate, up, "swiglu", None))
    torch.library.opcheck(torch.ops.swiglu.glu_backward.default, (grad[:, :3], gate, "swiglu", "up-first", None))


# What compiled training calls, where a CPU has it composed.


@pytest.mark.parametrize("i", range(len(samples(torch.float32, False)["mlp"])))
def test_operators_of_compiled_training(i):
    saving, backward = torch.ops.swiglu.mlp_saving, torch.ops.swiglu.mlp_saving_backward
    for dtype in (torch.float32, torch.bfloat16):
        args = filled("mlp", samples(dtype, True)["mlp"][i])[:8]
        torch.library.opcheck(saving.default, args, test_utils=DYNAMIC)
    *tensors, activation = filled("mlp", samples(torch.float64, True)["mlp"][i])[:8]
    y, kept = saving(*tensors, activation)
    assert y.requires_grad and not kept.requires_grad
    assert torch.equal(y, torch.ops.swiglu.mlp(*tensors, activation, "gate-first", None))
    plain = [t if t is None else t.detach() for t in tensors]
    given = torch.randn_like(y.detach()), *plain[1:4], kept, activation
    torch.library.opcheck(backward.default, given, test_utils=DYNAMIC)
    leaves = [t for t in tensors if t is not None]
    assert torch.autograd.gradcheck(lambda *_: saving(*tensors, activation)[0], leaves)
    (grad,) = torch.autograd.grad(y.sum(), leaves[0], create_graph=True)
    with pytest.raises(swiglu.SwigluError, match="second derivative"):
        grad.sum().backward()
    # Rows of a batch, and weights with a batch of their own.
    batch = torch.stack([plain[0], 2 * plain[0]])
    for made, expected in zip(torch.vmap(lambda x: saving(x, *plain[1:], activation))(batch), saving(batch, *plain[1:], activation)):
        torch.testing.assert_close(made, expected)
    grads = torch.stack([given[0], 2 * given[0], -given[0]])
    one, *rest = given
    for batched, made in [
        (lambda i: grads[i], torch.vmap(lambda g: backward(g, *rest))(grads)),
        (lambda i: one, torch.vmap(lambda w: backward(one, *rest[:2], w, *rest[3:]))(torch.stack([rest[2]] * 3))),
    ]:
        for i in range(3):
            torch.testing.assert_close(made[i], backward(batched(i), *rest))
    with pytest.raises(ValueError, match="grad: expected"):
        backward(one.to("meta")[..., :-1], *(t.to("meta") if isinstance(t, torch.Tensor) else t for t in rest))
    downs = torch.stack([plain[3], 2 * plain[3]])
    made, _ = torch.vmap(lambda w: saving(*plain[:3], w, *plain[4:], activation))(downs)
    torch.testing.assert_close(made[1], saving(*plain[:3], downs[1], *plain[4:], activation)[0])


def test_compiled_training_without_features():
    leaves = [tensor(*s, grad=True) for s in [(3, 4), (0, 4), (0, 4), (4, 0)]]
    y = torch.ops.swiglu.mlp_saving(*leaves, None, None, None, "swiglu")[0]
    assert torch.equal(y, torch.zeros_like(y))
    assert [g.shape for g in torch.autograd.grad(y.sum(), leaves)] == [t.shape for t in leaves]


@pytest.mark.parametrize("save", ["preact", "input"])
@pytest.mark.parametrize(("hidden", "intermediate"), [(4, 0), (0, 5), (0, 0)])
def test_gradients_without_features(hidden, intermediate, save):
    shapes = [(2, 3, hidden), (intermediate, hidden), (intermediate, hidden), (6, intermediate)]
    leaves = [tensor(*s, grad=True) for s in shapes]
    packed = tensor(2 * intermediate, hidden, grad=True)
    for call, inputs in (
        (lambda: ops.mlp(*leaves, save=save), leaves),
        (lambda: ops.gated_linear(*leaves[:3], save=save), leaves[:3]),
        (lambda: ops.gated_linear(leaves[0], packed, save=save), [leaves[0], packed]),
    ):
        result = call()
        assert not result.any() and result.shape[:-1] == (2, 3)
        grads = torch.autograd.grad(result.sum(), inputs)
        assert [g.shape for g in grads] == [t.shape for t in inputs] and not any(g.any() for g in grads)


def test_subsets_of_gradients_of_compiled_training():
    tensors = [tensor(*s, dtype=torch.float64, seed=i) for i, s in enumerate([(3, 4), (5, 4), (5, 4), (4, 5), (5,), (5,), (4,)])]
    for subset in range(1, 128):
        leaves = [t.detach().requires_grad_(bool(subset >> i & 1)) for i, t in enumerate(tensors)]
        wanted = [t for t in leaves if t.requires_grad]
        found = torch.autograd.grad(torch.ops.swiglu.mlp_saving(*leaves, "swiglu")[0].sum(), wanted)
        x, w_gate, w_up, w_down, *biases = leaves
        expected = torch.autograd.grad(ops.mlp(x, w_gate, w_up, w_down, biases=tuple(biases)).sum(), wanted)
        for a, b in zip(found, expected):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_an_output_with_a_gradient_is_refused():
    gate, up = tensor(2, 3, grad=True), tensor(2, 3)
    with pytest.raises(swiglu.SwigluError, match="there is no gradient"):
        ops.silu_mul(gate, up, out=torch.empty_like(up))
    with torch.no_grad():
        ops.silu_mul(gate, up, out=torch.empty_like(up))


@pytest.mark.parametrize("values", [True, False])
def test_wrong_arguments_are_refused_alike_with_and_without_values(values, device):
    def t(*shape, dtype=torch.float32):
        return torch.zeros(shape, dtype=dtype, device=device if values else "meta")

    for refused, text in [
        (lambda: call("silu_mul", t(2, 3), t(3, 2)), r"up: expected \[2, 3\], given \[3, 2\]"),
        (lambda: call("glu", t(2, 3)), "even number"),
        (lambda: call("glu", t(2, 6), "swiglu", "interleaved-2"), "multiple of 4"),
        (lambda: call("gated_linear", t(2, 3), t(5, 4), t(5, 4)), r"x: expected \[..., 4\], given \[2, 3\]"),
        (lambda: call("gated_linear", t(2, 4), t(5, 4), t(6, 4)), r"w_up: expected \[5, 4\], given \[6, 4\]"),
        (lambda: call("gated_linear", t(2, 4), t(5, 4), t(5, 4), t(4)), r"b_gate: expected \[5\], given \[4\]"),
        (lambda: call("mlp", t(2, 4), t(5, 4), t(5, 4), t(4, 6)), r"w_down: expected \[features, 5\], given \[4, 6\]"),
        (lambda: call("silu_mul", t(2, 3), t(2, 3), out=t(3, 2)), r"out: expected \[2, 3\], given \[3, 2\]"),
    ]:
        with pytest.raises(ValueError, match=text) as caught:
            refused()
        assert caught.value.kind == "shape"
    for refused, kind in [
        (lambda: call("silu_mul", t(2, 3), t(2, 3, dtype=torch.float16)), "dtype"),
        (lambda: call("silu_mul", t(2, 3, dtype=torch.int32), t(2, 3, dtype=torch.int32)), "dtype"),
        (lambda: call("glu", t(2, 4), "swiglu", "sideways"), "argument"),
    ]:
        with pytest.raises(RuntimeError) as caught:
            refused()
        assert isinstance(caught.value, swiglu.SwigluError) and caught.value.kind == kind


# Gradients.


@pytest.mark.parametrize("name", FAMILY)
def test_gradcheck_of_activations(name):
    gate, up = tensor(3, 5, dtype=torch.float64, grad=True, seed=1), tensor(3, 5, dtype=torch.float64, grad=True, seed=2)
    assert torch.autograd.gradcheck(lambda g, u: ops.silu_mul(g, u, activation=name), (gate, up))
    x = tensor(2, 12, dtype=torch.float64, grad=True)
    for layout in ("gate-first", "up-first", "interleaved", "interleaved-3"):
        assert torch.autograd.gradcheck(lambda x: ops.glu(x, name, layout=layout), (x,))


@pytest.mark.parametrize("save", ["preact", "input"])
def test_gradcheck_of_layers(save):
    def t(*shape, seed):
        return tensor(*shape, dtype=torch.float64, grad=True, seed=seed)

    x, w_gate, w_up, w_down = t(3, 4, seed=1), t(5, 4, seed=2), t(5, 4, seed=3), t(4, 5, seed=4)
    biases = t(5, seed=5), t(5, seed=6), t(4, seed=7)

    def block(x, a, b, c, *biases):
        return ops.mlp(x, a, b, c, biases=biases, save=save)

    assert torch.autograd.gradcheck(block, (x, w_gate, w_up, w_down, *biases))
    both, bias = t(6, 4, seed=8), t(6, seed=9)
    for layout in ("gate-first", "interleaved"):
        assert torch.autograd.gradcheck(
            lambda x, w, b: ops.gated_linear(x, w, b_gate=b, layout=layout, save=save),
            (x, both, bias),
        )


@pytest.mark.parametrize("save", ["preact", "input"])
def test_every_subset_of_gradients(save):
    names = ("x", "w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down")
    shapes = ((3, 4), (5, 4), (5, 4), (4, 5), (5,), (5,), (4,))

    def gradients(wanted):
        t = {n: tensor(*s, dtype=torch.float64, grad=n in wanted, seed=i) for i, (n, s) in enumerate(zip(names, shapes))}
        before = {n: v.detach().clone() for n, v in t.items()}
        biases = (t["b_gate"], t["b_up"], t["b_down"])
        y = ops.mlp(t["x"], t["w_gate"], t["w_up"], t["w_down"], biases=biases, save=save)
        if wanted:
            y.sum().backward()
        assert all(torch.equal(before[n], v) for n, v in t.items())
        return {n: v.grad for n, v in t.items()}

    all_of = gradients(names)
    for count in range(len(names) + 1):
        for wanted in itertools.combinations(names, count):
            found = gradients(wanted)
            for n in names:
                assert (found[n] is None) == (n not in wanted)
                if n in wanted:
                    torch.testing.assert_close(found[n], all_of[n], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_gradients_of_any_strides(dtype, device):
    """Zero-stride, transposed and expanded gradients; nothing is written that was given."""
    grads = {
        "expanded": lambda: torch.ones((), dtype=dtype, device=device).expand(6, 7),
        "row": lambda: tensor(1, 7, dtype=dtype).expand(6, 7),
        "transposed": lambda: tensor(7, 6, dtype=dtype).t(),
        "negated": lambda: torch._neg_view(tensor(6, 7, dtype=dtype)),
    }
    for make in grads.values():
        gate, up = (tensor(6, 7, dtype=dtype, grad=True, seed=s) for s in (1, 2))
        before = gate.detach().clone(), up.detach().clone()
        grad = make()
        dense = grad.resolve_neg().contiguous()
        h = ops.silu_mul(gate, up)
        h.backward(grad, retain_graph=True)
        first = gate.grad.clone(), up.grad.clone()
        gate.grad = up.grad = None
        h.backward(dense)
        assert torch.equal(first[0], gate.grad) and torch.equal(first[1], up.grad)
        assert torch.equal(before[0], gate) and torch.equal(before[1], up) and torch.equal(grad, dense)
        both = torch.cat((before[0], before[1]), -1).requires_grad_()
        ops.glu(both).backward(grad)
        assert torch.equal(both.grad, torch.cat(first, -1))
        pairs = torch.stack(before, -1).flatten(-2).requires_grad_()
        ops.glu(pairs, layout="interleaved-1").backward(grad)
        assert torch.equal(pairs.grad, torch.stack(first, -1).flatten(-2))
        # Elsewhere backward passes are on a thread of their own.
        assert device != "cpu" or ops.explain_last().way == "native cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("name", FAMILY)
def test_gradients_are_within_bounds_of_float64(name, dtype, device):
    """Each gradient is a product of at most 12 factors and terms computed in float32, and rounded once to T.

    Terms cancel where a derivative passes through 0: errors are relative to their sum of magnitudes, at most
    |dh| (1 + |g| + g^2) (|u| + offset) for each of these functions.
    """
    act = swiglu.Activation(name)
    gate, up, grad = (2 * tensor(4, 65, dtype=dtype, seed=s) for s in (1, 2, 3))
    # Beside a limit the derivative jumps: a gate there could be on either side in float32.
    exact = _formulas.backward(act, None, *(t.cpu().double() for t in (grad, gate, up)))
    ours = torch.ops.swiglu.silu_mul_backward(grad, gate, up, name, None)
    g, u, d = (np.abs(double(t)) for t in (gate, up, grad))
    unit, single = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[name_of(dtype)], 2.0**-24
    fast = 2.0**-16 if dtype != torch.float32 else 0.0
    magnitude = d * (1 + g + g**2) * (u + abs(act.up_offset) + 1)
    bound = (24 * single * (1 + g**2) + fast) * magnitude
    for mine, right in zip(ours, exact):
        within(mine, double(right), bound + unit * np.abs(double(right)) + 2.0**-24)


def test_a_second_derivative_is_a_clear_error():
    gate, up = tensor(2, 3, dtype=torch.float64, grad=True), tensor(2, 3, dtype=torch.float64, grad=True, seed=1)
    (d_gate,) = torch.autograd.grad(ops.silu_mul(gate, up).sum(), gate, create_graph=True)
    with pytest.raises(swiglu.SwigluError, match="second derivative"):
        d_gate.sum().backward()


@pytest.mark.parametrize("save", ["preact", "input"])
def test_checkpointing_gives_the_same(save):
    from torch.utils.checkpoint import checkpoint

    def run(wrap):
        x = tensor(3, 4, grad=True)
        w = [tensor(7, 4, grad=True, seed=1), tensor(7, 4, grad=True, seed=2), tensor(4, 7, grad=True, seed=3)]
        block = lambda x: ops.mlp(x, *w, save=save)
        (checkpoint(block, x, use_reentrant=False) if wrap else block(x)).sum().backward()
        return [t.grad for t in (x, *w)]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True)))


# The fast door.


def test_explain_last_says_which_way_and_why(device):
    gate = tensor(2, 3)
    ops.silu_mul(gate, gate)
    assert ops.explain_last().way == f"native {device}"
    ops.silu_mul(gate.double(), gate.double())
    assert ops.explain_last().way == "composed" and "float64" in ops.explain_last().reason
    ops.mlp(gate, tensor(4, 3), tensor(4, 3), tensor(3, 4))
    if device == "cpu":
        assert ops.explain_last().way == "composed" and "freeze" in str(ops.explain_last())
    else:
        assert ops.explain_last().way == "native cuda", ops.explain_last()


def test_what_the_dispatcher_does_is_not_passed_by(device):
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    from swiglu.torch import _door

    gate, up = tensor(2, 3), tensor(2, 3, seed=1)
    assert _door.nothing_in_force() and _door.plain(gate, torch.nn.Parameter(up))
    seen = []

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Dispatch():
        ops.silu_mul(gate, up)
    assert seen == ["swiglu.silu_mul.default"]

    class Function(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append("function")
            return func(*args, **(kwargs or {}))

    with Function():
        ops.silu_mul(gate, up)
    assert "function" in seen

    class Sub(torch.Tensor):
        pass

    assert not _door.plain(gate.as_subclass(Sub)) and not _door.plain(torch._neg_view(gate))
    assert isinstance(ops.silu_mul(gate.as_subclass(Sub), up), Sub)
    with torch.autocast(device, torch.bfloat16):
        assert not _door.nothing_in_force()
    with torch.autograd.forward_ad.dual_level():
        assert not _door.nothing_in_force()
        dual = torch.autograd.forward_ad.make_dual(gate.clone().requires_grad_(), up)
        with pytest.raises((RuntimeError, NotImplementedError)):
            ops.silu_mul(dual, up)
    with torch.inference_mode():
        inference = torch.empty(2, 3)
        assert _door.plain(inference)
    assert not _door.plain(torch.empty(2, 3, device="meta"))
    traced = torch.jit.trace(lambda g, u: ops.silu_mul(g, u), (gate, up))
    assert torch.equal(traced(up, gate), ops.silu_mul(up, gate))


@pytest.mark.parametrize("how", [{}, {"packed": True}, {"save": "input"}, {"numerics": "eager"}])
def test_a_graph_of_fx_has_calls_as_nodes(how):
    layers = swiglu.nn.MLP(8, 12, bias=True, **how), swiglu.nn.GLU(), swiglu.nn.GatedLinear(4, 6, **how)
    module = torch.nn.Sequential(*layers).to(Here.device)
    traced = torch.fx.symbolic_trace(module)
    called = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert called == [ops.mlp, ops.glu, ops.gated_linear]
    x = tensor(3, 8)
    assert torch.equal(traced(x), module(x))
    wanted = list(module.parameters())
    grads = (torch.autograd.grad(m(x).sum(), wanted) for m in (traced, module))
    assert all(torch.equal(a, b) for a, b in zip(*grads))

    def function(gate, up):
        return ops.silu_mul(gate, up)

    gate, up = tensor(3, 8), tensor(3, 8, seed=1)
    assert torch.equal(torch.fx.symbolic_trace(function)(gate, up), ops.silu_mul(gate, up))


# Transforms.


@pytest.mark.skipif(shutil.which("g++") is None, reason="not run: no g++")
def test_compiled_code_that_is_cpp_calls_operators():
    if Here.device != "cpu":
        pytest.skip("not run: it is compiled for a CPU")
    torch._dynamo.reset()
    x = tensor(3, 8)
    both = torch.compile(lambda x: ops.glu(ops.silu_mul(x, x)), fullgraph=True, options={"cpp_wrapper": True})
    torch.testing.assert_close(both(x), ops.glu(ops.silu_mul(x, x)))


def test_compile_has_one_graph_for_changing_tokens():
    import torch._dynamo.testing

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    weights = [tensor(7, 4, grad=True, seed=1), tensor(7, 4, grad=True, seed=2), tensor(4, 7, grad=True, seed=3)]

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def block(x):
        return ops.mlp(x, *weights) + ops.glu(ops.gated_linear(x, weights[0]), layout="interleaved").sum()

    eager = lambda x: ops.mlp(x, *weights) + ops.glu(ops.gated_linear(x, weights[0]), layout="interleaved").sum()
    weights[0] = tensor(8, 4, grad=True, seed=1)
    weights[1] = tensor(8, 4, grad=True, seed=2)
    weights[2] = tensor(4, 8, grad=True, seed=3)
    for m in (3, 5, 9, 17):
        x = tensor(m, 4, grad=True)
        torch.testing.assert_close(block(x), eager(x))
        found = torch.autograd.grad(block(x).sum(), [x, *weights])
        expected = torch.autograd.grad(eager(x).sum(), [x, *weights])
        for a, b in zip(found, expected):
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 1


def test_compile_of_out_and_of_inference():
    import torch._dynamo.testing

    torch._dynamo.reset()
    w = tensor(7, 4, seed=1), tensor(7, 4, seed=2), tensor(4, 7, seed=3)

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def into(x, out):
        return ops.mlp(x, *w, out=out)

    with torch.no_grad():
        for m in (2, 3):
            x = tensor(m, 4)
            out = torch.zeros_like(x)
            into(x, out)
            assert torch.equal(out, ops.mlp(x, *w))


def test_inductor(tmp_path, monkeypatch):
    import shutil

    # What an operator of other arguments was compiled to is kept under the same key.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    if not any(map(shutil.which, ("g++", "c++", "clang++"))):
        pytest.skip("not run: no C++ compiler for Inductor")
    import torch._dynamo.testing

    torch._dynamo.reset()
    compiled = torch.compile(lambda g, u: ops.silu_mul(g + 1, u) * 2, fullgraph=True, dynamic=True)
    for m in (3, 5):
        gate, up = tensor(m, 8), tensor(m, 8, seed=m)
        torch.testing.assert_close(compiled(gate, up), ops.silu_mul(gate + 1, up) * 2)
    # Arguments that are None between tensors.
    packed, down, bias = tensor(12, 8, seed=1), tensor(8, 6, seed=2), tensor(12, seed=3)
    for layout in ("gate-first", "interleaved"):
        for b in (None, bias):
            block = lambda x: ops.mlp(x, packed, None, down, biases=(b, None, None), layout=layout, save="input")
            torch.testing.assert_close(torch.compile(block, fullgraph=True)(up), block(up))


def test_compiled_code_is_told_from_what_else_is_traced():
    def told(x):
        return x + 1 if _door.compiling() else x + 2

    class Module(torch.nn.Module):
        def forward(self, x):
            return told(x)

    zero = torch.zeros(1)
    assert told(zero) == 2 and torch.compile(told, fullgraph=True, backend="eager")(zero) == 1
    for transform in (torch.vmap, lambda f: torch.func.grad(lambda x: (x * f(x).detach()).sum())):
        assert torch.compile(transform(told), fullgraph=True, backend="eager")(zero) == 2
    # PyTorch 2.6 says to nobody that it exports.
    if hasattr(torch.compiler, "_is_exporting_flag"):
        assert torch.export.export(Module(), (zero,)).module()(zero) == 2


def test_export_keeps_the_operator():
    class Block(torch.nn.Module):
        def forward(self, gate, up):
            return ops.silu_mul(gate, up)

    exported = torch.export.export(Block(), (tensor(2, 3), tensor(2, 3)))
    assert any("swiglu.silu_mul" in str(node.target) for node in exported.graph.nodes)


def test_autocast_takes_linear_maps_and_leaves_the_activation(device):
    x, w_gate, w_up, w_down = tensor(3, 4), tensor(7, 4, seed=1), tensor(7, 4, seed=2), tensor(4, 7, seed=3)
    for save in ("preact", "input"):
        for grad in (False, True):
            leaves = [t.clone().requires_grad_(grad) for t in (x, w_gate, w_up, w_down)]
            with torch.autocast(device, torch.bfloat16):
                y = ops.mlp(*leaves, save=save)
                h = ops.gated_linear(*leaves[:3], save=save)
                assert ops.silu_mul(leaves[0], leaves[0]).dtype == torch.float32
                mixed = ops.silu_mul(leaves[0], leaves[0].bfloat16())
            assert y.dtype == h.dtype == torch.bfloat16 and mixed.dtype == torch.float32
            halves = [t.bfloat16() for t in (x, w_gate, w_up, w_down)]
            within(y, *block_reference(halves[0], (*halves[1:], None, None, None), "swiglu", "bfloat16"))
            if grad:
                y.sum().backward()
                assert all(t.grad.dtype == torch.float32 for t in leaves)
    with torch.autocast(device, torch.bfloat16):
        assert ops.mlp(*(t.double() for t in (x, w_gate, w_up, w_down))).dtype == torch.float64


def test_vmap():
    gate, up = tensor(2, 3, 4), tensor(2, 3, 4, seed=1)
    expected = ops.silu_mul(gate, up)
    assert torch.equal(torch.vmap(ops.silu_mul)(gate, up), expected)
    assert torch.equal(torch.vmap(ops.silu_mul, in_dims=(1, 1), out_dims=1)(gate, up), expected)
    assert torch.equal(torch.vmap(ops.silu_mul, in_dims=(0, None))(gate, up[0]), ops.silu_mul(gate, up[0].expand(2, 3, 4)))
    assert torch.equal(torch.vmap(ops.glu)(gate), ops.glu(gate))
    assert torch.equal(torch.vmap(torch.vmap(ops.glu))(gate), ops.glu(gate))
    w = tensor(6, 4, seed=2), tensor(6, 4, seed=3), tensor(4, 6, seed=4)
    torch.testing.assert_close(torch.vmap(lambda x: ops.mlp(x, *w))(gate), ops.mlp(gate, *w))
    many = torch.stack([w[0], w[1]])
    each = torch.vmap(lambda x, a: ops.gated_linear(x, a, w[1]))(gate, many)
    torch.testing.assert_close(each, torch.stack([ops.gated_linear(gate[i], many[i], w[1]) for i in range(2)]))


def test_gradients_under_vmap_and_grad_transforms():
    gate, up = tensor(5, 4, dtype=torch.float64), tensor(5, 4, dtype=torch.float64, seed=1)
    per_row = torch.vmap(torch.func.grad(lambda g, u: ops.silu_mul(g, u).sum()))(gate, up)
    leaf = gate.clone().requires_grad_()
    ops.silu_mul(leaf, up).sum().backward()
    torch.testing.assert_close(per_row, leaf.grad)
    w = [tensor(6, 4, dtype=torch.float64, seed=s) for s in (2, 3)] + [tensor(4, 6, dtype=torch.float64, seed=4)]
    found = torch.func.grad(lambda x: ops.mlp(x, *w).sum())(gate)
    leaf.grad = None
    ops.mlp(leaf, *w).sum().backward()
    torch.testing.assert_close(found, leaf.grad)


def test_threads_get_what_one_gets():
    inputs = [tensor(n, 64, seed=n) for n in range(1, 17)]
    expected = [ops.silu_mul(x, x) for x in inputs]
    results = [None] * len(inputs)

    def work(i):
        leaf = inputs[i].clone().requires_grad_()
        ops.silu_mul(leaf, leaf).sum().backward()
        results[i] = ops.silu_mul(inputs[i], inputs[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert all(torch.equal(a, b) for a, b in zip(results, expected))


def test_tensors_through_the_package_itself():
    gate = tensor(2, 4)
    assert torch.equal(swiglu.silu_mul(gate, gate), ops.silu_mul(gate, gate))
    assert torch.equal(swiglu.glu(gate, layout="interleaved"), ops.glu(gate, layout="interleaved"))


def test_gradients_in_batches_and_under_modes(device):
    """A backward pass may be seen by more than its forward pass was."""
    gate, up = tensor(3, 8, grad=True), tensor(3, 8, grad=True, seed=1)
    h = ops.silu_mul(gate, up)
    grads = torch.stack([tensor(3, 8, seed=s) for s in (2, 3)])
    both = torch.autograd.grad(h, [gate, up], grads, is_grads_batched=True, retain_graph=True)
    for i, dh in enumerate(grads):
        for ours, one in zip(both, torch.autograd.grad(h, [gate, up], dh, retain_graph=True)):
            torch.testing.assert_close(ours[i], one, rtol=1e-6, atol=1e-6)
    block = swiglu.nn.MLP(8, 6, device=device)
    jacobian = torch.autograd.functional.jacobian
    found, slow = (jacobian(block, gate.detach(), vectorize=v) for v in (True, False))
    torch.testing.assert_close(found, slow, rtol=1e-5, atol=1e-6)

    from torch.fx.experimental.proxy_tensor import make_fx

    # Blocks whose backward pass is one call, too.
    for save in ("preact", "input"):
        half = swiglu.nn.MLP(8, 6, bias=True, save=save, device=device, dtype=torch.float16)
        x, parameters = gate.detach().half().requires_grad_(), list(half.parameters())
        y = half(x)
        found, slow = (jacobian(half, x.detach(), vectorize=v) for v in (True, False))
        torch.testing.assert_close(found, slow, rtol=1e-2, atol=1e-3)
        dys = torch.stack([tensor(3, 8, dtype=torch.float16, seed=s) for s in (2, 3)])
        both = torch.autograd.grad(y, [x, *parameters], dys, is_grads_batched=True, retain_graph=True)
        for i, dy in enumerate(dys):
            for ours, one in zip(both, torch.autograd.grad(y, [x, *parameters], dy, retain_graph=True)):
                torch.testing.assert_close(ours[i], one, rtol=1e-2, atol=1e-2)
        traced = make_fx(lambda dy: torch.autograd.grad(y, [x, *parameters], dy, retain_graph=True))(torch.ones_like(y))
        for ours, one in zip(traced(dys[1]), torch.autograd.grad(y, [x, *parameters], dys[1], retain_graph=True)):
            torch.testing.assert_close(ours, one, rtol=1e-2, atol=1e-2)
        zero = torch._efficientzerotensor(y.shape, device=device, dtype=torch.float16)
        assert not any(t.any() for t in torch.autograd.grad(y, [x, *parameters], zero, retain_graph=True))
    traced = make_fx(lambda dh: torch.autograd.grad(h, gate, dh, retain_graph=True)[0])(torch.ones_like(h))
    (expected,) = torch.autograd.grad(h, gate, grads[1], retain_graph=True)
    torch.testing.assert_close(traced(grads[1]), expected, rtol=0, atol=0)
    zero = torch._efficientzerotensor(h.shape, device=device)
    assert not torch.autograd.grad(h, gate, zero, retain_graph=True)[0].any()

    def negated(t):
        return torch.complex(t, -t).conj().imag

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, negated):
        h = ops.silu_mul(gate, up)
    (theirs,) = torch.autograd.grad((torch.nn.functional.silu(gate) * up).sum(), gate)
    torch.testing.assert_close(torch.autograd.grad(h.sum(), gate)[0], theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["reglu", "reglu2"])
def test_what_relu_cuts_off_has_no_gradient(name):
    gate = torch.tensor([-1.0, -1.0, 2.0], requires_grad=True)
    up, dh = torch.tensor([200.0, float("inf"), 3.0]), torch.tensor([3e38, 1.0, 1.0])
    ours = torch.autograd.grad(ops.silu_mul(gate, up, activation=name), gate, dh)[0]
    assert ours.tolist() == [0, 0, {"reglu": 3, "reglu2": 12}[name]]
