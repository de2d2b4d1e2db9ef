"""What PyTorch's users get wrong: errors with a kind, what was given and what was expected, none in others' words."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys

import pytest

torch = pytest.importorskip("torch", reason="not run: no PyTorch")
np = pytest.importorskip("numpy", reason="not run: no numpy")

import swiglu
import swiglu.hf
import swiglu.nn
import swiglu.torch as ops
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F


def weights(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def x(width=8):
    return weights(3, width)


def block():
    return weights(12, 8), weights(12, 8), weights(8, 12)


def refused(call, kind, *texts):
    with pytest.raises((swiglu.SwigluError, swiglu.ShapeError)) as caught:
        call()
    error = caught.value
    assert error.kind == kind and all(text in str(error) for text in texts), (error.kind, str(error))
    assert isinstance(error, ValueError) == (kind == "shape")
    return error


WRONG_KINDS = {
    "silu_mul": (lambda: ops.silu_mul(np.ones(4), np.ones(4)), "gate: expected a torch.Tensor, given a numpy.ndarray"),
    "up": (lambda: ops.silu_mul(x(), None), "up: expected a torch.Tensor, given None"),
    "mixed": (lambda: swiglu.silu_mul(x().numpy(), x()), "gate: expected a torch.Tensor, given a numpy.ndarray"),
    "glu": (lambda: ops.glu([1.0, 2.0]), "x: expected a torch.Tensor, given a list"),
    "out": (lambda: ops.silu_mul(x(), x(), out=np.ones((3, 8))), "out: expected a torch.Tensor"),
    "mlp": (lambda: ops.mlp(x(), *block()[:2], None), "w_down: expected a torch.Tensor, given None"),
    "gated_linear": (lambda: ops.gated_linear(x(), None), "w_gate: expected a torch.Tensor, given None"),
    "module": (lambda: swiglu.nn.MLP(8, 12)(np.ones((3, 8))), "x: expected a torch.Tensor, given a numpy.ndarray"),
    "frozen": (lambda: swiglu.nn.MLP(8, 12).freeze()(np.ones((3, 8))), "x: expected a torch.Tensor"),
    "biases": (lambda: ops.mlp(x(), *block(), biases=(None, None)), "biases: expected", "given 2 of them"),
    "bias": (lambda: ops.mlp(x(), *block(), biases=weights(3)), "biases: expected", "given a torch.Tensor"),
    "activation": (lambda: ops.silu_mul(x(), x(), activation=nn.SiLU()), "unknown activation `SiLU()`", "choose one of"),
    "numerics": (lambda: ops.silu_mul(x(), x(), numerics=3), "numerics: expected a name, given 3"),
    "numerics of float64": (lambda: ops.silu_mul(x().double(), x().double(), numerics="no"), "unknown rounding `no`"),
    "layout": (lambda: ops.glu(x(), layout=None), "unknown layout `None`", "gate-first"),
    "layout of nothing": (lambda: ops.mlp(x(), *block(), layout="all"), "unknown layout `all`"),
    "layout of separate weights": (lambda: ops.gated_linear(x(), *block()[:2], layout=1), "unknown layout `1`"),
    "save": (lambda: ops.mlp(x(), *block(), save="all"), "unknown save `all`; choose one of: preact, input"),
    "nn save": (lambda: swiglu.nn.MLP(8, 12, save="all"), "unknown save `all`"),
    "nn numerics": (lambda: swiglu.nn.MLP(8, 12, numerics="all"), "unknown rounding `all`"),
    "nn activation": (lambda: swiglu.nn.MLP(8, 12, activation=F.silu), "unknown activation"),
    "nn layout": (lambda: swiglu.nn.GLU(layout="all"), "unknown layout `all`"),
    "nn hidden": (lambda: swiglu.nn.MLP(0, 12), "hidden: expected a whole number from 1 on, given 0"),
    "nn packed": (lambda: swiglu.nn.MLP(8, 12, packed="no"), "packed: expected True or False, given 'no'"),
    "nn bias": (lambda: swiglu.nn.GatedLinear(8, 12, bias="no"), "bias: expected True or False, given 'no'"),
    "nn intermediate": (lambda: swiglu.nn.GatedLinear(8, 12.0), "intermediate: expected", "given 12.0"),
    "patch": (lambda: swiglu.patch(None), "model: expected a torch.nn.Module, given None"),
    "patch level": (lambda: swiglu.patch(nn.Linear(2, 2), level="all"), "unknown level `all`; choose one of: block, gated"),
    "patch save": (lambda: swiglu.patch(nn.Linear(2, 2), save="all"), "unknown save `all`"),
    "patch numerics": (lambda: swiglu.patch(nn.Linear(2, 2), numerics="all"), "unknown rounding `all`"),
    "unpatch": (lambda: swiglu.unpatch("llama"), "model: expected a torch.nn.Module, given 'llama'"),
    "from_module": (lambda: swiglu.nn.MLP.from_module(None), "module: expected a torch.nn.Module, given None"),
    "freeze": (lambda: swiglu.nn.Frozen(nn.Linear(2, 2)), "block: expected a swiglu.nn.MLP", "from_module"),
    "warmup": (lambda: ops.warmup(None), "module: expected a torch.nn.Module, given None"),
    "tokens": (lambda: ops.warmup(swiglu.nn.MLP(8, 12), tokens=3), "tokens: expected numbers from 1 on"),
    "a token": (lambda: ops.warmup(swiglu.nn.MLP(8, 12), tokens=[1, 1.5]), "expected a whole number from 1 on, given 1.5"),
    "graphed": (lambda: ops.graphed(nn.Linear(2, 2), tokens=None), "tokens: expected"),
    "explain": (lambda: swiglu.explain(swiglu.nn.MLP(8, 12)), "layer: expected a swiglu.Layer", "explain_last"),
    "layer of kernels": (lambda: swiglu.hf.layers.SwiGLUMLP()(x()), "swiglu.nn.MLP is a block"),
}


@pytest.mark.parametrize("name", WRONG_KINDS)
def test_arguments_of_wrong_kinds(name):
    call, *texts = WRONG_KINDS[name]
    refused(call, "argument", *texts)


@pytest.mark.parametrize("grad", [False, True])
def test_widths_that_do_not_fit_are_said_with_and_without_a_gradient(grad):
    w_gate, w_up, w_down = (w.requires_grad_(grad) for w in block())
    module = swiglu.nn.MLP(8, 12).requires_grad_(grad)
    for call, text in [
        (lambda: module(x(7)), "x: expected [..., 8], given [3, 7]"),
        (lambda: module(torch.tensor(1.0)), "x: expected [..., K], given a scalar"),
        (lambda: swiglu.nn.GatedLinear(8, 12).requires_grad_(grad)(x(7)), "x: expected [..., 8], given [3, 7]"),
        (lambda: ops.mlp(x(), w_gate, w_up, w_down[:, 1:]), "w_down: expected [features, 12], given [8, 11]"),
        (lambda: ops.gated_linear(x(), w_gate, w_up[1:]), "w_up: expected [12, 8], given [11, 8]"),
        (lambda: ops.gated_linear(x(), w_gate, w_up, weights(1)), "b_gate: expected [12], given [1]"),
        (lambda: ops.gated_linear(x(), w_gate[0]), "w_gate: expected [features, K], given [8]"),
    ]:
        refused(call, "shape", text)
    # A bias that nothing would add.
    refused(lambda: ops.gated_linear(x(), w_gate, b_up=weights(6)), "argument", "b_up: packed weights have one bias")
    refused(lambda: module(x().double()), "dtype", "x: expected torch.float32 elements, given torch.float64")
    refused(lambda: module(x().int()), "dtype", "given torch.int32")
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x().bfloat16()).dtype == torch.bfloat16


def test_out_that_negates_is_refused_before_it_is_written():
    gate, up = torch.randn(2, 4, 6)
    kept = torch.zeros(4, 6, dtype=torch.complex64)
    packed, weight = torch.cat([gate, up], 1), torch.eye(6)
    for call in (
        lambda out: ops.silu_mul(gate, up, out=out),
        lambda out: ops.glu(packed, out=out),
        lambda out: ops.gated_linear(gate, weight, weight, out=out),
        lambda out: ops.mlp(gate, weight, weight, weight, out=out),
    ):
        with pytest.raises((swiglu.SwigluError, ValueError), match="out: expected memory that can be written, given a view that negates it"):
            call(kept.conj().imag)
        assert kept.count_nonzero() == 0


@pytest.mark.parametrize("layout", ["up-first", "interleaved", "interleaved-4"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_layout_of_gate_and_up_that_are_apart_is_refused(grad, layout):
    w_gate, w_up, w_down = (w.requires_grad_(grad) for w in block())
    how = "swiglu", layout, None
    for call in (
        lambda: ops.gated_linear(x(), w_gate, w_up, layout=layout),
        lambda: ops.gated_linear(x(), w_gate, w_up, layout=layout, save="input"),
        lambda: ops.mlp(x(), w_gate, w_up, w_down, layout=layout),
        lambda: ops.mlp(x(), w_gate, w_up, w_down, layout=layout, numerics="eager"),
        lambda: ops.mlp(x(), *(w.detach() for w in (w_gate, w_up, w_down)), layout=layout, out=x()),
        lambda: torch.ops.swiglu.gated_linear(x(), w_gate, w_up, None, None, *how),
        lambda: torch.ops.swiglu.mlp(x(), w_gate, w_up, w_down, None, None, None, *how),
        lambda: torch.ops.swiglu.mlp(*(w.to("meta") for w in (x(), w_gate, w_up, w_down)), None, None, None, *how),
        lambda: torch.ops.swiglu.mlp.out(x(), *(w.detach() for w in block()), None, None, None, *how, out=x()),
        lambda: swiglu.nn.GLU(layout=layout)(w_gate, w_up),
    ):
        error = refused(call, "argument", "layout: expected gate-first where gate and up are two tensors", "leave layout away")
        assert error.given == layout


@pytest.mark.parametrize("name", ["gate_proj", "gate_up_proj"])
def test_sizes_of_a_block_whose_map_has_no_weight(name):
    module = swiglu.nn.MLP(8, 12, packed=name == "gate_up_proj")
    assert (module.hidden, module.intermediate) == (8, 12) and "8 -> 12, swiglu" in repr(module)
    plain = getattr(module, name)
    method = nn.Identity()
    method.weight = lambda: plain.weight  # As that of PyTorch's quantised maps.
    for other in (nn.Sequential(plain), method, None):
        setattr(module, name, other)
        for what in ("hidden", "intermediate"):
            assert not hasattr(module, what)
        assert "swiglu, save=preact" in repr(module) and "->" not in repr(module)
    setattr(module, name, nn.LazyLinear(12))
    assert "LazyLinear" in repr(module)
    setattr(module, name, nn.Sequential(plain))
    assert module(x()).shape == (3, 8)
    with torch.no_grad():
        assert torch.jit.trace(module, x())(x()).shape == (3, 8)


def test_types_and_memory_that_no_kernel_takes():
    eighths = [t for t in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu") if hasattr(torch, t)]
    assert eighths
    for name in eighths:
        t = torch.ones(3, 8).to(getattr(torch, name))
        for call in (lambda t=t: ops.silu_mul(t, t), lambda t=t: ops.glu(t), lambda t=t: swiglu.glu(t)):
            refused(call, "dtype", "expected floating point elements", f"given torch.{name}", "torch.bfloat16")
        refused(lambda t=t: ops.mlp(t, t, t, t.t()), "dtype", f"given torch.{name}")
    for dtype in (torch.float8_e4m3fn, torch.int32, "bf16"):
        refused(lambda dtype=dtype: swiglu.nn.MLP(8, 12, dtype=dtype), "dtype", "dtype: expected torch.float32")
    w = block()
    dense = torch.ones(3, 8)
    for sparse in (dense.to_sparse(), dense.to_sparse_csr(), torch.nested.nested_tensor([dense, dense])):
        refused(lambda s=sparse: ops.silu_mul(s, s), "layout", "gate: expected a dense tensor")
        refused(lambda s=sparse: ops.glu(s), "layout", "x: expected a dense tensor")
        refused(lambda s=sparse: ops.mlp(s, *w), "layout", "x: expected a dense tensor")
        refused(lambda s=sparse: swiglu.nn.MLP(8, 12)(s), "layout", "x: expected a dense tensor")
        refused(lambda s=sparse: swiglu.nn.MLP(8, 12).freeze()(s), "layout", "x: expected a dense tensor")
    refused(lambda: ops.silu_mul(dense, dense.to_sparse()), "layout", "up: expected a dense tensor")
    refused(lambda: ops.mlp(dense, w[0].to_sparse(), *w[1:]), "layout", "w_gate: expected a dense tensor")


def dual(call):
    with forward_ad.dual_level():
        return call(forward_ad.make_dual(x(), torch.ones(3, 8)))


@pytest.mark.parametrize("way", [dual, lambda call: torch.func.jvp(call, (x(),), (x(),)), lambda call: torch.func.jacfwd(call)(x())])
def test_forward_mode_is_refused_and_never_lost(way):
    w, module = block(), swiglu.nn.MLP(8, 12)
    for call in [
        lambda t: ops.silu_mul(t, t),
        lambda t: ops.glu(t),
        lambda t: torch.ops.swiglu.glu(t, "swiglu", "gate-first", None),
        lambda t: ops.mlp(t, *w),
        lambda t: ops.mlp(t, *w, numerics="eager"),
        lambda t: ops.gated_linear(t, *w[:2], save="input"),
        module,
    ]:
        refused(lambda call=call: way(call), "unsupported", "forward-mode derivative (jvp)", "torch.func.grad")
    refused(lambda: way(module.requires_grad_(False).freeze()), "unsupported", "")


def test_a_layer_of_a_file_takes_tensors_and_gives_no_gradient(layer_file):
    layer = swiglu.load(layer_file, device=torch.device("cpu"), dtype=torch.float32)
    t = weights(2, 3, 288)
    y = layer(t)
    assert type(y) is torch.Tensor and not y.requires_grad
    assert torch.equal(y, torch.from_numpy(layer(t.numpy()))) and ops.explain_last().reason == "packed weights"
    out = torch.empty(3, 2, 288).transpose(0, 1)
    assert layer.forward_into(t, out) is out and torch.equal(out, y)
    leaf = t.clone().requires_grad_()
    refused(lambda: layer(leaf), "unsupported", "gradient", "torch.no_grad()", "swiglu.nn")
    refused(lambda: layer.forward_into(t, leaf), "unsupported", "gradient")
    with torch.no_grad():
        assert torch.equal(layer(leaf), y)
    assert torch.equal(layer(leaf.detach()), y)
    # The imaginary part of a conjugated tensor is negated where it is read.
    z = torch.complex(t, -t).conj()
    assert z.imag.is_neg() and torch.equal(layer(z.imag), y)
    refused(lambda: layer.forward_into(t, z.imag), "layout", "out: expected memory that can be written")
    refused(lambda: layer(t.bfloat16()), "dtype", "x: expected f32 elements, given torch.bfloat16")
    refused(lambda: layer(t.to_sparse()), "layout", "to_dense()")
    refused(lambda: layer(t.to("meta")), "layout", "x: expected a tensor on cpu, given one on meta")
    refused(lambda: layer(t[..., 1:]), "shape", "x: expected [..., 288], given [2, 3, 287]")
    refused(lambda: layer.forward_into(t, t.numpy()), "argument", "out: expected a torch.Tensor")
    refused(lambda: torch.vmap(layer)(t), "unsupported", "torch.func")
    assert torch.equal(torch.compile(lambda v: layer(v) + 0, backend="eager")(t), y)


def test_a_frozen_block_stays_what_it_is():
    made = swiglu.nn.MLP(8, 12)
    frozen = made.freeze()
    with torch.no_grad():
        y = frozen(x())
        for same in (frozen.float(), frozen.cpu(), frozen.to(torch.float32), nn.Sequential(frozen).float(), copy.copy(frozen)):
            assert torch.equal(same(x()), y)
        for change in (
            frozen.half, frozen.bfloat16, frozen.double, lambda: frozen.to(torch.bfloat16), lambda: frozen.to("meta"),
            lambda: nn.Sequential(nn.Linear(2, 2), frozen).half(),
        ):  # fmt: skip
            refused(change, "unsupported", "packed weights: expected to stay torch.float32 on cpu", "freeze()")
        assert torch.equal(frozen(x()), y)
        halves = made.half().freeze()
        assert halves(x().half()).dtype == torch.float16
    refused(lambda: pickle.dumps(frozen), "unsupported", "save the block it was made of")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_of_modules_that_are_not_finite_pass_into_results(value):
    module = swiglu.nn.MLP(8, 12)
    with torch.no_grad():
        module.down_proj.weight[1, 2] = value
        for y in (module(x()), module.freeze()(x()), ops.mlp(x(), *(p for p in module.parameters()))):
            assert not y[:, 1].isfinite().any() and y[:, 0].isfinite().all()


WRITES = {
    "silu_mul": lambda out: ops.silu_mul(x(), x(), out=out),
    "glu": lambda out: ops.glu(x(16), out=out),
    "gated_linear": lambda out: ops.gated_linear(x(), weights(8, 8), weights(8, 8), out=out),
    "mlp": lambda out: ops.mlp(x(), *block(), out=out),
    "an operator": lambda out: torch.ops.swiglu.silu_mul.out(x(), x(), "swiglu", None, out=out),
    "an operator of layers": lambda out: torch.ops.swiglu.mlp.out(
        x(), *block(), None, None, None, "swiglu", "gate-first", None, out=out
    ),
    "compiled": lambda out: torch.compile(lambda o: ops.silu_mul(x(), x(), out=o), backend="aot_eager")(out),
    "arrays": lambda out: swiglu.silu_mul(x().numpy(), x().numpy(), out=out),
    "where another input lies": lambda out: ops.silu_mul(out, out, out=out),
    "apart": lambda out: ops.silu_mul(x()[:, ::2], x()[:, ::2], out=out[:, ::2]),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_what_out_wrote_is_not_what_a_gradient_saved(write):
    factor, out = torch.ones((), requires_grad=True), torch.zeros(3, 8)
    result = out * factor
    with torch.no_grad():
        write(out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_what_a_layer_of_a_file_wrote_is_not_what_a_gradient_saved(layer_file):
    layer = swiglu.load(layer_file, device="cpu")
    for out in (torch.zeros(3, 288), torch.zeros(288, 3).t()):
        result = out * torch.ones((), requires_grad=True)
        assert layer.forward_into(weights(3, 288), out) is out
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()
    with torch.inference_mode():
        layer.forward_into(weights(3, 288), torch.zeros(3, 288))
        ops.silu_mul(x(), x(), out=torch.zeros(3, 8))


def _twice(call):
    leaf = x().requires_grad_()
    (grad,) = torch.autograd.grad(call(leaf).square().sum(), leaf, create_graph=True)
    grad.sum().backward()


TWICE = {
    "silu_mul": lambda: _twice(lambda t: ops.silu_mul(t, t)),
    "float64": lambda: _twice(lambda t: ops.silu_mul(t.double(), t.double())),
    "glu": lambda: _twice(lambda t: ops.glu(torch.cat([t, t], -1))),
    "an operator": lambda: _twice(lambda t: torch.ops.swiglu.glu(t, "reglu", "gate-first", None)),
    "gated_linear": lambda: _twice(lambda t: ops.gated_linear(t, *block()[:2])),
    "mlp": lambda: _twice(lambda t: ops.mlp(t, *block())),
    "computed again": lambda: _twice(lambda t: ops.mlp(t, *block(), save="input")),
    "numerics": lambda: _twice(lambda t: ops.mlp(t, *block(), numerics="fused")),
    "a module": lambda: _twice(swiglu.nn.MLP(8, 12)),
    "an activation": lambda: _twice(swiglu.nn.GLU()),
    "compiled by Dynamo alone": lambda: _twice(torch.compile(swiglu.nn.MLP(8, 12), backend="eager")),
    "hessian": lambda: torch.func.hessian(lambda t, *parts: ops.mlp(t, *parts).sum())(x(), *block()),
    "jacrev twice": lambda: torch.func.jacrev(torch.func.jacrev(lambda t: ops.silu_mul(t, t)))(x()),
    "grad of grad": lambda: torch.func.grad(lambda t: torch.func.grad(lambda t: ops.glu(t).sum())(t).sum())(x()),
}


@pytest.mark.parametrize("way", TWICE)
def test_second_derivatives_are_refused_by_name(way):
    # Forward over reverse is refused as what it is.
    what = "forward-mode derivative (jvp)" if way == "hessian" else "second derivative"
    error = refused(TWICE[way], "unsupported", what, "PyTorch's operations")
    assert error.what == what


def test_a_second_derivative_of_compiled_code_is_refused_by_pytorch():
    with pytest.raises(RuntimeError, match="double backward"):
        _twice(torch.compile(swiglu.nn.MLP(8, 12), backend="aot_eager"))


@pytest.fixture
def ends(monkeypatch, capsys):
    """What a command says as it refuses its arguments."""

    def run(package, *arguments):
        main = importlib.import_module(f"{package}.__main__").main
        monkeypatch.setattr(sys, "argv", ["prog", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("mlp", "--tokens", "0,-1"), "argument --tokens: expected a whole number from 1 on, given `0`"),
        (("mlp", "--tokens", "a"), "given `a`"),
        (("mlp", "--hidden", "0"), "argument --hidden: expected a whole number from 1 on"),
        (("mlp", "--rounds", "0"), "argument --rounds: expected"),
        (("mlp", "--providers", "torch,nobody"), "unknown `nobody`"),
        (("mlp", "--csv", "/no/such/folder/x.csv"), "expected a file in a folder that exists"),
        (("model", "--layers", "-1"), "argument --layers: expected"),
        (("model", "--hidden", "100"), "expected a multiple of 128"),
        pytest.param(
            ("mlp", "--device", "cuda"), "PyTorch sees no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="not run: there is a CUDA device"),
        ),
    ],
)  # fmt: skip
def test_options_of_benchmarks(ends, options, text):
    assert text in ends("swiglu.bench", *options)


def test_a_folder_for_the_hub_is_a_folder(ends, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    assert f"DIR: expected a folder, or a name for a new one, given the file {file}" in ends("swiglu.hf", "export", file)
    assert "expected a folder that can be written" in ends("swiglu.hf", "export", file / "below")
