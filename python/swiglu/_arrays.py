"""Arrays as the native module takes them."""

from __future__ import annotations

import sys
from typing import Any, Tuple, Union

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


def described(array: Any) -> Union[Described, Any]:
    """Where a plain numpy array lies; other arrays are lent by DLPack, which has no bfloat16 of numpy's."""
    if not is_numpy(array):
        return array
    if not _is_plain(array):
        raise TypeError(f"out cannot be written in place: element type {array.dtype}, strides {array.strides} bytes")
    strides = tuple(step // array.itemsize for step in array.strides)
    return array.ctypes.data, array.shape, strides, array.dtype.name, array.flags.writeable
