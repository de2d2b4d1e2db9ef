#!/usr/bin/env python3
"""Writes small whole files for the fuzz targets to begin with, which random bytes would not find.

    python3 scripts/make_fuzz_seeds.py DIR

DIR/TARGET holds those of a target: layers of every naming and type that is read, with scales, stacks, packed
weights and biases, GGUF of every kind of block, its parts, and arrays. The bytes of weights are arbitrary.
"""

import hashlib
import json
import pathlib
import struct
import sys

OUT = pathlib.Path(sys.argv[1])
BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "I32": 4}
# GGUF: number, elements of a block, its bytes.
BLOCKS = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "BF16": (30, 1, 2), "F64": (28, 1, 8),
    "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34),
    "Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110), "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210), "IQ2_XXS": (16, 256, 66), "IQ2_XS": (17, 256, 74), "IQ3_XXS": (18, 256, 98),
    "IQ1_S": (19, 256, 50), "IQ4_NL": (20, 32, 18), "IQ3_S": (21, 256, 110), "IQ2_S": (22, 256, 82),
    "IQ4_XS": (23, 256, 136), "IQ1_M": (29, 256, 56), "TQ1_0": (34, 256, 54), "TQ2_0": (35, 256, 66),
    "MXFP4": (39, 32, 17),
}
MLP = "model.layers.0.mlp."


def put(target, data):
    folder = OUT / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / hashlib.sha1(data).hexdigest()[:16]).write_bytes(data)


def noise(count):
    out = b""
    while len(out) < count:
        out += hashlib.sha256(struct.pack("<QQ", count, len(out))).digest()
    return bytes(b & 0x5F for b in out[:count])


def tensor(name, dtype, *shape):
    count = BYTES[dtype]
    for extent in shape:
        count *= extent
    return name, dtype, list(shape), noise(count)


def three(prefix, dtype, hidden=4, size=8):
    shapes = {"gate": (size, hidden), "up": (size, hidden), "down": (hidden, size)}
    return [tensor(f"{prefix}{role}_proj.weight", dtype, *shape) for role, shape in shapes.items()]


def beside(weights, name, dtype, *shape):
    """The weights, each with a tensor beside it; an extent of None is the weight's own."""
    more = []
    for weight, _, own, _ in weights:
        extents = [own[i] if extent is None else extent for i, extent in enumerate(shape)]
        more.append(tensor(weight.replace("weight", name), dtype, *extents))
    return weights + more


def safetensors(tensors, metadata=None):
    header, data = {}, b""
    if metadata:
        header["__metadata__"] = metadata
    for name, dtype, shape, content in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def safetensors_files():
    yield from (safetensors(three(MLP, dtype)) for dtype in ("F32", "F16", "BF16", "F64"))
    for dtype in ("F8_E4M3", "F8_E5M2", "I8"):
        weights = three(MLP, dtype, 32, 32)
        yield safetensors(beside(weights, "weight_scale", "F32", None, 1))
        yield safetensors(beside(weights, "weight_scale_inv", "BF16", 1, 1))
        yield safetensors(beside(weights, "weight_scale", "U8", None, 1))
        yield safetensors(beside(beside(weights, "weight_scale", "F32", 1), "weight_zero_point", "I8", 1)[:9])
        yield safetensors(beside(weights, "comfy_quant", "U8", 28))
    notes = {MLP + role + "_proj": {"format": "float8_e4m3fn"} for role in ("gate", "up", "down")}
    yield safetensors(
        beside(three(MLP, "F8_E4M3"), "weight_scale", "F32", 1),
        {"_quantization_metadata": json.dumps({"layers": notes})},
    )
    yield safetensors(
        [tensor(MLP + "gate_up_proj.weight", "F32", 16, 4), tensor(MLP + "down_proj.weight", "F32", 4, 8)],
        {"model_type": "phi3"},
    )
    experts = MLP + "experts."
    blocks = []
    for role, rows in (("gate_up", 4), ("down", 32)):
        blocks.append(tensor(f"{experts}{role}_proj_blocks", "U8", 2, rows, 1, 16))
        blocks.append(tensor(f"{experts}{role}_proj_scales", "U8", 2, rows, 1))
        blocks.append(tensor(f"{experts}{role}_proj_bias", "F32", 2, rows))
    yield safetensors(blocks, {"model_type": "gpt_oss"})
    yield safetensors(
        [tensor(experts + "gate_up_proj", "F32", 2, 4, 8), tensor(experts + "down_proj", "F32", 2, 4, 4)],
        {"model_type": "llama4"},
    )
    yield safetensors(
        [tensor(f"transformer.blocks.0.ffn.experts.mlp.{w}", "F32", 4, 2) for w in ("w1", "v1", "w2")],
        {"model_type": "dbrx"},
    )
    numbered = [t for expert in range(2) for t in three(f"{experts}{expert}.", "BF16", 2, 2)]
    yield safetensors(numbered + three(MLP + "shared_expert.", "BF16", 2, 2))
    yield safetensors(three("encoder.layers.0.mlp.", "F32", 2, 3) + three("decoder.layers.0.mlp.", "F32", 2, 3))
    yield safetensors(beside(three(MLP, "F32"), "bias", "F32", None))
    yield safetensors([tensor(f"layers.0.feed_forward.w{n}.weight", "F32", 3, 3) for n in (1, 2, 3)])
    t5 = "encoder.block.0.layer.1.DenseReluDense."
    yield safetensors([tensor(t5 + name, "F32", 2, 2) for name in ("wi_0.weight", "wi_1.weight", "wo.weight")])
    yield safetensors([tensor(MLP + "fc1.weight", "F32", 3, 2), tensor(MLP + "fc2.weight", "F32", 2, 3)])
    yield safetensors([tensor(MLP + "gate_proj.qweight", "I32", 2, 2), tensor(MLP + "gate_proj.g_idx", "I32", 2)])


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def key(name, kind, value):
    return text(name) + struct.pack("<I", kind) + value


def architecture(name):
    return key("general.architecture", 8, text(name))


def block(name, dtype, *extents):
    """Extents in GGUF's order, the adjacent one first."""
    number, elements, size = BLOCKS[dtype]
    count = 1
    for extent in extents:
        count *= extent
    return name, number, extents, noise(count // elements * size)


def gguf(tensors, keys, alignment=32):
    out, data = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(keys), b""
    for name, number, extents, content in tensors:
        out += text(name) + struct.pack("<I", len(extents)) + struct.pack(f"<{len(extents)}Q", *extents)
        out += struct.pack("<IQ", number, len(data))
        data += content + b"\0" * (-len(content) % alignment)
    return out + b"\0" * (-len(out) % alignment) + data


def ffn(gate, up, down, dtype, hidden, size, *stack):
    return [
        block(f"blk.0.ffn_{gate}.weight", dtype, hidden, size, *stack),
        block(f"blk.0.ffn_{up}.weight", dtype, hidden, size, *stack),
        block(f"blk.0.ffn_{down}.weight", dtype if size >= hidden else "F32", size, hidden, *stack),
    ]


def gguf_files():
    for dtype, (_, elements, _) in BLOCKS.items():
        hidden = max(elements, 4)
        size = hidden if hidden <= 32 else 2
        keys = [architecture("llama"), key("llama.embedding_length", 4, struct.pack("<I", hidden))]
        yield gguf(ffn("gate", "up", "down", dtype, hidden, size), keys)
    stack = ffn("gate_exps", "up_exps", "down_exps", "F32", 4, 4, 2)
    yield gguf(stack + [block("blk.0.ffn_gate_exps.scale", "F32", 2)], [architecture("qwen2moe")])
    packed = [block("blk.0.ffn_gate_up_exps.weight", "F32", 4, 6, 2), block("blk.0.ffn_down_exps.weight", "F32", 3, 4, 2)]
    yield gguf(packed, [architecture("qwen2moe")])
    yield gguf([block("blk.0.ffn_up.weight", "F32", 4, 6), block("blk.0.ffn_down.weight", "F32", 3, 4)], [architecture("phi3")])
    sizes = key("llama.feed_forward_length", 9, struct.pack("<IQII", 4, 2, 4, 4))
    aligned = key("general.alignment", 4, struct.pack("<I", 64))
    biases = [block("blk.0.ffn_gate.bias", "F32", 4)]
    yield gguf(ffn("gate", "up", "down", "F32", 4, 4) + biases, [architecture("llama"), sizes, aligned], 64)


def parts():
    """Two parts behind the byte that says where one ends: at so many 255ths of the whole."""
    gate, up, down = ffn("gate", "up", "down", "F32", 4, 4)

    def part(number, tensors):
        split = [key("split.no", 2, struct.pack("<H", number)), key("split.count", 2, struct.pack("<H", 2))]
        return gguf(tensors, [architecture("llama"), *split, key("split.tensors.count", 5, struct.pack("<i", 3))])

    first, second = part(0, [gate, up]), part(1, [down])
    for pad in range(1024):
        whole = len(first) + len(second) + pad
        for cut in range(256):
            if whole * cut // 255 == len(first):
                return bytes([cut]) + first + second + b"\0" * pad
    raise SystemExit("no cut falls between the parts")


def npy(descr, shape, order="False"):
    header = f"{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}"
    header += " " * (-(len(header) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + noise(64)


def main():
    for data in safetensors_files():
        put("safetensors", data)
        put("recognise", data)
    for data in gguf_files():
        put("gguf", data)
        put("recognise", data)
    put("parts", parts())
    for descr in ("<f4", ">f4", "<f2", "<f8", "|i1", "<V2", "|V2", "|b1"):
        for shape, order in (("(2, 3)", "False"), ("(2, 3)", "True"), ("(4,)", "False"), ("(1, 2, 3)", "False")):
            put("npy", npy(descr, shape, order))
    for index in ('{"weight_map":{"a.b":"x.safetensors","c":7}}', '{"error":"no"}', '\ufeff{"weight_map":{}}'):
        put("recognise", index.encode())
    for head in (b"PK\3\4" + b"\0" * 22 + b"\7\0\0\0a/b.npy", b"\x80\2}q\0", b"version https://git-lfs\nsize 7\n"):
        put("recognise", head)


main()
