"""Modules, and blocks of a model that compute with our kernels.

One file, because its tests share blocks that patching meets.
"""

from __future__ import annotations

import copy
import io
import pickle
import threading

import pytest

pytest.importorskip("torch", reason="not run: no PyTorch")
np = pytest.importorskip("numpy", reason="not run: no numpy")

import swiglu
import swiglu.nn
import swiglu.torch as ops
import torch
import torch._dynamo
from test_ops import Here, block_reference, device, name_of, tensor, within  # noqa: F401
from torch import nn


class Block(nn.Module):
    """As the blocks of Llama."""

    def __init__(self, hidden=8, intermediate=20, bias=False, act=None, dtype=None):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=bias, dtype=dtype, device=Here.device)
        self.up_proj = nn.Linear(hidden, intermediate, bias=bias, dtype=dtype, device=Here.device)
        self.down_proj = nn.Linear(intermediate, hidden, bias=bias, dtype=dtype, device=Here.device)
        self.act_fn = act or nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Packed(nn.Module):
    """As the blocks of Phi-3."""

    def __init__(self, hidden=8, intermediate=20):
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden, 2 * intermediate, bias=False, device=Here.device)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False, device=Here.device)
        self.activation_fn = nn.SiLU()

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up * self.activation_fn(gate))


class Scaled(Block):
    def forward(self, x):
        return 0.5 * super().forward(x)


class ScaledLater(Block):
    """What its forward computes follows attributes, one of them its class's."""

    shift = 0.0

    def __init__(self, **how):
        super().__init__(**how)
        self.scale = 1.0
        self.drop = 0.0
        self.limits = [1e30]

    def forward(self, x):
        y = super().forward(x) * self.scale + self.shift
        return nn.functional.dropout(y.clamp(max=self.limits[0]), self.drop, self.training)


class Clamped(Block):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=10)) * self.up_proj(x))


class Dropped(Block):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


class Detached(Block):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)).detach() * self.up_proj(x))


class WithoutGradient(Block):
    def forward(self, x):
        with torch.no_grad():
            return super().forward(x)


class OtherGradient(Block):
    def forward(self, x):
        h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        if h.requires_grad:
            h.register_hook(lambda grad: 3 * grad)
        return self.down_proj(h)


class OfTraining(Block):
    def forward(self, x):
        y = super().forward(x)
        return y if self.training else 2 * y


class OfGradients(Block):
    def forward(self, x):
        y = super().forward(x)
        return y if torch.is_grad_enabled() else 2 * y


class OfType(Block):
    """What differs in one element type."""

    dtype = torch.bfloat16

    def forward(self, x):
        h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(h.clamp(-1, 1) if h.dtype == self.dtype else h)


class OfFloat16(OfType):
    dtype = torch.float16


class OfFloat32(OfType):
    dtype = torch.float32


class Widened(Block):
    def forward(self, x):
        y = super().forward(x)
        return y.float() if y.dtype == torch.bfloat16 else y


class TwoInputs(Block):
    def forward(self, x, mask):
        return super().forward(x) * mask


class Adapter(nn.Linear):
    """Not a plain linear map: as adapters, quantised and parallel ones are not."""

    def forward(self, x):
        return super().forward(x) + 1


def expect_block(module, x, y, act="swiglu"):
    """y against float64, within what roundings explain."""
    if hasattr(module, "gate_up_proj"):
        w_gate, w_up = module.gate_up_proj.weight.chunk(2)
        b_gate = b_up = None
    else:
        w_gate, w_up, b_gate, b_up = (
            module.gate_proj.weight, module.up_proj.weight, module.gate_proj.bias, module.up_proj.bias,
        )  # fmt: skip
    parts = (w_gate, w_up, module.down_proj.weight, b_gate, b_up, module.down_proj.bias)
    exact, bound = block_reference(x.reshape(-1, x.shape[-1]), parts, act, name_of(x.dtype))
    within(y.reshape(-1, y.shape[-1]), exact, bound)


@pytest.mark.parametrize("level", ["block", "gated", "activation"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("bias", [False, True])
def test_a_patched_block_is_within_its_bounds(level, dtype, bias):
    torch.manual_seed(1)
    model = nn.Sequential(Block(bias=bias, dtype=dtype), Block(act=nn.GELU("tanh"), bias=bias, dtype=dtype))
    parameters = [p.data_ptr() for p in model.parameters()]
    names = list(model.state_dict())
    report = swiglu.patch(model, level=level)
    assert [(m.name, m.level, m.activation) for m in report.modules] == [("0", level, "swiglu"), ("1", level, "geglu-tanh")]
    x = tensor(2, 3, 8, dtype=dtype)
    with torch.no_grad():
        expect_block(model[0], x, model[0](x))
        expect_block(model[1], x, model[1](x), "geglu-tanh")
    assert [p.data_ptr() for p in model.parameters()] == parameters and list(model.state_dict()) == names
    assert swiglu.unpatch(model) == 2 and "forward" not in vars(model[0])
    assert swiglu.unpatch(model) == 0


def test_packed_blocks_and_gradients():
    torch.manual_seed(2)
    for make in (Packed, Block):
        plain = make().double()
        patched = copy.deepcopy(plain)
        assert swiglu.patch(patched).patched
        x, same = (tensor(3, 8, dtype=torch.float64, grad=True) for _ in range(2))
        plain(x).sum().backward()
        patched(same).sum().backward()
        torch.testing.assert_close(x.grad, same.grad)
        for a, b in zip(plain.parameters(), patched.parameters()):
            torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Scaled, "computes something else"),
        (Clamped, "computes something else"),
        (Dropped, "computes something else"),
        (Detached, "its gradients are others"),
        (OtherGradient, "its gradients are others"),
        (WithoutGradient, "has no gradient"),
        (OfTraining, "computes something else"),
        (OfGradients, "computes something else"),
        (OfType, "something else than down(act(gate)·up), in torch.bfloat16"),
        (OfFloat16, "in torch.float16"),
        (OfFloat32, "in torch.float32"),
        (Widened, "something else than a tensor of torch.bfloat16"),
        (TwoInputs, "does not take one tensor"),
        (lambda: Block(act=nn.Tanh()), "none of ours"),
    ],
)
def test_what_computes_something_else_is_left_alone(make, why):
    model = make()
    report = swiglu.patch(model)
    assert not report.patched and why in report.left[0].reason and why in str(report)
    assert "forward" not in vars(model)
    with pytest.raises(swiglu.SwigluError, match="left alone"):
        swiglu.patch(model, strict=True)
    with pytest.raises(swiglu.SwigluError) as caught:
        swiglu.nn.MLP.from_module(model)
    assert caught.value.kind == "unsupported"


@pytest.mark.parametrize(
    "act", [nn.SiLU, nn.GELU, lambda: nn.GELU("tanh"), nn.ReLU, nn.Sigmoid, nn.Identity, "relu2", "gelu_new"]
)
def test_roundings_of_no_element_type_are_taken_for_another_function(act, monkeypatch):
    if isinstance(act, str):
        act = pytest.importorskip("transformers.activations", reason="not run: no transformers").ACT2CLS[act]
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert swiglu.patch(Block(act=act())).patched
    torch.set_float32_matmul_precision("medium")
    try:
        assert swiglu.patch(Packed()).patched and swiglu.patch(Block(act=act())).patched
    finally:
        torch.set_float32_matmul_precision("highest")


def test_other_parts_hooks_and_forwards_are_left_alone():
    model = Block()
    model.norm = nn.LayerNorm(8)
    assert "more parts" in swiglu.patch(model).left[0].reason
    model = Block()
    model.scale = nn.Parameter(torch.ones(1))
    assert "values of its own" in swiglu.patch(model).left[0].reason
    model = Block()
    model.act_fn.register_forward_hook(lambda *a: None)
    assert "hooks" in swiglu.patch(model).left[0].reason
    model = Block()
    model.forward = lambda x: x
    assert "forward of its own" in swiglu.patch(model).left[0].reason
    assert swiglu.patch(nn.Linear(2, 2)).modules == ()


@pytest.mark.parametrize("which", ["gate_proj", "up_proj", "down_proj"])
def test_adapters_are_called(which):
    torch.manual_seed(3)
    model = Block()
    old = getattr(model, which)
    setattr(model, which, Adapter(old.in_features, old.out_features, bias=False, device=Here.device))
    x = tensor(3, 8)
    with torch.no_grad():
        expected = model(x)
        report = swiglu.patch(model)
        assert report.patched[0].level == ("gated" if which == "down_proj" else "activation")
        assert "Adapter" in report.patched[0].reason
        torch.testing.assert_close(model(x), expected)
    swiglu.unpatch(model)
    with pytest.raises(swiglu.SwigluError, match="Adapter"):
        swiglu.patch(model, strict=True)


class Casting(Block):
    """As T5's, whose down map stays in float32."""

    def forward(self, x):
        h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(h.to(self.down_proj.weight.dtype))


def a_gate_of_one(model):
    model.gate_proj = nn.Linear(8, 1, device=Here.device)


def a_down_map_in_float32(model):
    model.bfloat16().down_proj.float()


@pytest.mark.parametrize("change, why", [(a_gate_of_one, "do not fit"), (a_down_map_in_float32, "element type")])
def test_what_only_the_original_forward_computes_is_left_alone(change, why):
    model = Casting()
    change(model)
    x = tensor(3, 8, dtype=model.up_proj.weight.dtype)
    expected = model(x)
    (left,) = swiglu.patch(model).left
    assert why in left.reason and torch.equal(model(x), expected)


def a_gate_in_float32(model):
    model.bfloat16().gate_proj.register_forward_hook(lambda m, i, y: y.float())


def a_hooked_down_map_in_float32(model):
    a_down_map_in_float32(model)
    model.down_proj.register_forward_hook(lambda m, i, y: 2 * y)


def a_gate_of_one_by_a_hook(model):
    model.gate_proj.register_forward_hook(lambda m, i, y: y[..., :1])


@pytest.mark.parametrize("change", [a_gate_in_float32, a_hooked_down_map_in_float32, a_gate_of_one_by_a_hook])
def test_what_maps_give_that_does_not_fit_goes_as_before(change):
    model = Casting()
    change(model)
    x = tensor(3, 8, dtype=model.up_proj.weight.dtype)
    expected = model(x)
    assert swiglu.patch(model).patched
    assert torch.equal(model(x), expected) and ops.explain_last().way == "original"
    assert "gave" in ops.explain_last().reason or "down_proj has torch.float32" in ops.explain_last().reason
    with torch.autocast(Here.device, dtype=torch.bfloat16):
        torch.testing.assert_close(model(x).float(), expected.float(), rtol=0.05, atol=0.05)


def test_modules_promote_what_hooks_give():
    gated = swiglu.nn.GatedLinear(8, 12, dtype=torch.bfloat16, device=Here.device)
    gated.gate_proj.register_forward_hook(lambda m, i, y: y.float())
    x = tensor(3, 8, dtype=torch.bfloat16)
    torch.testing.assert_close(gated(x), nn.functional.silu(gated.gate_proj(x)) * gated.up_proj(x))


def hook(model):
    model.gate_proj.register_forward_hook(lambda m, i, y: 2 * y)


def own(model):
    forward = model.up_proj.forward
    model.up_proj.forward = lambda x: forward(x) + 1


def adapter(model):
    model.down_proj = Adapter(20, 8, device=Here.device)


def activation(model):
    model.act_fn = nn.GELU()


def hook_of_activation(model):
    model.act_fn.register_forward_hook(lambda m, i, y: y + 1)


@pytest.mark.parametrize("change", [hook, own, adapter, activation, hook_of_activation])
@pytest.mark.parametrize("level", ["block", "gated", "activation"])
def test_what_changes_after_patching_is_noticed(change, level):
    torch.manual_seed(4)
    model = Block()
    twin = copy.deepcopy(model)
    swiglu.patch(model, level=level)
    change(model)
    with torch.no_grad():
        x = tensor(3, 8)
        if change is adapter:
            twin.down_proj = model.down_proj
        else:
            change(twin)
        torch.testing.assert_close(model(x), twin(x))


@pytest.mark.parametrize(
    "name, value", [("scale", 3.0), ("shift", 1.0), ("drop", 1.0), ("limits", [0.1]), ("scale", torch.tensor(2.0))]
)
@pytest.mark.parametrize("level", ["block", "activation"])
def test_attributes_that_change_after_patching_are_noticed(name, value, level):
    torch.manual_seed(5)
    model, x = ScaledLater(), tensor(3, 8)
    twin = copy.deepcopy(model)
    assert swiglu.patch(model, level=level).patched
    # Equal values are no change, nor is what others hang on a module, its mode, or a copy.
    model.scale = float("1")
    model._somebody = object()
    for module in (model, copy.deepcopy(model).eval()):
        module(x)
        assert ops.explain_last().way != "original", ops.explain_last()
    for module in (model, twin):
        setattr(module, name, value)
    with torch.no_grad():
        torch.testing.assert_close(model(x), twin(x))
    assert name in ops.explain_last().reason
    setattr(model, name, {"scale": 1.0, "shift": 0.0, "drop": 0.0}.get(name, None))
    if name != "limits":
        model(x)
        assert ops.explain_last().way != "original"


class WithMoreLater(Block):
    def forward(self, x):
        y = super().forward(x)
        return self.extra(y) if hasattr(self, "extra") else y * getattr(self, "scale", 1)


@pytest.mark.parametrize("level", ["block", "activation"])
@pytest.mark.parametrize(
    "add",
    [
        lambda m: setattr(m, "extra", nn.Linear(8, 8, device=Here.device)),
        lambda m: setattr(m, "scale", nn.Parameter(tensor(8))),
        lambda m: m.register_buffer("scale", tensor(8)),
    ],
    ids=["module", "parameter", "buffer"],
)
def test_what_is_added_after_patching_is_noticed(add, level):
    model, x = WithMoreLater(), tensor(3, 8)
    swiglu.patch(model, level=level)
    add(model)
    y = model(x)
    assert "other parts" in ops.explain_last().reason
    swiglu.unpatch(model)
    torch.testing.assert_close(y, model(x))


def test_a_value_of_the_class_is_noticed(monkeypatch):
    model, x = ScaledLater(), tensor(3, 8)
    swiglu.patch(model)
    monkeypatch.setattr(ScaledLater, "shift", 2.0)
    y = model(x)
    swiglu.unpatch(model)
    torch.testing.assert_close(y, model(x))


@pytest.mark.parametrize("cls, name", [(nn.Linear, "forward"), (nn.Linear, "__call__"), (nn.SiLU, "forward"), (Block, "forward")])
@pytest.mark.parametrize("before", [True, False])
def test_forwards_that_are_replaced_for_a_whole_class_are_called(cls, name, before, monkeypatch):
    model, x, original = Block(), tensor(3, 8), getattr(cls, name)

    def replace():
        monkeypatch.setattr(cls, name, lambda self, x: 2 * original(self, x))

    if before:
        replace()
    report = swiglu.patch(model)
    if before and cls is nn.Linear:
        assert [m.level for m in report.modules] == ["activation"] and "another forward" in report.modules[0].reason
    if not before:
        assert report.patched
        replace()
    y = model(x)
    swiglu.unpatch(model)
    torch.testing.assert_close(y, model(x))


def test_nested_tensors_go_as_before():
    model = Block()
    x = torch.nested.nested_tensor([tensor(3, 8), tensor(2, 8)], layout=torch.jagged)
    expected = model(x)
    swiglu.patch(model)
    torch.testing.assert_close(model(x).values(), expected.values())


@pytest.mark.parametrize("sparse", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr], ids=["coo", "csr"])
def test_sparse_tensors_go_as_before(sparse):
    model = Block()
    x = sparse(tensor(3, 8))
    expected = model(x)
    swiglu.patch(model)
    assert torch.equal(model(x), expected)
    assert "sparse" in str(swiglu.explain_last())


def test_hooks_before_patching_are_called():
    model = Block()
    seen = []
    model.gate_proj.register_forward_hook(lambda *a: seen.append("gate"))
    model.register_forward_hook(lambda *a: seen.append("block"))
    report = swiglu.patch(model)
    assert report.patched[0].level == "activation" and "hooks" in report.patched[0].reason
    model(tensor(2, 8))
    assert seen == ["gate", "block"]


def test_hooks_of_all_modules_are_called():
    model = Block()
    swiglu.patch(model)
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, i, y: seen.append(type(m)))
    model(tensor(2, 8))
    handle.remove()
    assert nn.SiLU in seen and seen.count(nn.Linear) == 3


def test_copies_casts_and_compile():
    torch.manual_seed(5)
    model = Block()
    swiglu.patch(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.gate_proj.weight.mul_(2)
        x = tensor(3, 8)
        expect_block(twin, x, twin(x))
        expect_block(model, x, model(x))
        half = copy.deepcopy(model).bfloat16()
        expect_block(half, x.bfloat16(), half(x.bfloat16()))
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        expect_block(model, x, compiled(x))


def test_a_patched_model_is_pickled_whole():
    model = nn.Sequential(Block(), Packed())
    swiglu.patch(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    with torch.no_grad():
        x = tensor(3, 8)
        again[0].gate_proj.weight.mul_(2)
        expect_block(again[0], x, again[0](x))
        assert torch.equal(again[1](x), model[1](x)) and not torch.equal(again[0](x), model[0](x))
    assert swiglu.unpatch(again) == 2 and "forward" not in vars(again[0])


def undecorated(forward):
    return lambda self, x: forward(self, x)


class WithALock(Block):
    """A block whose class has what is neither copied nor pickled, and a value that is copied as another one."""

    lock, module, limits = threading.Lock(), threading, [1.0]
    forward = undecorated(Block.forward)


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copied", "pickled"])
def test_what_a_class_has_is_neither_copied_nor_pickled(twin, monkeypatch):
    model, x = WithALock(), tensor(3, 8)
    swiglu.patch(model, strict=True)
    again = twin(model)
    torch.testing.assert_close(again(x), model(x))
    assert ops.explain_last().way != "original", ops.explain_last()
    monkeypatch.setattr(WithALock, "limits", [2.0])
    again(x)
    assert "limits" in ops.explain_last().reason


def test_a_model_without_blocks_is_no_success_where_all_must_be_patched():
    assert not swiglu.patch(nn.Linear(2, 2)).modules
    with pytest.raises(swiglu.SwigluError, match="no feed-forward block was found"):
        swiglu.patch(nn.Linear(2, 2), strict=True)


def test_blocks_are_recognised_in_inference_mode():
    model = Block()
    with torch.inference_mode():
        assert swiglu.patch(model).patched
        x = tensor(3, 8)
        expect_block(model, x, model(x))


def test_reports_read_well():
    model = nn.ModuleDict({"a": Block(), "b": Scaled()})
    report = swiglu.patch(model)
    text = str(report)
    assert "1 of 2 feed-forward blocks patched" in text and "b (Scaled): left alone" in text
    assert "<table>" in report._repr_html_() and "patched already" in swiglu.patch(model).left[0].reason
    assert repr(report) == text and "1 of 2" in report._repr_html_()
    assert "(the model)" in str(swiglu.patch(Scaled())) and "(the model)" in swiglu.patch(Scaled())._repr_html_()


def test_modules_of_ours_are_said_to_be_ours():
    (module,) = swiglu.patch(swiglu.nn.MLP(8, 12)).left
    assert "swiglu.nn's" in module.reason


# Modules.


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_modules(packed, bias, device):
    torch.manual_seed(6)
    block = swiglu.nn.MLP(8, 20, bias=bias, packed=packed, activation="geglu", device=device)
    assert (block.hidden, block.intermediate) == (8, 20) and "geglu" in repr(block)
    gated = swiglu.nn.GatedLinear(8, 20, bias=bias, packed=packed, device=device)
    x = tensor(3, 8, grad=True)
    assert block(x).shape == (3, 8) and gated(x).shape == (3, 20)
    block(x).sum().backward()
    assert all(p.grad is not None for p in block.parameters())
    if not packed:
        expect_block(block, x.detach(), block(x), "geglu")
        assert [n for n, _ in Block(bias=bias).named_parameters()] == [n for n, _ in block.named_parameters()]
    block.reset_parameters()
    if device != "cpu":
        with pytest.raises(swiglu.SwigluError, match="for the CPU"):
            block.freeze()
        return
    with torch.no_grad():
        frozen = block.freeze()
        torch.testing.assert_close(frozen(x), block(x), rtol=1e-5, atol=1e-6)
        assert ops.explain_last().way == "composed"
        assert not list(frozen.parameters()) and copy.deepcopy(frozen)(x).shape == (3, 8)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for given in (x, x.bfloat16()):
                y = frozen(given)
                assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y.float(), frozen(x.bfloat16().float()), rtol=2**-8, atol=0)
    with pytest.raises(swiglu.SwigluError, match="gradient"):
        frozen(x)
    with pytest.raises(swiglu.SwigluError, match="expected f32"):
        frozen(x.detach().double())
    with pytest.raises(ValueError, match=r"x: expected \[..., 8\]"):
        frozen(torch.zeros(2, 7))


def test_glu_module():
    x = tensor(3, 8)
    assert torch.equal(swiglu.nn.GLU("geglu")(x), ops.glu(x, "geglu"))
    assert torch.equal(swiglu.nn.GLU()(x, x), ops.silu_mul(x, x))


def test_from_module_shares_parameters():
    model = Block(bias=True)
    made = swiglu.nn.MLP.from_module(model)
    assert {id(p) for p in model.parameters()} == {id(p) for p in made.parameters()}
    x = tensor(3, 8)
    with torch.no_grad():
        expect_block(model, x, made(x))
        model.gate_proj.weight.mul_(3)
        expect_block(model, x, made(x))
    model.register_forward_hook(lambda m, i, y: 2 * y)
    with pytest.raises(swiglu.SwigluError, match="the module has hooks"):
        swiglu.nn.MLP.from_module(model)
    packed = swiglu.nn.MLP.from_module(Packed())
    assert packed.packed and packed(x).shape == (3, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_a_llama_of_transformers(dtype, device):
    transformers = pytest.importorskip("transformers", reason="not run: no transformers")
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=171, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=97, mlp_bias=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(device, dtype).eval()
    ids = torch.arange(24, device=device).reshape(2, 12)
    inputs = []
    hooks = [layer.mlp.register_forward_hook(lambda m, i, y: inputs.append((m, i[0], y))) for layer in model.model.layers]
    with torch.no_grad():
        before = model(ids).logits
        inputs.clear()
        report = swiglu.patch(model, strict=True)
        after = model(ids).logits
        for module, x, y in inputs:
            expect_block(module, x, y)
    for handle in hooks:
        handle.remove()
    assert [m.name for m in report.patched] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    # Each block is within its own bounds; what follows it may amplify what differs, in a model this small a few times.
    unit = 2.0**-24 if dtype == torch.float32 else 2.0**-8
    assert (after - before).abs().max() <= 64 * unit * before.abs().max()
    swiglu.unpatch(model)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)
    # It trains.
    swiglu.patch(model)
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


class Named(Block):
    """A block whose forward calls its tensor something else, and takes more."""

    def forward(self, hidden_states, scale=None):
        y = super().forward(hidden_states)
        return y if scale is None else y * scale


def test_a_call_by_name_or_with_more_goes_as_before():
    block, x = Named(16, 24), torch.randn(3, 16, device=Here.device)
    expected = block(x)
    swiglu.patch(block, strict=True)
    torch.testing.assert_close(block(x), expected)
    torch.testing.assert_close(block(hidden_states=x), expected)
    assert ops.explain_last().way != "original"
    for call in (lambda: block(x, 2.0), lambda: block(x, scale=2.0), lambda: block(hidden_states=x, scale=2.0)):
        torch.testing.assert_close(call(), 2 * expected)
        assert ops.explain_last().way == "original"
    with pytest.raises(TypeError):
        block(unknown=x)


def test_an_argument_may_have_any_name():
    class Odd(Block):
        def forward(self, patch):
            return super().forward(patch)

    block, x = Odd(16, 24), torch.randn(3, 16, device=Here.device)
    swiglu.patch(block, strict=True)
    torch.testing.assert_close(block(patch=x), block(x))


def test_a_replica_computes_with_its_own_parameters():
    block, x = Block(16, 24), torch.randn(3, 16, device=Here.device)
    swiglu.patch(block, strict=True)
    replica = block._replicate_for_data_parallel()
    replica._modules = dict(block._modules)
    replica.down_proj = nn.Linear(24, 16, device=Here.device)
    torch.testing.assert_close(replica(x), Block.forward(replica, x))
    assert not torch.allclose(replica(x), block(x))
    again = replica._replicate_for_data_parallel()
    assert again.forward.args[0] is again


def test_patching_draws_no_random_numbers_and_knows_no_default_device():
    block = Block(16, 24)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    swiglu.patch(block, strict=True)
    assert torch.equal(before, torch.get_rng_state())
    swiglu.unpatch(block)
    with torch.device("meta"):
        swiglu.patch(block, strict=True)
        layer = swiglu.nn.MLP(16, 24, device="cpu")
        frozen = layer.freeze()
    x = torch.randn(3, 16)
    with torch.no_grad():
        expected = frozen(x)
        with torch.device("meta"):
            torch.testing.assert_close(frozen(x), expected)


def test_what_somebody_puts_around_a_patched_forward_stays():
    block, x, calls = Block(16, 24), torch.randn(3, 16, device=Here.device), []
    swiglu.patch(block, strict=True)
    ours = block.forward

    def around(x):
        calls.append(1)
        return ours(x)

    block.forward = around
    assert swiglu.unpatch(block) == 1 and block.forward is around


def test_a_class_whose_new_makes_more_than_an_object_is_patched():
    class Odd(Block):
        def __new__(cls, *args):
            self = super().__new__(cls)
            if not args:
                raise TypeError("it needs its sizes")
            return self

    block, x = Odd(16, 24), torch.randn(3, 16, device=Here.device)
    expected = block(x)
    swiglu.patch(block, strict=True)
    torch.testing.assert_close(block(x), expected)


def test_a_block_without_its_activation_says_so_as_before():
    block = Block(16, 24)
    swiglu.patch(block, strict=True)
    del block.act_fn
    with pytest.raises(AttributeError, match="act_fn"):
        block(torch.randn(3, 16, device=Here.device))


def test_keys_of_plain_tensors_are_not_those_of_a_mode(monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    from swiglu.torch import _door

    monkeypatch.setattr(_door, "_KEYS", None)
    with FakeTensorMode():
        keys = _door._known_keys()
    assert keys == _door._plain_keys() and _door.holds_values(torch.zeros(2))


def test_a_mode_neither_hinders_recognition_nor_sees_it():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        products = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.products += "mm" in str(func)
            return func(*args, **(kwargs or {}))

    block = Block(16, 24)
    for mode in (FakeTensorMode(allow_non_fake_inputs=True), Seen()):
        with mode:
            swiglu.patch(block, strict=True)
        assert swiglu.unpatch(block) == 1
    assert mode.products == 0
    with mode:
        block(torch.randn(3, 16, device=Here.device))
    assert mode.products == 3


@pytest.mark.parametrize("make", [Block, Packed])
@pytest.mark.parametrize("grad", [True, False])
def test_operators_stay_in_traces_that_are_not_strict(make, grad):
    from torch.fx.experimental.proxy_tensor import make_fx

    model, x = nn.Sequential(make()), tensor(3, 8)
    swiglu.patch(model, strict=True)
    with torch.set_grad_enabled(grad):
        y = model(x)
        for traced in (torch.export.export(model, (x,), strict=False).module(), make_fx(model)(x)):
            assert any("swiglu" in str(node.target) for node in traced.graph.nodes), traced.graph
            torch.testing.assert_close(traced(x), y)


def test_weights_of_experts_are_reported():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.randn(3, 40, 8, device=Here.device))
            self.down_proj = nn.Parameter(torch.randn(3, 8, 20, device=Here.device))

    model = nn.Sequential(Experts(), Block())
    report = swiglu.patch(model)
    assert [m.level for m in report.modules] == [None, "block"] and "experts" in report.left[0].reason
    with pytest.raises(swiglu.SwigluError, match="experts"):
        swiglu.patch(Experts(), strict=True)


def test_hooks_of_all_modules_do_not_see_recognition():
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda *call: seen.append(call))
    try:
        block = Block()
        assert swiglu.patch(block).patched and not seen
        block(torch.randn(2, 8, device=Here.device))
    finally:
        handle.remove()
    assert seen
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        counted = Block()
        assert swiglu.patch(counted).patched
        counted(torch.randn(2, 8, device=Here.device))
    assert counter.get_total_flops() == 2 * 2 * 8 * 20 * 3


def without(model, what):
    delattr(model.gate_proj, what)


def of_another_shape(model, what):
    setattr(model.gate_proj, what, nn.Parameter(torch.randn(1, device=Here.device)))


@pytest.mark.parametrize(
    "change, level",
    [
        (lambda m: setattr(m.gate_proj, "weight", None), "activation"), (lambda m: without(m, "weight"), "activation"),
        (lambda m: without(m, "bias"), "activation"), (lambda m: of_another_shape(m, "bias"), "activation"),
        (lambda m: setattr(m, "up_proj", nn.Linear(8, 1, device=Here.device)), None),
        (lambda m: setattr(m.act_fn, "forward", lambda x: x), None),
        (lambda m: setattr(m, "act_fn", type("Own", (nn.SiLU,), {})()), None),
    ],
)  # fmt: skip
def test_odd_maps_and_activations_are_reported(change, level):
    model = Block(bias=True)
    change(model)
    (found,) = swiglu.patch(model).modules
    assert found.level == level, found


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m.act_fn, "forward", lambda x: x * 0), lambda m: setattr(m.act_fn, "approximate", "tanh"),
        lambda m: setattr(m.gate_proj, "bias", nn.Parameter(torch.randn(20, device=Here.device).as_subclass(type("T", (torch.Tensor,), {})))),
    ],
)  # fmt: skip
def test_smaller_changes_after_patching_are_noticed_too(change):
    model, x = Block(bias=True, act=nn.GELU()), torch.randn(3, 8, device=Here.device)
    assert swiglu.patch(model).patched[0].level == "block"
    change(model)
    model(x)
    assert ops.explain_last().way == "original"


@pytest.mark.parametrize("packed", [False, True])
def test_modules_call_maps_that_are_more_than_their_weights(packed):
    torch.manual_seed(3)
    block = swiglu.nn.MLP(8, 12, packed=packed, bias=True)
    x, calls, name = torch.randn(3, 8), [], "gate_up_proj" if packed else "gate_proj"
    y = block(x)
    handle = getattr(block, name).register_forward_hook(lambda *call: calls.append(call))
    torch.testing.assert_close(block(x), y, rtol=1e-5, atol=1e-6)
    assert len(calls) == 1
    with pytest.raises(swiglu.SwigluError, match="hooks"):
        block.freeze()
    handle.remove()
    block(x)
    assert len(calls) == 1
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), y, rtol=1e-5, atol=1e-6)
    inner = getattr(block, name)
    setattr(block, name, nn.Sequential(inner, nn.Dropout(1.0)))
    assert not (block(x) - block.down_proj(torch.zeros(3, 12))).any()
    fused = swiglu.nn.MLP(8, 12, packed=packed, gradient_accumulation_fusion=True)
    fused.down_proj.register_forward_hook(lambda *call: None)
    with pytest.raises(swiglu.SwigluError, match="hooks"):
        fused(x)


def test_a_frozen_block_of_negated_weights_and_under_traces():
    from torch.fx.experimental.proxy_tensor import make_fx

    torch.manual_seed(4)
    block, x, w = swiglu.nn.MLP(8, 12), torch.randn(3, 8), torch.randn(12, 8)
    block.gate_proj.weight = nn.Parameter(torch.complex(w, w).conj().imag)
    assert block.gate_proj.weight.is_neg()
    with torch.no_grad():
        frozen = block.freeze()
        torch.testing.assert_close(frozen(x), block(x), rtol=1e-5, atol=1e-6)
        for trace in (lambda: torch.jit.trace(frozen, (x,), check_trace=False), lambda: make_fx(frozen)(x)):
            with pytest.raises(swiglu.SwigluError, match="tracing"):
                trace()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for wrong in (None, x.numpy(), x.double()):
                with pytest.raises(swiglu.SwigluError):
                    frozen(wrong)
    assert not copy.deepcopy(frozen.eval()).training
