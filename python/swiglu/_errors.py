"""What is refused before anything is computed: errors with a kind, what was given, what was expected, what to do."""

from __future__ import annotations

import re
from typing import Any, Optional, Sequence, Type, TypeVar, Union

from ._native import ShapeError, SwigluError

_Made = TypeVar("_Made", ShapeError, SwigluError)


def _made(cls: Type[_Made], text: str, kind: str, what: str, given: Optional[str], expected: Optional[str]) -> _Made:
    made = cls(text)
    made.kind, made.what, made.given, made.expected = kind, what, given, expected
    return made


def shape_error(what: str, expected: str, given: str) -> ShapeError:
    return _made(ShapeError, f"{what}: expected {expected}, given {given}", "shape", what, given, expected)


def error(kind: str, what: str, text: str) -> SwigluError:
    return _made(SwigluError, f"{what}: {text}", kind, what, None, None)


def wrong(what: str, expected: str, given: str, advice: Optional[str] = None, kind: str = "argument") -> SwigluError:
    """An argument that is not what was expected, and what to do about it."""
    text = f"{what}: expected {expected}, given {given}" + (f"; {advice}" if advice else "")
    return _made(SwigluError, text, kind, what, given, expected)


def unknown(what: str, given: Any, choices: Sequence[str]) -> SwigluError:
    text = f"unknown {what} `{given}`; choose one of: {', '.join(choices)}"
    return _made(SwigluError, text, "argument", what, str(given), ", ".join(choices))


def said(value: Any) -> str:
    """A value of the wrong kind, in short: a number, a name, or what it is an instance of."""
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else f"{value[:40]}…")
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def expect_count(what: str, given: Any, least: int = 0, most: int = 2**63 - 1) -> int:
    """A whole number from ``least`` on, which numpy's are too."""
    count = None
    if not isinstance(given, bool) and hasattr(given, "__index__"):
        try:
            count = int(given.__index__())
        except TypeError:
            pass
    if count is None or not least <= count <= most:
        until = " on" if most == 2**63 - 1 else f" to {most}"
        raise wrong(what, f"a whole number from {least}{until}", said(given if count is None else count))
    return count


def expect_flag(what: str, given: Any) -> bool:
    if not isinstance(given, bool):
        raise wrong(what, "True or False", said(given))
    return given


def expect_choice(what: str, given: Any, choices: Sequence[str]) -> str:
    if not isinstance(given, str) or given not in choices:
        raise unknown(what, given, choices)
    return given


def expect_text(what: str, given: Any, expected: str) -> str:
    if not isinstance(given, str):
        raise wrong(what, expected, said(given))
    return given


_LAYOUT = re.compile(r"gate-first|up-first|interleaved|interleaved-[1-9][0-9]*")


def expect_layout(layout: Union[str, Any]) -> str:
    if not isinstance(layout, str) or not _LAYOUT.fullmatch(layout):
        raise unknown("layout", layout, ("gate-first", "up-first", "interleaved", "interleaved-G"))
    return layout
