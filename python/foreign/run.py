"""Runs tests of other projects with our operators in the place of theirs, and prints a table.

    python python/foreign/run.py [--into DIR] [liger] [convergence] [quack] [transformers]

Sources come from PyPI; nothing of them is kept in this repository. Each suite runs in a
process of its own, with a plugin of this directory that says what is replaced. What is deselected is listed with its reason.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Dict, List, Optional, Tuple

HERE = Path(__file__).resolve().parent


@dataclass
class Suite:
    name: str
    source: Callable[[Path], Path]
    tests: List[str]
    plugin: str
    #: Directories of the source that are imported from.
    path: List[str]
    #: Which tests of a file do not run, by a part of their name, and why.
    deselected: List[Tuple[str, str]] = field(default_factory=list)
    #: Changes of the copied tests, where there is no GPU.
    on_cpu: List[Tuple[str, str]] = field(default_factory=list)
    #: Packages that only it needs.
    needs: List[str] = field(default_factory=list)


def sdist(package: str, version: str) -> Callable[[Path], Path]:
    def fetch(into: Path) -> Path:
        name = f"{package.replace('-', '_')}-{version}"
        if not (into / name).exists():
            archive = into / f"{name}.tar.gz"
            if not archive.exists():
                pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
                subprocess.run([*pip, "--no-binary", ":all:", "-d", str(into), f"{package}=={version}"], check=True)
            with tarfile.open(archive) as packed:
                packed.extractall(into, filter="data")
        return into / name

    return fetch


def transformers(into: Path) -> Path:
    """The version that is installed; its archive has the tests that all models share, but for those of generation."""
    from importlib.metadata import version

    return sdist("transformers", version("transformers"))(into)


#: Of Liger-Kernel's small models.
MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss", "qwen3_vl_moe")

SUITES = [
    Suite(
        "liger",
        sdist("liger-kernel", "0.8.5"),
        [
            "test/transformers/test_swiglu.py",
            "test/transformers/test_geglu.py",
            "test/transformers/test_mlp.py",
            "test/megatron/test_swiglu.py",
        ],
        "liger_gated",
        ["src", "."],
        [
            ("test_correctness_mixtralexperts", "a mixture of experts, which is no operator here"),
            ("test_swiglu_blackwell_tiled", "tests how Liger tiles its own kernel"),
            ("test_in_place_backward_clobbers", "pins that Liger's option in_place destroys its input; ours never does"),
            ("test_in_place_rejects_a_second_backward", "the same option: a second backward is right here"),
        ],
    ),
    Suite(
        "convergence",
        sdist("liger-kernel", "0.8.5"),
        ["test/convergence/fp32/test_mini_models.py"],
        "liger_convergence",
        ["src", "."],
        [
            *((f"[mini_{name}-", "all of its blocks are mixtures of experts") for name in MIXTURES),
            ("[mini_deepseek_v4-", "its blocks clamp, which `patch` sees and leaves alone"),
            ("[mini_nemotron-", "its blocks have no gate"),
        ],
        [("batch_size=16", "batch_size=2"), ("in range(num_steps)", "in range(8)")],
    ),
    Suite(
        "quack",
        sdist("quack-kernels", "0.6.5"),
        ["tests/test_mlp.py", "tests/test_linear.py"],
        "quack_gated",
        [],
        [
            ("gelu_tanh_approx", "an activation without a gate"),
            ("[relu-", "an activation without a gate"),
            ("-relu-", "an activation without a gate"),
            ("relu]", "an activation without a gate"),
            ("-tanh", "an approximation of the sigmoid that is quack's own"),
            ("fuse_grad_accum", "an option of quack's: gradients added in its kernels"),
            ("test_linear[", "a linear map without a gate"),
            ("test_linear_act[", "a linear map without a gate"),
            ("test_linear_func_empty", "a linear map without a gate"),
            ("test_linear_act_func_empty", "a linear map without a gate"),
            ("test_autocast[linear_func", "a linear map without a gate"),
            ("test_autocast[linear_act_func", "a linear map without a gate"),
            ("test_autocast[mlp_func", "an activation without a gate"),
            ("test_autocast[False-linear_func", "a linear map without a gate"),
            ("test_autocast[False-linear_act_func", "a linear map without a gate"),
            ("test_autocast[False-mlp_func", "an activation without a gate"),
            ("test_autocast[True-linear_func", "a linear map without a gate"),
            ("test_autocast[True-linear_act_func", "a linear map without a gate"),
            ("test_autocast[True-mlp_func", "an activation without a gate"),
            ("test_gemm[", "a product without a gate"),
            ("test_gemm_concat_layout", "a product without a gate"),
            ("test_gemm_act_alpha", "a product without a gate"),
            ("test_gemm_dact[", "a product without a gate"),
            ("test_gemm_add", "a product without a gate"),
            ("test_gemm_gated_pingpong_configs", "tests how quack configures its own kernel"),
            ("test_gemm_stochastic_rounding", "a product without a gate"),
            ("test_gemm_sr_different_seeds", "a product without a gate"),
            ("test_rms_final_reduce", "a norm"),
            ("test_gemm_rms", "a norm"),
            ("test_gemm_norm", "a norm"),
            ("test_gemm_empty", "a product without a gate"),
        ],
        [
            ('device = "cuda"', 'device = "cpu"'),
            ('device="cuda"', 'device="cpu"'),
            ('autocast("cuda"', 'autocast("cpu"'),
            # Sizes for a GPU.
            ("[736, 4096]", "[736]"),
            ("[1504, 2048]", "[328]"),
            ("m = 1920", "m = 96"),
            ("m = 960", "m = 96"),
            ("4096, 4096, 4096", "96, 64, 128"),
        ],
    ),
    Suite(
        "transformers",
        transformers,
        [str(HERE / "transformers_llama.py")],
        "counted",
        ["."],
        [("test_generation_tester_mixin_inheritance", "the tests of generation are not in the package's archive")],
        needs=["parameterized"],
    ),
]

#: Of `test_gemm_dgated`: whether a scale and a sum of each row, which are quack's, are asked for.
DGATED = re.compile(r"test_gemm_dgated\[[^\]]*True")


def why_not(suite: Suite, test: str) -> Optional[str]:
    if suite.name == "quack" and DGATED.search(test):
        return "a scale or a sum of each row, in quack's kernel"
    return next((why for part, why in suite.deselected if part in test), None)


def run(suite: Suite, into: Path, arguments: List[str]) -> Dict[str, int]:
    import torch

    source = suite.source(into)
    packages = into / f"{suite.name}-packages"
    if suite.needs and not packages.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages)]
        subprocess.run([*pip, *suite.needs], check=True)
    for test in suite.tests if suite.on_cpu else ():
        file = source / test
        kept = file.with_suffix(".original")
        if not kept.exists():
            kept.write_text(file.read_text("utf-8"), "utf-8")
        text = kept.read_text("utf-8")
        if not torch.cuda.is_available():
            for old, new in suite.on_cpu:
                text = text.replace(old, new)
        file.write_text(text, "utf-8")
    paths = [str(HERE), str(packages), *(str(source / part) for part in suite.path), os.environ.get("PYTHONPATH", "")]
    report = into / f"{suite.name}.json"
    report.unlink(missing_ok=True)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "FOREIGN_SUITE": suite.name, "FOREIGN_REPORT": str(report)}
    env["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestWarning", "-p", "counted", "-p", suite.plugin]
    command += ["-c", os.devnull, "--rootdir", str(source), *suite.tests]
    subprocess.run([*command, *arguments], cwd=source, env=env, check=False)
    found: Dict[str, int] = json.loads(report.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", help=", ".join(suite.name for suite in SUITES))
    parser.add_argument("--into", type=Path, default=HERE.parents[1] / "target/foreign")
    given, pytest_arguments = parser.parse_known_args()
    given.into = given.into.resolve()
    given.into.mkdir(parents=True, exist_ok=True)
    rows = []
    for suite in SUITES:
        if given.suites and suite.name not in given.suites:
            continue
        try:
            counts = run(suite, given.into, pytest_arguments)
        except (OSError, subprocess.CalledProcessError) as missing:
            rows.append(f"| {suite.name} | not run: {missing} | | | |")
            continue
        rows.append(f"| {suite.name} | " + " | ".join(str(counts[k]) for k in ("passed", "failed", "skipped", "deselected")) + " |")
    print("| suite | passed | failed | skipped by itself | deselected |\n|---|---|---|---|---|")
    print("\n".join(rows))
    sys.exit(any("not run" in row or row.split("|")[3].strip() != "0" for row in rows))


if __name__ == "__main__":
    main()
