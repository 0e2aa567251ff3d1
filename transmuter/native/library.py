"""The compiled kernels: finds their library, loads it when it is first needed, and tells XLA what it exports."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.extend.core as jex

TARGETS = (
    "transmuter_attention",
    "transmuter_convolution",
    "transmuter_few_bits",
    "transmuter_integer_product",
    "transmuter_product",
    "transmuter_quantization",
)
"""The functions that XLA calls, by the names that both the library and `jax.ffi.ffi_call` know them by."""
_FILE = Path(__file__).with_name("kernels.so")
_loading = threading.Lock()


def available() -> bool:
    """Whether there are kernels for this machine."""
    return bool(variant())


def variant() -> str:
    """The instruction set whose kernels run: "avx512vnni", "avx512" or "avx2"; "" if this machine has no kernels."""
    library = _library()
    return "" if library is None else library.transmuter_variant().decode()


def choose(name: str) -> bool:
    """Runs the kernels of another variant from now on, what is compiled already included. Changes nothing and returns
    False if there is no such variant, or the processor cannot run it."""
    library = _library()
    return library is not None and bool(library.transmuter_choose(name.encode()))


@contextlib.contextmanager
def chosen(name: str) -> Iterator[None]:
    """Within the block, the kernels of this variant run, in every thread. Raises `ValueError` where it cannot."""
    before = variant()
    if not choose(name):
        raise ValueError(f"this machine cannot run the kernels of {name!r}; its own are {before!r}")
    try:
        yield
    finally:
        choose(before)


def run_eagerly(primitive: jex.Primitive) -> None:
    """Gives a primitive its eager form: it is compiled by itself, even where `jax.disable_jit` is on."""

    def run(*operands: Any, **params: Any) -> Any:
        with jax.disable_jit(False):
            return jax.jit(functools.partial(primitive.bind, **params))(*operands)

    primitive.def_impl(run)


def _library() -> ctypes.CDLL | None:
    with _loading:
        return _loaded()


@functools.cache
def _loaded() -> ctypes.CDLL | None:
    setting = os.environ.get("TRANSMUTER_NATIVE", "")
    file = Path(setting) if setting.endswith(_FILE.suffix) else _FILE
    if setting == "0" or not file.exists():
        return None
    try:
        library = ctypes.CDLL(str(file))
        library.transmuter_variant.restype = ctypes.c_char_p
        library.transmuter_choose.argtypes = [ctypes.c_char_p]
        if library.transmuter_variant():
            _register(library)
    except (OSError, AttributeError, jax.errors.JaxRuntimeError) as error:
        warnings.warn(
            "Transmuter's compiled kernels do not fit here, and models run slower without them. Reinstall transmuter, "
            "so that they are compiled for the jaxlib that is installed, or set TRANSMUTER_NATIVE=0. "
            f"The reason: {error}",
            RuntimeWarning,
            stacklevel=4,
        )
        return None
    return library


def _register(library: ctypes.CDLL) -> None:
    # A jaxlib that does not know the library's version of the interface refuses it. Before JAX has its devices, that
    # would only come when it looks for them, and leave it without a CPU.
    jax.devices()
    capsules = {target: jax.ffi.pycapsule(getattr(library, target)) for target in TARGETS}
    for target, capsule in capsules.items():
        jax.ffi.register_ffi_target(target, capsule, platform="cpu")
