"""Gradients of weights that go to their ``main_grad``, by Megatron's protocol."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="not run: no PyTorch")
np = pytest.importorskip("numpy", reason="not run: no numpy")

import swiglu
import swiglu.nn
import swiglu.torch as ops
from reference import LEAST, UNIT
from swiglu.torch import _kernels, _main_grad, _training
from test_ops import Here, device, double, name_of, tensor  # noqa: F401

HIDDEN, INTERMEDIATE = 24, 40
#: Of the gate, up and down map.
SHAPES = (INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)


def parameters(dtype=torch.float32, main=torch.float32, packed=False, shapes=SHAPES, flag=True):
    """Weights with a main_grad that holds something, and what that is."""
    if packed:
        shapes = (2 * shapes[0][0], shapes[0][1]), shapes[2]
    made = []
    for i, shape in enumerate(shapes):
        w = torch.nn.Parameter(tensor(*shape, dtype=dtype, seed=10 + i) / shape[1] ** 0.5)
        w.main_grad = tensor(*shape, dtype=main, seed=20 + i)
        if flag:
            w.grad_added_to_main_grad = False
        made.append(w)
    return made, [double(w.main_grad).copy() for w in made]


def block(x, weights, fused=True, **how):
    w_gate, w_up, w_down = weights if len(weights) == 3 else (weights[0], None, weights[1])
    return ops.mlp(x, w_gate, w_up, w_down, gradient_accumulation_fusion=fused, **how)


@pytest.fixture
def factors(monkeypatch):
    """Of each weight, the factors of the products that were added."""
    seen, added = {}, _main_grad.add

    def add(what, weight, grads, inputs):
        seen.setdefault(what, []).append((double(grads).copy(), double(inputs).copy()))
        return added(what, weight, grads, inputs)

    whole = _training._native.block_backward

    def block_backward(place, act, x, grad, parts, kept, consumed, into, biases, scales, adds, room):
        if adds:
            w_gate, w_up, w_down, *_ = parts
            both = torch.ops.swiglu.mlp_saving_backward(grad, w_gate, w_up, w_down, kept, str(act))
            halves = (both,) if w_up is None else both.chunk(2, -1)
            for what, half in zip(("w_gate", "w_up"), halves):
                seen.setdefault(what, []).append((double(half).copy(), double(x).copy()))
            h = torch.ops.swiglu.glu(kept, str(act), "gate-first", None)
            seen.setdefault("w_down", []).append((double(grad).copy(), double(h).copy()))
        return whole(place, act, x, grad, parts, kept, consumed, into, biases, scales, adds, room)

    monkeypatch.setattr(_main_grad, "add", add)
    monkeypatch.setattr(_training._native, "block_backward", block_backward)
    # Of a CPU's blocks without products of their own (those that have some: test_packing.py).
    monkeypatch.setattr(_kernels, "PACKED_IN_CALLS", frozenset())
    return seen


def of_products(pairs, dtype, main):
    """Their exact sum, and how far one may be from it: of products over tokens in any order, each added with a rounding."""
    exact, magnitude = (sum(f(g).T @ f(x) for g, x in pairs) for f in (lambda t: t, np.abs))
    terms = sum(len(g) + 1 for g, _ in pairs)
    gamma = terms * UNIT["float32"] / (1 - terms * UNIT["float32"])
    if dtype == torch.float64:
        gamma *= UNIT["float64"] / UNIT["float32"]
    roundings = 0 if main == torch.float32 else len(pairs) * UNIT[name_of(main)]
    return exact, magnitude * (gamma + roundings * (1 + gamma)), LEAST[name_of(main)] * len(pairs)


TYPES = [
    (torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32), (torch.float64, torch.float64),
]  # fmt: skip


@pytest.mark.parametrize("dtype, main", TYPES, ids=lambda t: name_of(t))
@pytest.mark.parametrize("save", ["preact", "input"])
@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
def test_gradients_are_those_of_plain_accumulation(dtype, main, save, packed, factors):
    weights, before = parameters(dtype, main, packed)
    plain = [w.detach().clone().requires_grad_() for w in weights]
    bias = [tensor(n, dtype=dtype, seed=n) for n in (INTERMEDIATE, INTERMEDIATE, HIDDEN)]
    biases = (torch.cat(bias[:2]), None, bias[2]) if packed else tuple(bias)
    theirs = [None if b is None else b.clone().requires_grad_() for b in biases]
    ours = [None if b is None else b.clone().requires_grad_() for b in biases]
    sums = [np.zeros_like(b) for b in before]
    for m in (7, 0, 5):
        x = tensor(m, HIDDEN, dtype=dtype, grad=True, seed=m)
        again = x.detach().clone().requires_grad_()
        dy = tensor(m, HIDDEN, dtype=dtype, seed=100 + m)
        block(x, weights, biases=tuple(ours), save=save).backward(dy)
        block(again, plain, fused=False, biases=tuple(theirs), save=save).backward(dy)
        # What is not of weights is not changed by it.
        if Here.device == "cpu":
            assert torch.equal(x.grad, again.grad)
        else:
            torch.testing.assert_close(x.grad, again.grad)
        for total, w in zip(sums, plain):
            total += double(w.grad)
            w.grad = None
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(None if a is None else a.grad, None if b is None else b.grad)
    names = ("w_gate", "w_down") if packed else ("w_gate", "w_up", "w_down")
    for name, w, held, total in zip(names, weights, before, sums):
        assert w.grad_added_to_main_grad and w.main_grad.dtype == main
        exact, bound, least = of_products(factors[name], dtype, main)
        if name == "w_down" and Here.device == "cuda":
            # h comes from another kernel here, which may round the last bit otherwise.
            bound = bound + sum(2 * UNIT[name_of(dtype)] * (np.abs(g).T @ np.abs(x)) for g, x in factors[name])
        held_off = len(factors[name]) * UNIT[name_of(main)] * (np.abs(held) + np.abs(exact))
        assert np.all(np.abs(double(w.main_grad) - held - exact) <= bound + held_off + least), name
        # The plain gradients are such sums too, each rounded to T.
        rounded = sum(UNIT[name_of(dtype)] * np.abs(g.T @ x) for g, x in factors[name])
        if Here.device == "cpu":
            assert np.all(np.abs(total - exact) <= bound + 2 * rounded + 3 * LEAST[name_of(dtype)]), name


def test_f32_holds_what_16_bits_lose():
    x, w = torch.ones(1, 1, dtype=torch.bfloat16, device=Here.device), torch.nn.Parameter(
        torch.ones(1, 1, dtype=torch.bfloat16, device=Here.device)
    )
    for main, right in ((torch.float32, 257.0), (torch.bfloat16, 256.0)):
        w.main_grad = torch.full((1, 1), 256.0, dtype=main, device=Here.device)
        _main_grad.linear("w", x, w, None).sum().backward()
        assert w.main_grad.item() == right


def test_flags_are_megatrons(device):
    x, dy = tensor(3, HIDDEN), tensor(3, HIDDEN, seed=1)

    def added(change):
        weights, before = parameters()
        for w in weights:
            change(w)
        block(x, weights).backward(dy)
        return weights, before

    weights, before = added(lambda w: delattr(w, "grad_added_to_main_grad"))
    right = [double(w.main_grad) - b for w, b in zip(weights, before)]
    assert all(w.grad is None and not hasattr(w, "grad_added_to_main_grad") for w in weights)
    weights, _ = added(lambda w: None)
    # Memory that all share, and that hooks of the parameter see.
    assert len({w.grad.data_ptr() for w in weights}) == 1 and [w.grad.shape for w in weights] == [w.shape for w in weights]
    _main_grad._dummies[torch.float32, weights[0].device].fill_(float("nan"))
    weights, _ = added(lambda w: setattr(w, "zero_out_wgrad", True))
    assert all(w.grad.count_nonzero() == 0 and w.grad_added_to_main_grad for w in weights)

    def overwrites(w):
        w.overwrite_main_grad = True
        w.main_grad.fill_(float("nan"))

    weights, _ = added(overwrites)
    assert all(np.allclose(double(w.main_grad), r, rtol=1e-4, atol=1e-5) for w, r in zip(weights, right))

    def sharded(w):
        main = w.main_grad.fill_(float("nan"))
        del w.main_grad
        w.__fsdp_param__, w.get_main_grad = True, lambda: main

    weights, _ = added(sharded)
    assert all(np.allclose(double(w.main_grad), r, rtol=1e-4, atol=1e-5) for w, r in zip(weights, right))
    # Without tokens what is overwritten becomes zeros.
    overwrites(weights[0])
    block(x[:0], weights).backward(dy[:0])
    assert weights[0].main_grad.count_nonzero() == 0


def test_megatrons_hook_keeps_what_was_added():
    """The hook of Megatron-Core's DistributedDataParallel, over two micro-batches."""
    weights, before = parameters()
    kept, called = [], []
    for i, w in enumerate(weights):
        w.zero_out_wgrad = i == 0
        accumulator = w.expand_as(w).grad_fn.next_functions[0][0]

        def hook(*_, w=w):
            assert w.grad is not None
            if not w.grad_added_to_main_grad or getattr(w, "zero_out_wgrad", False):
                w.main_grad.add_(w.grad.data)
            w.grad = None
            called.append(w)

        accumulator.register_hook(hook)
        kept.append(accumulator)
    plain = [w.detach().clone().requires_grad_() for w in weights]
    for m in (3, 4):
        x, dy = tensor(m, HIDDEN, seed=m), tensor(m, HIDDEN, seed=m + 9)
        block(x, weights).backward(dy)
        block(x, plain, fused=False).backward(dy)
    assert len(called) == 6
    for w, held, other in zip(weights, before, plain):
        torch.testing.assert_close(w.main_grad.double().cpu(), torch.from_numpy(held) + other.grad.double().cpu(), rtol=1e-4, atol=1e-5)


def test_no_gradient_of_a_weights_size_is_allocated():
    from torch.utils._python_dispatch import TorchDispatchMode

    if Here.device != "cpu":
        pytest.skip("not run: a mode sees the backward pass on this thread alone")
    shapes = ((256, 128), (256, 128), (128, 256))
    weights, _ = parameters(torch.bfloat16, torch.float32, shapes=shapes)
    known = {t.untyped_storage().data_ptr() for w in weights for t in (w, w.main_grad)}
    block(tensor(3, 128, dtype=torch.bfloat16), weights).sum().backward()
    known.add(_main_grad._dummies[torch.bfloat16, weights[0].device].untyped_storage().data_ptr())
    large = []

    class Allocations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and made.numel() >= 128 * 256:
                if made.untyped_storage().data_ptr() not in known:
                    large.append(str(func))
            return made

    for save in ("preact", "input"):
        for w in weights:
            w.grad = None
        y = block(tensor(3, 128, dtype=torch.bfloat16), weights, save=save).sum()
        with Allocations():
            y.backward()
        assert not large
        assert all(w.grad.untyped_storage().data_ptr() in known for w in weights)


@pytest.mark.parametrize("save", ["preact", "input"])
def test_checkpoints_compiled_code_and_saved_tensors_elsewhere(save):
    from torch.utils.checkpoint import checkpoint

    def run(wrap):
        weights, _ = parameters()
        x = tensor(5, HIDDEN, grad=True)
        wrap(lambda x: block(x, weights, save=save), x).square().sum().backward()
        return [x.grad, *(w.main_grad for w in weights)]

    def compiled(f, x):
        torch._dynamo.reset()
        return torch.compile(lambda x: f(x * 1) * 1, backend="aot_eager")(x)

    def elsewhere(f, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
            return f(x)

    def same(found, right):
        # cuBLAS may take another algorithm where it is called from a backward pass: no more roundings than these.
        roundings = 0 if Here.device == "cpu" else 2 * (2 * (HIDDEN + INTERMEDIATE) + 8)
        return (found - right).norm() <= roundings * UNIT["float32"] * right.norm()

    right = run(lambda f, x: f(x))
    for wrap in (
        lambda f, x: checkpoint(f, x, use_reentrant=False),
        lambda f, x: checkpoint(f, x, use_reentrant=True),
        compiled,
        elsewhere,
    ):
        assert all(same(a, b) for a, b in zip(run(wrap), right))


def test_frozen_weights_and_inference_need_no_main_grad():
    weights, before = parameters()
    weights[1].requires_grad_(False)
    del weights[1].main_grad
    x = tensor(3, HIDDEN)
    block(x, weights).sum().backward()
    assert weights[1].grad is None and not np.array_equal(double(weights[0].main_grad), before[0])
    with torch.no_grad():
        del weights[0].main_grad
        assert torch.equal(block(x, weights), block(x, weights, fused=False))
    weights, before = parameters()
    for w in weights:
        w.requires_grad_(False)
    leaf = x.clone().requires_grad_()
    block(leaf, weights).sum().backward()
    assert leaf.grad is not None and all(np.array_equal(double(w.main_grad), b) for w, b in zip(weights, before))


@pytest.mark.parametrize("save", ["preact", "input"])
def test_autocast_adds_to_the_main_grad_of_wide_weights(save, device):
    weights, before = parameters()
    plain = [w.detach().clone().requires_grad_() for w in weights]
    x, again = tensor(4, HIDDEN, grad=True), tensor(4, HIDDEN, grad=True)
    with torch.autocast(device, torch.bfloat16):
        y, right = block(x, weights, save=save), block(again, plain, fused=False, save=save)
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    right.float().square().sum().backward()
    assert x.grad.dtype == torch.float32
    exact = [t.detach().double().requires_grad_() for t in (x, *weights)]
    gate, up, down = exact[1:]
    h = torch.nn.functional.silu(exact[0] @ gate.t()) * (exact[0] @ up.t())
    (h @ down.t()).square().sum().backward()
    added = [torch.from_numpy(double(w.main_grad) - held) for w, held in zip(weights, before)]
    for found, other, right in zip([x.grad, *added], [again, *plain], exact):
        error, theirs = ((g.double().cpu() - right.grad.cpu()).norm() for g in (found, other.grad))
        assert error <= 2 * theirs, f"{error:.2e} where PyTorch's accumulation has {theirs:.2e}"


def test_modules_hand_it_on():
    def expect(module, names):
        before = {}
        for name in names:
            w = module.get_submodule(name).weight
            w.main_grad = before[name] = torch.zeros_like(w)
        module(tensor(3, HIDDEN)).sum().backward()
        assert all(before[name].count_nonzero() > 0 and module.get_submodule(name).weight.grad is None for name in names)

    made = {"device": Here.device, "gradient_accumulation_fusion": True}
    names = ("gate_proj", "up_proj", "down_proj")
    expect(swiglu.nn.MLP(HIDDEN, INTERMEDIATE, **made), names)
    expect(swiglu.nn.MLP(HIDDEN, INTERMEDIATE, packed=True, bias=True, **made), ("gate_up_proj", "down_proj"))
    expect(swiglu.nn.GatedLinear(HIDDEN, INTERMEDIATE, save="input", **made), names[:2])
    from test_patch import Block

    expect(swiglu.nn.MLP.from_module(Block(HIDDEN, INTERMEDIATE), gradient_accumulation_fusion=True), names)
    with pytest.raises(swiglu.SwigluError, match="gradient_accumulation_fusion: expected True or False, given 'yes'"):
        swiglu.nn.MLP(HIDDEN, INTERMEDIATE, gradient_accumulation_fusion="yes")


def test_what_is_written_is_seen_by_pytorch():
    weights, _ = parameters()
    other = torch.ones((), device=Here.device, requires_grad=True)
    saved = weights[0].main_grad * other
    block(tensor(3, HIDDEN), weights).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def test_what_has_no_place_is_refused_before_anything_is_computed():
    x = tensor(3, HIDDEN)

    def changed(attribute, value):
        weights, _ = parameters()
        setattr(weights[2], attribute, value)
        return weights

    good = changed("x", None)[2].main_grad
    wide = torch.zeros(HIDDEN, 2 * INTERMEDIATE, device=Here.device)
    for main, kind, text in [
        (None, "argument", "w_down.main_grad: expected a tensor that gradients are added to, given None; Megatron"),
        (good[:, :3], "shape", f"w_down.main_grad: expected [{HIDDEN}, {INTERMEDIATE}], given [{HIDDEN}, 3]"),
        (good.double(), "dtype", "expected torch.float32 elements, given torch.float64; make it of torch.float32"),
        (good.half(), "dtype", "expected torch.float32 elements, given torch.float16"),
        (good.to("meta"), "layout", "given one on meta; make it where the weight is"),
        (good.t().contiguous().t(), "layout", "given strides [1, 24]; make it contiguous()"),
        (wide[:1, :INTERMEDIATE].expand(HIDDEN, INTERMEDIATE), "layout", "expected rows of adjacent elements that are apart"),
        (good.to_sparse(), "layout", "expected a dense tensor, given torch.sparse_coo; to_dense() makes one"),
        (good.clone().requires_grad_(), "unsupported", "given one that requires a gradient; detach()"),
    ]:
        weights = changed("main_grad", main)
        with pytest.raises((swiglu.SwigluError, swiglu.ShapeError)) as refused:
            block(x, weights)
        assert refused.value.kind == kind and text in str(refused.value), refused.value
    # Rows of a wider matrix are a place.
    block(x, changed("main_grad", wide[:, :INTERMEDIATE])).sum().backward()
    assert wide[:, :INTERMEDIATE].count_nonzero() > 0 and wide[:, INTERMEDIATE:].count_nonzero() == 0
    weights, _ = parameters()
    itself, _ = parameters()
    itself[1].main_grad = itself[1].detach()
    for call, kind, text in [
        (lambda: block(x, [weights[0] * 1, *weights[1:]]), "argument", "w_gate: expected a parameter"),
        (lambda: block(x, weights, numerics="fused"), "unsupported", "leave one of both away"),
        (lambda: swiglu.nn.MLP(4, 8, numerics="eager", gradient_accumulation_fusion=True), "unsupported", "leave one of both"),
        (lambda: block(x.detach(), [w.detach() for w in weights], numerics="fused"), "unsupported", "leave one of both away"),
        (lambda: torch.func.grad(lambda x: block(x, weights).sum())(x), "unsupported", "outside of torch.func's transforms"),
        (lambda: ops.mlp(x, *weights, gradient_accumulation_fusion=1), "argument", "expected True or False, given 1"),
        (lambda: ops.mlp(x, *[w.detach() for w in weights], gradient_accumulation_fusion=1), "argument", "given 1"),
        (lambda: block(x, itself), "layout", "w_up.main_grad: expected memory of its own, given that of the weight"),
    ]:
        with pytest.raises(swiglu.SwigluError) as refused:
            call()
        assert refused.value.kind == kind and text in str(refused.value), refused.value
    y = block(x, weights)
    weights[0].main_grad = None
    with pytest.raises(swiglu.SwigluError, match="w_gate.main_grad: expected a tensor"):
        y.sum().backward()
    if Here.device == "cpu":
        weights, _ = parameters(shapes=((3, 3),) * 3)
        grads = torch.zeros(3, 3)
        weights[0].main_grad = grads
        with pytest.raises(swiglu.SwigluError, match="in the memory of a factor") as refused:
            _main_grad.add("w", weights[0], grads, torch.zeros(3, 3))
        assert refused.value.kind == "unsupported"


@pytest.mark.parametrize("save", ["preact", "input"])
def test_a_second_derivative_is_refused(save):
    weights, _ = parameters()
    x = tensor(3, HIDDEN, grad=True)
    (dx,) = torch.autograd.grad(block(x, weights, save=save).square().sum(), x, create_graph=True)
    with pytest.raises(swiglu.SwigluError, match="second derivative") as refused:
        dx.sum().backward()
    assert refused.value.kind == "unsupported"
