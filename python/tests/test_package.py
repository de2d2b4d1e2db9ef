"""What is installed: the module's stubs, what it is linked with, what is in the package."""

from __future__ import annotations

import ast
import inspect
import shutil
import subprocess
from pathlib import Path

import pytest

import swiglu
from swiglu import _native

PACKAGE = Path(swiglu.__file__).parent
#: Of the family of libc, which every Linux has.
SYSTEM = ("libc.so", "libm.so", "libgcc_s.so", "libdl.so", "libpthread.so", "librt.so", "ld-linux", "ld64")


def declared():
    return ast.parse((PACKAGE / "_native.pyi").read_text()).body


def public(names):
    return {name for name in names if not name.startswith("_")}


def parameters_declared(function):
    """(name, whether by keyword only, whether there is a default), without self."""
    a = function.args
    optional = len(a.args) - len(a.defaults)
    found = [(p.arg, False, i >= optional) for i, p in enumerate(a.args) if p.arg not in ("self", "cls")]
    return found + [(p.arg, True, default is not None) for p, default in zip(a.kwonlyargs, a.kw_defaults)]


def parameters_found(function):
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.kind is p.KEYWORD_ONLY, p.default is not p.empty) for p in found if p.name != "self"]


def is_property(function):
    return any(isinstance(d, ast.Name) and d.id == "property" for d in function.decorator_list)


def test_stubs_are_what_the_module_has():
    declarations = [d for d in declared() if isinstance(d, (ast.FunctionDef, ast.ClassDef))]
    assert {d.name for d in declarations} == public(dir(_native))
    for declaration in declarations:
        there = getattr(_native, declaration.name)
        if isinstance(declaration, ast.FunctionDef):
            assert parameters_declared(declaration) == parameters_found(there), declaration.name
        elif not issubclass(there, Exception):
            members = {m.name: m for m in declaration.body if isinstance(m, ast.FunctionDef)}
            assert public(members) == public(dir(there)), declaration.name
            for name, member in members.items():
                if is_property(member):
                    assert inspect.isgetsetdescriptor(inspect.getattr_static(there, name)), name
                elif name == "__new__":
                    assert parameters_declared(member) == parameters_found(there), declaration.name
                elif name != "__eq__":
                    assert parameters_declared(member) == parameters_found(getattr(there, name)), name
        else:
            assert {b.id for b in declaration.bases} == {b.__name__ for b in there.__bases__}


def test_the_package_is_typed_and_names_its_version():
    assert (PACKAGE / "py.typed").exists()
    assert swiglu.__version__ == _native.__version__
    assert set(swiglu.__all__) - {"patch", "unpatch", "PatchReport"} <= set(dir(swiglu))


def test_nothing_but_libc_is_needed():
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("not run: no readelf")
    text = subprocess.run([readelf, "-d", _native.__file__], capture_output=True, text=True, check=True).stdout
    needed = [line.split("[")[1].rstrip("]") for line in text.splitlines() if "(NEEDED)" in line]
    assert needed and all(name.startswith(SYSTEM) for name in needed), needed


def test_the_package_asks_for_nothing_else():
    from importlib import metadata

    try:
        requires = metadata.requires("swiglu") or []
    except metadata.PackageNotFoundError:
        pytest.skip("not run: the package is not installed")
    assert all("extra ==" in requirement for requirement in requires), requires


def test_vllm_finds_its_plugin():
    from importlib import metadata

    try:
        points = metadata.distribution("swiglu").entry_points
    except metadata.PackageNotFoundError:
        pytest.skip("not run: the package is not installed")
    assert ("vllm.general_plugins", "swiglu.vllm:register") in {(point.group, point.value) for point in points}
