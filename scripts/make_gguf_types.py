"""Makes crates/swiglu-formats/tests/data/gguf-types: blocks of every GGUF type, decoded by the Python package gguf.

    pip install numpy gguf && python3 scripts/make_gguf_types.py

TYPE.bin is eight random blocks, their f16 scales among them special ones, and then their values (f32,
little endian). digests.txt has, for each type, the digest of the values of COUNT blocks whose bytes are the
words of SplitMix64 (`swiglu_core::random::bits`), the type's number their seed: enough that every point of
every codebook and every scale of 8 bits is met. The digest is the sum modulo 2^64 of each value's bits times
word i of the stream with seed 1, made odd; NaN counts as 0x7fc00000.
"""

import pathlib

import gguf
import numpy as np
from gguf import quants

OUT = pathlib.Path(__file__).parent.parent / "crates/swiglu-formats/tests/data/gguf-types"
COUNT = 2048
# Zero, minus zero, subnormal, the largest, infinity, NaN, 1, a negative number.
SPECIAL = np.array([0x0000, 0x8000, 0x03FF, 0x7BFF, 0xFC00, 0x7E00, 0x3C00, 0xB555], np.uint16)
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,), "MXFP4": (),
          "NVFP4": (), "IQ1_M": (), **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))}


def words(seed, count):
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def random_blocks(seed, count, size):
    return words(seed, -(-count * size // 8)).view(np.uint8)[: count * size].reshape(count, size).copy()


def decoded(blocks, kind):
    with np.errstate(all="ignore"):
        return quants.dequantize(blocks, kind).astype("<f4")


def digest(values):
    bits = values.reshape(-1).view(np.uint32).copy()
    bits[np.isnan(values.reshape(-1))] = 0x7FC00000
    with np.errstate(over="ignore"):
        return int(np.sum(bits.astype(np.uint64) * (words(1, len(bits)) | np.uint64(1))))


def main():
    OUT.mkdir(exist_ok=True)
    digests = []
    for kind in sorted(quants._type_traits):
        if kind == gguf.GGMLQuantizationType.BF16:
            continue
        _, size = gguf.GGML_QUANT_SIZES[kind]
        few = random_blocks(1000 + int(kind), len(SPECIAL), size)
        for i, at in enumerate(HALVES.get(kind.name, (0,))):
            few[:, at:at + 2] = np.roll(SPECIAL, -i).view(np.uint8).reshape(-1, 2)
        if kind.name == "IQ1_M":
            for w in range(4):
                few[:, 49 + 2 * w] = few[:, 49 + 2 * w] & 15 | ((SPECIAL >> (4 * w) & 15) << 4)
        (OUT / f"{kind.name}.bin").write_bytes(few.tobytes() + decoded(few, kind).tobytes())
        many = digest(decoded(random_blocks(int(kind), COUNT, size), kind))
        digests.append(f"{kind.name} {int(kind)} {many:#018x}\n")
    (OUT / "digests.txt").write_text("".join(digests))


main()
