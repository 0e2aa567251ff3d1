"""How much memory there is for what is computed of a model's weights once; what becomes of freed memory."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from transmuter.model import Model

_CGROUP = Path("/sys/fs/cgroup")
_KEEPING = ((-2, 256 << 20), (-1, 2**31 - 1), (-4, 0))
"""Options of glibc's mallopt, with what they are set to: M_TOP_PAD and M_TRIM_THRESHOLD in bytes; and M_MMAP_MAX, since
what has a mapping of its own is never kept, and M_MMAP_THRESHOLD leaves no array of more than 32 MiB without one."""
_OPTIONS = ("TOP_PAD", "TRIM_THRESHOLD", "MMAP_THRESHOLD", "MMAP_MAX")
_SETTINGS = ("GLIBC_TUNABLES", *(f"MALLOC_{name}_" for name in _OPTIONS))


def fits_unpacked(model: Model) -> bool:
    """Whether packed weights would take less than half of the free memory as float32: eight bytes for each of two."""
    packed = sum(s.size for s in model.shapes["buffer"].values() if s.dtype == np.uint8)
    return packed == 0 or 8 * packed < available() / 2


def available() -> int:
    """The bytes that the process can still take, of the device's memory or of the host's."""
    device = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in device:
        return device["bytes_limit"] - device["bytes_in_use"]
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    told = [line.split() for line in _lines(Path("/proc/meminfo"))]
    sizes += [int(kilobytes) << 10 for name, kilobytes, *_ in told if name == "MemAvailable:"]
    limit, used = (_lines(_CGROUP / name) for name in ("memory.max", "memory.current"))  # of a container
    if limit and used and limit[0].isdigit():
        sizes.append(int(limit[0]) - int(used[0]))
    return min(sizes)


def _lines(path: Path) -> list[str]:
    """A file of the kernel's; nothing where there is none."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


@functools.cache
def keep_freed() -> None:
    """Has the C library keep freed memory for the next allocations, in this process from now on.

    A step of training allocates and frees as much as all of its temporaries. glibc hands that back to the system, which
    clears each page when it is asked for the next time: for MiniLM, 160,000 pages and a sixth of the step. What the
    user's environment says of malloc goes first; other libraries than GNU's are left as they are.
    """
    mallopt = _of_c("mallopt")
    if mallopt is None or any(name in os.environ for name in _SETTINGS):
        return
    for option, size in _KEEPING:
        mallopt(option, size)


def give_back() -> None:
    """Has the C library return what it keeps of freed memory to the system, which takes it some milliseconds.

    After compiling a large graph that is as much as a tenth of a gigabyte. Other libraries than GNU's do so by
    themselves, or cannot be asked.
    """
    trim = _of_c("malloc_trim")
    if trim is not None:
        trim(0)


@functools.cache
def _of_c(name: str) -> Callable[..., int] | None:
    """A function of the C library."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):  # no such function, no such handle, as on Windows
        return None
