"""Places in a text: counted in characters, as Python does, or in bytes of UTF-8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from transmuter.errors import InputError

Unit = Literal["character", "byte"]
"""What `start` and `end` of a result count: `text[start:end]`, or `text.encode()[start:end].decode()`."""

_UNITS = ("character", "byte")


def checked(unit: Unit) -> Unit:
    """The unit, if it is one.

    Raises:
        InputError: It is none.
    """
    if unit not in _UNITS:
        raise InputError(f"unit is {unit!r}. Give 'character', or 'byte' for offsets in UTF-8.")
    return unit


def counter(text: str, unit: Unit) -> Callable[[int], int]:
    """What turns an offset in characters of a text into one of the unit."""
    if unit == "character" or text.isascii():
        return int
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    sizes = 1 + (codes >= 0x80) + (codes >= 0x800) + (codes >= 0x10000)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return lambda place: int(offsets[place])
