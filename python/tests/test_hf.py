"""Layers for `kernels`, classes of transformers, a folder for the hub, a plugin of vLLM."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import subprocess
import sys
import types

import pytest

pytest.importorskip("torch", reason="not run: no PyTorch")
pytest.importorskip("numpy", reason="not run: no numpy")

import swiglu
import swiglu.hf
import swiglu.torch as ops
import torch
from swiglu._patch import in_force
from test_ops import Here, device, tensor  # noqa: F401
from test_patch import Block, Scaled, expect_block
from torch import nn

F = nn.functional
TORCHS = {
    "SiluAndMul": lambda a, b: F.silu(a) * b,
    "MulAndSilu": lambda a, b: a * F.silu(b),
    "GeluAndMul": lambda a, b: F.gelu(a) * b,
    "GeluTanhAndMul": lambda a, b: F.gelu(a, approximate="tanh") * b,
}


def standing_for(name):
    """A model's own activation, which asks for a layer of this name."""
    kernels = pytest.importorskip("kernels", reason="not run: no kernels")

    @kernels.use_kernel_forward_from_hub(name)
    class Mine(nn.Module):
        def forward(self, x):
            return TORCHS[name](*x.chunk(2, -1))

    return Mine()


@pytest.mark.parametrize("name", TORCHS)
def test_layers_of_kernels(name, device):
    kernels = pytest.importorskip("kernels", reason="not run: no kernels")
    model = standing_for(name)
    x = tensor(4, 34, dtype=torch.bfloat16)
    expected = model(x)
    for mode in (kernels.Mode.INFERENCE, kernels.Mode.TRAINING, kernels.Mode.INFERENCE | kernels.Mode.TORCH_COMPILE):
        with kernels.use_kernel_mapping(swiglu.hf.mapping()):
            model = kernels.kernelize(standing_for(name), mode=mode, device=device)
        y = model(x)
        assert ops.explain_last().way == f"native {device}"
        if device == "cuda":
            assert torch.equal(y, expected)
        # Each operation is a unit of T off at most, and there are two.
        assert torch.all((y - expected).abs().float() <= 3 * 2.0**-8 * expected.abs().float() + 2.0**-133)


def test_blocks_of_kernels(device):
    kernels = pytest.importorskip("kernels", reason="not run: no kernels")
    layer = kernels.use_kernel_forward_from_hub("SwiGLUMLP")
    model = nn.ModuleList([layer(type("Mine", (Block,), {}))(), layer(type("Other", (Scaled,), {}))()])
    x = tensor(3, 8)
    with torch.no_grad():
        expected = model[1](x)
        with kernels.use_kernel_mapping(swiglu.hf.mapping()):
            model = kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device=device)
        expect_block(model[0], x, model[0](x))
        # What is no block of this kind is computed as before, and says why.
        assert torch.equal(model[1](x), expected)
        assert "computes something else" in ops.explain_last().reason


def test_registered_for_all():
    kernels = pytest.importorskip("kernels", reason="not run: no kernels")
    from kernels.layer import globals as kept

    swiglu.hf.register()
    assert {"SiluAndMul", "SwiGLUMLP"} <= set(kept._KERNEL_MAPPING.get())
    assert "layer `SiluAndMul`" in str(swiglu.hf.mapping()["SiluAndMul"]["cuda"])
    assert kernels.__version__


def small(transformers, kind, **more):
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=32, intermediate_size=60, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=50, head_dim=16, pad_token_id=0, **more,
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForCausalLM")(config).to(Here.device).eval()


@pytest.mark.parametrize("kind, name", [("Llama", "LlamaMLP"), ("Phi3", "Phi3MLP"), ("Gemma2", "Gemma2MLP")])
def test_classes_of_transformers(kind, name, device):
    transformers = pytest.importorskip("transformers", reason="not run: no transformers")
    torch.manual_seed(3)
    before = small(transformers, kind)
    ids = torch.arange(1, 13, device=device)[None]
    with torch.no_grad():
        expected = before(ids).logits
        assert swiglu.hf.apply(kind.lower()) == [name]
        try:
            assert swiglu.hf.apply(kind.lower()) == [name]
            found = before(ids).logits
            block = before.model.layers[0].mlp
            assert in_force(block), vars(block)["_swiglu_recognised"]
            # Parts in float32, whose differences two layers amplify a few times.
            assert (found - expected).abs().max() <= 64 * 2.0**-24 * expected.abs().max()
            changed = small(transformers, kind)
            changed.model.layers[0].mlp.down_proj.register_forward_hook(lambda m, i, y: 2 * y)
            changed(ids)
            assert in_force(changed.model.layers[0].mlp).level == "gated"
        finally:
            assert swiglu.hf.unapply() == [name]
        assert torch.equal(before(ids).logits, expected)


def test_subclasses_keep_their_forward():
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama", reason="not run: no transformers")
    from transformers import LlamaConfig

    class Doubled(modeling.LlamaMLP):
        def forward(self, x):
            return 2 * super().forward(x)

    class Own(modeling.LlamaMLP):
        def forward(self, x):
            return self.down_proj(self.gate_proj(x))

    class Same(modeling.LlamaMLP):
        pass

    config, x = LlamaConfig(hidden_size=32, intermediate_size=20), tensor(3, 32)
    model = nn.ModuleList([cls(config) for cls in (Doubled, Own, Same)]).to(Here.device)
    expected = [block(x) for block in model]
    swiglu.hf.apply("llama")
    try:
        Own.forward = functools.wraps(modeling.LlamaMLP.forward)(Own.forward)
        for _ in range(2):
            for block, y in zip(model, expected):
                torch.testing.assert_close(block(x), y)
            assert [m.level for m in swiglu.patch(model).modules][:2] == [None, None]
    finally:
        swiglu.unpatch(model)
        swiglu.hf.unapply()


def test_models_are_pickled_and_copied_after_their_first_call():
    transformers = pytest.importorskip("transformers", reason="not run: no transformers")
    model, ids = small(transformers, "Llama"), torch.arange(1, 13, device=Here.device)[None]
    swiglu.hf.apply("llama")
    try:
        expected = model(ids).logits
        for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
            assert torch.equal(again(ids).logits, expected)
            assert ops.explain_last().way != "original", ops.explain_last()
    finally:
        swiglu.hf.unapply()


def test_blocks_that_were_called_are_patched_as_others():
    transformers = pytest.importorskip("transformers", reason="not run: no transformers")
    model, ids = small(transformers, "Llama"), torch.arange(1, 13, device=Here.device)[None]
    block = model.model.layers[0].mlp
    swiglu.hf.apply("llama")
    try:
        model(ids)
        assert [m.level for m in swiglu.patch(model, level="gated", save="input").modules] == ["gated", "gated"]
        assert (in_force(block).level, in_force(block).save) == ("gated", "input")
        assert swiglu.unpatch(model) == 2 and swiglu.unpatch(model) == 0
        model(ids)
        assert in_force(block).level == "block"
    finally:
        swiglu.hf.unapply()
    assert in_force(block) is None and swiglu.unpatch(model) == 0
    assert len(swiglu.patch(model, strict=True).patched) == 2 and "forward" in vars(block)


def test_a_first_call_inside_a_trace_decides_nothing():
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama", reason="not run: no transformers")
    from torch.fx.experimental.proxy_tensor import make_fx
    from transformers import LlamaConfig

    block, x = modeling.LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=20)).to(Here.device), tensor(3, 32)
    swiglu.hf.apply("llama")
    try:
        torch.testing.assert_close(make_fx(block)(x)(x), block(x))
        assert in_force(block).level == "block"
    finally:
        swiglu.hf.unapply()


def test_models_that_there_are_not():
    pytest.importorskip("transformers", reason="not run: no transformers")
    # Of the last two the classes called ...MLP have no gate, or are around experts.
    for name in ("no_such_model", "auto", "mamba", "gpt2", "gpt_oss"):
        with pytest.raises(swiglu.SwigluError) as caught:
            swiglu.hf.apply(name)
        assert caught.value.kind in ("argument", "unsupported")


EXPORTED = """
import sys, torch
from pathlib import Path
from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_forward_from_hub, use_kernel_mapping
import swiglu.torch as installed

@use_kernel_forward_from_hub("SiluAndMul")
class Mine(torch.nn.Module):
    def forward(self, x):
        a, b = x.chunk(2, -1)
        return torch.nn.functional.silu(a) * b

device = sys.argv[2]
x = torch.randn(3, 10, device=device)
repository = LocalLayerRepository(Path(sys.argv[1]), layer_name="SiluAndMul")
with use_kernel_mapping({"SiluAndMul": {device: repository}}):
    model = kernelize(Mine(), mode=Mode.INFERENCE | Mode.TORCH_COMPILE, device=device)
assert torch.equal(model(x), installed.glu(x, numerics="eager"))
module = sys.modules[repository.load().__module__.rsplit(".", 2)[0]]
assert module.__name__ != "swiglu" and not torch.ops.swiglu is getattr(torch.ops, module.torch._ops.LIBRARY.ns)
print(module.torch.explain_last())
"""


def test_a_folder_for_the_hub(tmp_path, device):
    kernels = pytest.importorskip("kernels", reason="not run: no kernels")
    if "package_name" in inspect.signature(kernels.LocalLayerRepository).parameters:
        pytest.skip(f"not run: kernels {kernels.__version__} asks for another folder")
    done = subprocess.run(
        [sys.executable, "-m", "swiglu.hf", "export", str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert len(done.stdout.splitlines()) == 3
    run = [sys.executable, "-c", EXPORTED, str(tmp_path), device]
    done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"glu: native {device}" in done.stdout


@pytest.fixture
def vllm(monkeypatch):
    """The part of vLLM that its plugins meet: a class of a registered name is made in the place of its own."""
    registry = {}

    class CustomOp(nn.Module):
        def __new__(cls, *args, **kwargs):
            return super().__new__(registry.get(cls.__name__, cls))

        @classmethod
        def register_oot(cls, name):
            def decorate(op):
                assert name not in registry
                registry[name] = op
                return op

            return decorate

        def forward(self, *args):
            return (self.forward_cuda if Here.device == "cuda" else self.forward_cpu)(*args)

    activation = types.ModuleType("vllm.model_executor.layers.activation")

    class SiluAndMul(CustomOp):
        pass

    class GeluAndMul(CustomOp):
        def __init__(self, approximate="none"):
            super().__init__()
            self.approximate = approximate

    class SwigluOAIAndMul(CustomOp):
        def __init__(self, alpha=1.702, limit=7.0):
            super().__init__()
            self.alpha, self.limit = alpha, limit

    for op in (SiluAndMul, GeluAndMul, SwigluOAIAndMul):
        setattr(activation, op.__name__, op)
    custom_op = types.ModuleType("vllm.model_executor.custom_op")
    custom_op.CustomOp = CustomOp
    layers = types.ModuleType("vllm.model_executor.layers")
    layers.activation = activation
    for module in (types.ModuleType("vllm"), types.ModuleType("vllm.model_executor"), layers, custom_op, activation):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("swiglu.vllm._registered", [])
    return activation


def test_the_plugin_of_vllm(vllm, device):
    import swiglu.vllm

    assert swiglu.vllm.register() == ["SiluAndMul", "GeluAndMul", "SwigluOAIAndMul"]
    assert swiglu.vllm.register() == []
    x = 3 * tensor(5, 32)
    a, b = x.chunk(2, -1)
    gate, up = x[:, ::2].clamp(max=7), x[:, 1::2].clamp(-7, 7)
    for op, expected in [
        (vllm.SiluAndMul(), F.silu(a) * b),
        (vllm.GeluAndMul(), F.gelu(a) * b),
        (vllm.GeluAndMul("tanh"), F.gelu(a, approximate="tanh") * b),
        (vllm.SwigluOAIAndMul(), gate * torch.sigmoid(1.702 * gate) * (up + 1)),
    ]:
        torch.testing.assert_close(op(x), expected)
        assert ops.explain_last().way == f"native {device}"
