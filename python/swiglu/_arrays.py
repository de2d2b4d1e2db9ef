"""Arrays as the native module takes them."""

from __future__ import annotations

import sys
from typing import Any, Tuple, Union

from ._errors import said, wrong

# Address, shape, strides in elements, element type, whether it may be written.
Described = Tuple[int, Tuple[int, ...], Tuple[int, ...], str, bool]


def is_numpy(array: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(array, numpy.ndarray)


def is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def plain(array: Any) -> Any:
    """The array itself, or a copy where swapped bytes or a field of records would need one. Keep it during a call."""
    if is_numpy(array) and not _is_plain(array):
        return array.astype(array.dtype.newbyteorder("="))
    return array


def _is_plain(array: Any) -> bool:
    return array.dtype.isnative and not any(step % array.itemsize for step in array.strides)


#: The types that kernels compute with, as numpy names them: bfloat16 is that of ml_dtypes.
_DTYPES = ("float32", "float16", "bfloat16")


def described(what: str, array: Any) -> Union[Described, Any]:
    """Where a plain numpy array lies; other arrays are lent by DLPack, which has no bfloat16 of numpy's."""
    if not is_numpy(array):
        # A class has the method too.
        if isinstance(array, type) or not hasattr(array, "__dlpack__"):
            raise wrong(what, "an array (numpy, or with __dlpack__)", said(array), "numpy.asarray(..., 'float32') makes one")
        if is_torch(array) and array.is_neg():
            raise wrong(what, "elements as they are in memory", "a view that negates them", "resolve_neg() copies", "layout")
        return array
    if isinstance(array, sys.modules["numpy"].ma.MaskedArray):
        raise wrong(what, "an array without a mask, which would be lost", said(array), "x.filled(0) is one")
    if array.dtype.name not in _DTYPES:
        advice = "x.astype('float32') converts it"
        raise wrong(what, f"{', '.join(_DTYPES[:2])} or {_DTYPES[2]} elements", str(array.dtype), advice, "dtype")
    if not _is_plain(array):
        given = f"{array.dtype.str} with strides of {array.strides} bytes"
        raise wrong(what, "elements in this machine's order that can be written in place", given, kind="layout")
    strides = tuple(step // array.itemsize for step in array.strides)
    return array.ctypes.data, array.shape, strides, array.dtype.name, array.flags.writeable
