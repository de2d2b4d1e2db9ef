"""Without PyTorch: numpy and DLPack, in and out."""

from __future__ import annotations

import copy
import json
import multiprocessing
import pickle
import struct
import subprocess
import sys
import threading

import pytest

np = pytest.importorskip("numpy", reason="not run: no numpy")

import swiglu
from reference import FAMILY, activation, activation_bound


def values(rng, *shape, dtype="float32"):
    return (3 * rng.standard_normal(shape)).astype(dtype)


def expect(act, gate, up, h):
    exact = activation(act, gate.astype(float), up.astype(float))
    bound = activation_bound(act, gate.astype(float), up.astype(float), str(h.dtype))
    assert np.all(np.abs(h.astype(float) - exact) <= bound)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", FAMILY)
def test_activations_are_within_their_bounds(name, dtype):
    rng = np.random.default_rng(1)
    gate, up = values(rng, 3, 257, dtype=dtype), values(rng, 3, 257, dtype=dtype)
    expect(swiglu.Activation(name), gate, up, swiglu.silu_mul(gate, up, activation=name))


def test_every_layout_gives_the_bits_of_separate_arrays():
    rng = np.random.default_rng(2)
    gate, up = values(rng, 5, 12), values(rng, 5, 12)
    h = swiglu.silu_mul(gate, up)
    assert np.array_equal(swiglu.glu(np.concatenate([gate, up], 1)), h)
    assert np.array_equal(swiglu.glu(np.concatenate([up, gate], 1), layout="up-first"), h)
    for group, layout in ((1, "interleaved"), (4, "interleaved-4")):
        x = np.stack([gate.reshape(5, -1, group), up.reshape(5, -1, group)], 2).reshape(5, 24)
        assert np.array_equal(swiglu.glu(x, layout=layout), h)


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a,
        lambda a: a.transpose(1, 0, 2),
        lambda a: a[..., ::-1],
        lambda a: a[::2, 1:, ::3],
        lambda a: np.broadcast_to(a[:1, :1], a.shape),
        lambda a: np.broadcast_to(a[..., :1], a.shape),
        lambda a: a[:0],
        lambda a: a[0, 0],
        lambda a: a.astype(">f4"),
        lambda a: np.asfortranarray(a),
    ],
)
def test_any_strides(view):
    rng = np.random.default_rng(3)
    gate, up = view(values(rng, 4, 3, 7)), view(values(rng, 4, 3, 7))
    h = swiglu.silu_mul(gate, up)
    dense = [np.ascontiguousarray(a).astype(np.float32) for a in (gate, up)]
    assert h.shape == gate.shape and np.array_equal(h, swiglu.silu_mul(*dense))


def test_unaligned_arrays_and_outputs_of_any_strides():
    raw = np.zeros(4 * 8 + 1, np.uint8)
    gate = raw[1:].view(np.float32)
    gate[:] = np.arange(8) - 4
    up = np.ones(8, np.float32)
    out = np.zeros(16, np.float32)[::2]
    assert swiglu.silu_mul(gate, up, out=out) is out
    assert np.array_equal(out, swiglu.silu_mul(gate.copy(), up))


def test_an_output_may_be_an_input():
    rng = np.random.default_rng(4)
    x = values(rng, 6, 8)
    expected = swiglu.glu(x.copy())
    swiglu.glu(x, out=x[:, 2:6])
    assert np.array_equal(x[:, 2:6], expected)


def test_shapes_that_disagree_are_a_value_error_with_both():
    with pytest.raises(ValueError, match=r"up: expected \[2, 3\], given \[3, 2\]") as caught:
        swiglu.silu_mul(np.zeros((2, 3), np.float32), np.zeros((3, 2), np.float32))
    assert isinstance(caught.value, swiglu.ShapeError)
    assert (caught.value.kind, caught.value.expected, caught.value.given) == ("shape", "[2, 3]", "[3, 2]")
    with pytest.raises(ValueError, match="even number"):
        swiglu.glu(np.zeros((2, 3), np.float32))
    with pytest.raises(ValueError, match="scalar"):
        swiglu.silu_mul(np.zeros((), np.float32), np.zeros((), np.float32))
    with pytest.raises(ValueError, match="scalar"):
        swiglu.glu(np.zeros((), np.float32))


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda a: swiglu.silu_mul(a, a, activation="swish"), "argument"),
        (lambda a: swiglu.silu_mul(a, a, numerics="exact"), "argument"),
        (lambda a: swiglu.glu(a, layout="sideways"), "argument"),
        (lambda a: swiglu.silu_mul(a, a.astype("float16")), "dtype"),
        (lambda a: swiglu.silu_mul(a.astype(float), a.astype(float)), "dtype"),
        (lambda a: swiglu.silu_mul(a.astype(int), a), "dtype"),
        (lambda a: swiglu.silu_mul(a, a, activation=3), "argument"),
        (lambda a: swiglu.silu_mul(a, a, numerics=3), "argument"),
        (lambda a: swiglu.glu(a, layout=None), "argument"),
        (lambda a: swiglu.glu(a, layout="separate"), "argument"),
        (lambda a: swiglu.silu_mul(a, a, out=a.astype(">f4")), "layout"),
        (lambda a: swiglu.silu_mul(np.ma.masked_array(a, a > 0), a), "argument"),
        (lambda a: swiglu.load("no-such-file.gguf"), "not_found"),
        (lambda a: swiglu.load(__file__), "unsupported"),
        (lambda a: swiglu.silu_mul(a, a, out=np.broadcast_to(a, a.shape)), "unsupported"),
    ],
)
def test_other_errors_are_runtime_errors_with_a_kind(call, kind):
    with pytest.raises(RuntimeError) as caught:
        call(np.zeros((2, 4), np.float32))
    assert isinstance(caught.value, swiglu.SwigluError) and caught.value.kind == kind, caught.value


@pytest.mark.parametrize("wrong", [[1.0], None, (1, 2), 3.0, "x", np.float32(1), np.ndarray], ids=str)
def test_what_is_no_array_is_named_and_said(wrong, layer_file):
    a = np.zeros((2, 288), np.float32)
    layer = swiglu.load(layer_file, device="cpu")
    for what, call in [
        ("gate", lambda: swiglu.silu_mul(wrong, a)),
        ("up", lambda: swiglu.silu_mul(a, wrong)),
        ("x", lambda: swiglu.glu(wrong)),
        ("x", lambda: layer(wrong)),
        ("out", lambda: layer.forward_into(a, wrong)),
    ]:
        with pytest.raises(swiglu.SwigluError, match=rf"^{what}: expected an array .*, given ") as caught:
            call()
        assert (caught.value.kind, caught.value.what) == ("argument", what) and caught.value.given


class Lender:
    """An array of a library that is not numpy."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_dlpack_in_and_out():
    rng = np.random.default_rng(5)
    gate, up = values(rng, 2, 3, 5), values(rng, 2, 3, 5)
    made = swiglu.silu_mul(Lender(gate), Lender(up))
    assert isinstance(made, swiglu.Array) and made.shape == (2, 3, 5) and made.dtype == "f32"
    first, second = np.from_dlpack(made), np.from_dlpack(made)
    del made
    assert np.array_equal(first, swiglu.silu_mul(gate, up)) and np.shares_memory(first, second)
    into = np.zeros_like(gate)
    swiglu.silu_mul(Lender(gate), Lender(up), out=Lender(into))
    assert np.array_equal(into, first)
    with pytest.raises(RuntimeError, match="convert it"):
        swiglu.silu_mul(Lender(gate.astype(float)), Lender(up.astype(float)))


def test_a_capsule_nobody_takes_is_given_back():
    made = swiglu.silu_mul(Lender(np.ones((2, 2), np.float32)), Lender(np.ones((2, 2), np.float32)))
    capsule = made.__dlpack__()
    del made, capsule
    lent = swiglu.silu_mul(Lender(np.ones((2, 2), np.float32)), Lender(np.ones((2, 2), np.float32))).__dlpack__()

    class Twice:
        def __dlpack__(self):
            return lent

    taken = swiglu.silu_mul(Twice(), Lender(np.ones((2, 2), np.float32)))
    assert taken.shape == (2, 2)
    for wrong in (Twice(), type("Numbers", (), {"__dlpack__": lambda self: 3})()):
        with pytest.raises(swiglu.SwigluError, match="DLPack does not lend") as caught:
            swiglu.silu_mul(wrong, wrong)
        assert caught.value.kind == "unsupported"


def test_a_layer_of_a_file(layer_file):
    layer = swiglu.load(layer_file, 0, device="cpu")
    assert (layer.kind, layer.hidden, layer.intermediate, layer.out_features) == ("mlp", 288, 768, 288)
    x = np.random.default_rng(6).standard_normal((2, 3, 288)).astype(np.float32)
    y = layer(x)
    assert y.shape == x.shape and np.array_equal(np.from_dlpack(layer(Lender(x))), y)
    # Rows are independent of how they are arranged.
    assert np.array_equal(layer(x.reshape(6, 288)), y.reshape(6, 288))
    into = np.zeros((3, 2, 288), np.float32).transpose(1, 0, 2)
    assert np.array_equal(layer.forward_into(x, into), y)
    assert layer(np.zeros((0, 288), np.float32)).shape == (0, 288)
    gated = swiglu.load(layer_file, kind="gated_linear", device="cpu", activation="geglu", dtype="f16")
    assert (gated.out_features, gated.dtype, str(gated.activation)) == (768, "f16", "geglu")
    with pytest.raises(ValueError, match=r"x: expected \[..., 288\], given \[2, 287\]"):
        layer(np.zeros((2, 287), np.float32))
    with pytest.raises(swiglu.SwigluError, match="expected f32"):
        layer(np.zeros((2, 288), np.float16))


#: Arguments of load, and what is said of them.
REFUSED = [
    ({"layer": -1}, "argument", "layer: expected a whole number from 0 on, given -1"),
    ({"layer": "a"}, "argument", "layer: expected a whole number from 0 on, given 'a'"),
    ({"layer": True}, "argument", "given True"),
    ({"layer": 2**70}, "argument", "layer: expected"),
    ({"path": None}, "argument", "path: expected a path: str or os.PathLike, given None"),
    ({"kind": None}, "argument", "choose one of: mlp, gated_linear"),
    ({"device": 3}, "argument", "device: expected best, cpu, cuda or cuda:N, given 3"),
    ({"dtype": float}, "argument", "dtype: expected f32, f16 or bf16, given a type"),
    ({"dtype": "f64"}, "argument", "unknown dtype `f64`"),
    ({"activation": 3}, "argument", "unknown activation `3`"),
    ({"numerics": 3}, "argument", "unknown rounding `3`"),
    ({"expert": -1}, "argument", "expert: expected a whole number"),
    ({"expert": 1}, "not_found", "expert 1"),
    ({"orientation": "x"}, "argument", "choose one of: out-in, in-out"),
    ({"arrangement": 1}, "argument", "arrangement: expected"),
    ({"names": {"gat": "a"}}, "argument", "choose one of: gate, up, down"),
    ({"names": ["a"]}, "argument", "names: expected a dictionary"),
    ({"ignore": "a"}, "argument", "ignore: expected a sequence of names, given 'a'"),
    ({"rescale": 65}, "argument", "rescale: expected a power of two from -64 to 64"),
]


@pytest.mark.parametrize(("given", "kind", "text"), REFUSED, ids=lambda v: str(v) if isinstance(v, dict) else "")
def test_arguments_of_load_are_refused_in_pythons_words(layer_file, given, kind, text):
    with pytest.raises(swiglu.SwigluError) as caught:
        swiglu.load(**{"path": layer_file, "device": "cpu", **given})
    assert caught.value.kind == kind and text in str(caught.value), caught.value


def test_tokens_are_whole_numbers(layer_file):
    layer = swiglu.load(str(layer_file).encode(), device="cpu")
    assert layer.plan(np.int64(3)) == layer.plan(3)
    for wrong in (-1, 1.5, "a", None, 2**70):
        for call in (layer.plan, layer.explain, lambda m: swiglu.explain(layer, m)):
            with pytest.raises(swiglu.SwigluError, match="tokens: expected a whole number from 0 to 2147483647"):
                call(wrong)
    with pytest.raises(swiglu.SwigluError, match="expected a swiglu.Layer, .*, given None"):
        swiglu.explain(None)
    with pytest.raises(swiglu.SwigluError, match="call swiglu.load"):
        swiglu.Layer(None)


def write(path, **tensors):
    """A safetensors file with one block's tensors of float32; ``__`` is a dot."""
    header, data = {}, b""
    for name, array in tensors.items():
        end = len(data) + array.nbytes
        header[name.replace("__", ".")] = {"dtype": "F32", "shape": array.shape, "data_offsets": [len(data), end]}
        data += array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def block(of="model__layers__0__mlp__"):
    rng = np.random.default_rng(10)
    shapes = {"gate_proj": (10, 6), "up_proj": (10, 6), "down_proj": (6, 10)}
    return {f"{of}{name}__weight": rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def test_what_a_file_does_not_decide_names_the_argument_that_does(tmp_path):
    file = tmp_path / "model.safetensors"

    def refused(text, **given):
        with pytest.raises(swiglu.SwigluError) as caught:
            swiglu.load(tmp_path, device="cpu", **given)
        told = [str(caught.value), str(caught.value.what), str(caught.value.expected)]
        assert text in told[0] and not any("::" in part for part in told), told

    write(file, **block())
    (tmp_path / "config.json").write_text('{"model_type": "mystery"}')
    refused("`activation` chooses one of: swiglu")
    assert str(swiglu.load(tmp_path, device="cpu", activation="geglu").activation) == "geglu"
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_act": "silu", "intermediate_size": 11}')
    refused('`ignore=["intermediate_size"]` goes by the tensors, `config=False` does without')
    ignored = swiglu.load(tmp_path, device="cpu", ignore=["intermediate_size"])
    assert repr(ignored) == repr(swiglu.load(tmp_path, device="cpu", config=False))
    (tmp_path / "config.json").unlink()

    half = block()
    half.pop("model__layers__0__mlp__down_proj__weight")
    write(file, **half)
    refused('`kind="gated_linear"`')
    assert swiglu.load(file, device="cpu", kind="gated_linear").out_features == 10

    experts = [block(f"model__layers__0__mlp__experts__{e}__") for e in range(2)]
    write(file, **experts[0], **{name: 2 * w for name, w in experts[1].items()})
    refused("`expert`: 0 to 1; or `beside_experts=True`")
    x = np.ones((2, 6), np.float32)
    first, second = (swiglu.load(file, device="cpu", expert=e)(x) for e in range(2))
    assert not np.allclose(first, second)

    gate, up, down = block().values()
    write(file, a=gate, b=up, c=down)
    refused('names["gate"]` and `names["up"]')
    names = {"gate": "a", "up": "b", "down": "c"}
    refused("`orientation`: out-in", names=names)
    named = swiglu.load(file, device="cpu", names=names, orientation="out-in")
    write(file, **block())
    assert np.array_equal(named(x), swiglu.load(file, device="cpu")(x))
    write(file, model__layers__0__mlp__gate_up_proj__weight=np.concatenate([gate, up]), **dict([list(block().items())[2]]))
    refused("`arrangement`: gate-first, up-first")
    assert np.array_equal(swiglu.load(file, device="cpu", arrangement="gate-first")(x), named(x))


def test_weights_that_are_not_finite_are_refused_unless_asked_for(tmp_path):
    file, tensors = tmp_path / "layer.safetensors", block()
    down = tensors["model__layers__0__mlp__down_proj__weight"]
    x = np.ones((2, 6), np.float32)
    for value in (np.nan, np.inf):
        down[1, 2] = value
        write(file, **tensors)
        with pytest.raises(swiglu.SwigluError, match=r"down_proj.weight\[1, 2\] .*allow_non_finite=True") as caught:
            swiglu.load(file, device="cpu")
        assert caught.value.kind == "not_finite"
        # The half of the block that is loaded has none.
        assert np.isfinite(swiglu.load(file, device="cpu", kind="gated_linear")(x)).all()
        y = swiglu.load(file, device="cpu", allow_non_finite=True)(x)
        assert not np.isfinite(y[:, 1]).any() and np.isfinite(np.delete(y, 1, 1)).all()
    # A number that is none of the layer's type.
    down[1, 2] = 1e6
    write(file, **tensors)
    swiglu.load(file, device="cpu", dtype="bf16")
    with pytest.raises(swiglu.SwigluError, match=r"down weight as f16\[1, 2\] is inf"):
        swiglu.load(file, device="cpu", dtype="f16")
    # Inputs are the caller's, as numpy's functions take them.
    x[0] = np.nan
    y = swiglu.load(file, device="cpu")(x)
    assert np.isnan(y[0]).all() and np.isfinite(y[1]).all()


def test_values_and_constants_are_copied(layer_file):
    act, layer = swiglu.Activation("geglu"), swiglu.load(layer_file, device="cpu")
    assert pickle.loads(pickle.dumps(act)) == copy.deepcopy(act) == swiglu.Activation(act)
    assert len({act, swiglu.Activation("geglu")}) == 1
    assert copy.copy(layer) is layer and copy.deepcopy(layer) is layer
    with pytest.raises(swiglu.SwigluError, match="load the file there") as caught:
        pickle.dumps(layer)
    assert caught.value.kind == "unsupported"


def test_explanations_and_info(layer_file):
    layer = swiglu.load(layer_file, device="cpu")
    explanation = swiglu.explain(layer, 4)
    # As it is shown by an interpreter, and in a notebook.
    assert repr(explanation) == str(explanation) == explanation.text and "<pre>" in explanation._repr_html_()
    assert "plan" in str(explanation) and explanation.data["problem"]["m"] == 4
    assert layer.plan(4) in explanation.text and "<pre>" in layer._repr_html_()
    found = swiglu.info()
    assert found["version"] == swiglu.__version__
    assert any(device["name"] == "cpu" and device["device"] for device in found["devices"])


def test_threads_get_what_one_gets(layer_file):
    layer = swiglu.load(layer_file, device="cpu")
    rng = np.random.default_rng(7)
    inputs = [rng.standard_normal((n, 288)).astype(np.float32) for n in (1, 2, 5, 17) * 4]
    expected = [layer(x) for x in inputs]
    results = [None] * len(inputs)

    def work(i):
        results[i] = layer(inputs[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert all(np.array_equal(a, b) for a, b in zip(results, expected))


def _in_a_child(layer, x, expected, queue):
    new = swiglu.silu_mul(x, x)
    queue.put((np.array_equal(layer(x), expected), new.shape == x.shape))


def test_nobody_opens_a_device_while_the_process_forks(layer_file):
    # A child has one thread: what another one holds at the fork, nobody gives back there.
    opened = threading.Event()

    def open_one():
        swiglu.load(layer_file, 0, device="cpu")
        opened.set()

    thread = threading.Thread(target=open_one)
    swiglu._native.before_fork()
    try:
        thread.start()
        assert not opened.wait(0.3)
    finally:
        swiglu._native.after_fork_in_parent()
    thread.join(60)
    assert opened.is_set()


@pytest.mark.skipif(sys.platform != "linux", reason="not run: no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_a_forked_process_computes(layer_file):
    layer = swiglu.load(layer_file, device="cpu")
    x = np.random.default_rng(8).standard_normal((64, 288)).astype(np.float32)
    expected = layer(x)
    swiglu.silu_mul(x, x)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_a_child, args=(layer, x, expected, queue))
    child.start()
    assert queue.get(timeout=60) == (True, True)
    child.join(timeout=60)


def test_pytorch_is_not_imported():
    code = "import sys, swiglu, numpy; swiglu.info(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_bfloat16_of_numpy():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="not run: no ml_dtypes")
    rng = np.random.default_rng(9)
    gate, up = (values(rng, 3, 65).astype(ml_dtypes.bfloat16) for _ in range(2))
    h = swiglu.silu_mul(gate, up)
    assert h.dtype == gate.dtype
    expect(swiglu.Activation("swiglu"), gate, up, h)


def test_arrays_without_elements_lie_nowhere():
    """PyTorch's have one address, 0."""
    nowhere = (0, (0, 5), (5, 1), "f32", True)
    swiglu._native.activation_backward(swiglu.Activation("swiglu"), None, None, *[nowhere] * 5)
    memory = np.zeros((1, 5), "float32")
    one = (memory.ctypes.data, (1, 5), (5, 1), "f32", True)
    with pytest.raises(swiglu.SwigluError, match="same memory"):
        swiglu._native.activation_backward(swiglu.Activation("swiglu"), None, None, *[one] * 5)
