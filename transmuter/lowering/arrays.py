"""What lowerings are written with: the namespace `xp`, dtypes, and known values.

A value is *known* (a NumPy array: its contents are there while tracing) or *traced* (a JAX array or tracer). Lowerings
of shape arithmetic call `xp` instead of `jax.numpy`: each call runs in NumPy when all its arrays are known and in JAX
otherwise. A lowering whose result comes back as NumPy has produced a known value; this is all that decides it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import onnx_ir as ir
from jax import lax

Array: TypeAlias = np.ndarray | jax.Array
"""A known or a traced value."""


class _Namespace:
    """`numpy` for known arguments, `jax.numpy` as soon as one is traced."""

    def __getattr__(self, name: str) -> Any:
        in_numpy, in_jax = getattr(np, name), getattr(jnp, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if is_known(args) and is_known(tuple(kwargs.values())):
                with np.errstate(all="ignore"):
                    return in_numpy(*args, **kwargs)
            return in_jax(*args, **kwargs)

        call.__name__ = name
        setattr(self, name, call)
        return call


xp = _Namespace()


def is_known(value: Any) -> bool:
    """Whether no part of `value` (an array, a scalar or a list of them) is a JAX array or tracer."""
    if isinstance(value, (list, tuple)):
        return all(is_known(item) for item in value)
    return not isinstance(value, jax.Array)


def is_symbolic(value: Any) -> bool:
    """Whether `value` is a known array that holds symbolic dimensions of `jax.export`."""
    return isinstance(value, np.ndarray) and value.dtype == object and any(_is_dimension(v) for v in value.flat)


def is_string(value: Any) -> bool:
    """Whether `value` is a string tensor: an object array of `str`."""
    return isinstance(value, np.ndarray) and value.dtype == object and not is_symbolic(value)


def _is_dimension(value: Any) -> bool:
    return not isinstance(value, (str, int, np.integer)) and hasattr(value, "dimension_as_value")


def dims(value: Any) -> tuple[Any, ...]:
    """A known integer vector as a tuple of dimensions: ints, or symbolic dimensions as they are."""
    return tuple(v if _is_dimension(v) else int(v) for v in np.asarray(value).reshape(-1))


def settled(value: Any) -> Any:
    """What a lowering returned, as a value of the graph: scalars become arrays, and symbolic dimensions that have
    cancelled out int64."""
    if _is_dimension(value):
        array = np.empty((), object)
        array[()] = value
        return array
    if isinstance(value, (np.generic, int, float, bool)):
        value = np.asarray(value)
    if isinstance(value, np.ndarray) and value.dtype == object and value.size:
        return value.astype(np.int64) if all(isinstance(v, (int, np.integer)) for v in value.flat) else value
    return value


def shape_vector(shape: Sequence[Any]) -> np.ndarray:
    """A shape as the known int64 vector that ONNX's Shape returns; an object array if a dimension is symbolic."""
    if all(isinstance(d, (int, np.integer)) for d in shape):
        return np.array(shape, np.int64)
    return np.array(shape, object)


def contents(value: Any) -> np.ndarray | None:
    """What `value` holds, as NumPy; None where a JAX transform hides it. Under `jax.grad` alone this is its primal."""
    if not isinstance(value, jax.Array):
        return np.asarray(value)
    if isinstance(value, jax.core.Tracer):
        value = lax.stop_gradient(value)
        if isinstance(value, jax.core.Tracer):
            return None
    return np.asarray(value)


class NeedsContents(Exception):
    """Raised by a lowering that finds only as it runs that it needs the contents of the operand of this name."""


def readable(value: Any, operand: str) -> np.ndarray:
    """What `value` holds, which depends on the operand of that name.

    Raises:
        NeedsContents: A JAX transform hides it.
    """
    held = contents(value)
    if held is None:
        raise NeedsContents(operand)
    return held


# ---- dtypes -------------------------------------------------------------------------------------------------------

_WIDE_IN_32_BITS = {
    np.dtype(np.int64): np.dtype(np.int32),
    np.dtype(np.uint64): np.dtype(np.uint32),
    np.dtype(np.float64): np.dtype(np.float32),
    np.dtype(np.complex128): np.dtype(np.complex64),
}
HALVES = {np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)}

compute_dtypes: ContextVar[Mapping[np.dtype, np.dtype]] = ContextVar("compute_dtypes", default=MappingProxyType({}))
"""What float16 and bfloat16 become in the graph that is being lowered, where they do not stay."""


def dtype(element_type: int) -> np.dtype:
    """The dtype in which the graph that is being lowered computes an ONNX element type (`to`, `dtype` attributes).

    This is the type's own NumPy dtype, or what `compute_dtypes` makes of float16 and bfloat16. Strings are object.
    """
    declared = ir.DataType(element_type).numpy()
    return computed(declared)


def computed(declared: np.dtype) -> np.dtype:
    """The dtype in which values declared as `declared` are computed; see `dtype`."""
    return compute_dtypes.get().get(declared, declared)


def in_jax(kind: np.dtype) -> bool:
    """Whether JAX has arrays of this dtype; strings and 6-bit floats stay outside of it."""
    return kind.kind != "O" and not kind.name.startswith("float6_")


def canonical(wanted: Any) -> np.dtype:
    """`wanted` as JAX holds it: 64-bit types are their 32-bit counterparts where x64 is off."""
    wanted = np.dtype(wanted)
    return wanted if jax.config.jax_enable_x64 else _WIDE_IN_32_BITS.get(wanted, wanted)


def cast(value: Array, wanted: Any) -> Array:
    """`value` in another dtype, without JAX's warning where x64 is off; known stays known."""
    if isinstance(value, jax.Array):
        return lax.convert_element_type(value, canonical(wanted))
    if is_symbolic(value):
        return value if np.dtype(wanted).kind in "iu" else cast(traced(value), wanted)
    with np.errstate(all="ignore"):
        return np.asarray(value).astype(wanted)


def is_float(value: Array) -> bool:
    """Whether `value` has a floating-point dtype: float8 to float64, bfloat16."""
    return jnp.issubdtype(value.dtype, jnp.floating)


def narrow(value: np.ndarray) -> np.ndarray:
    """A known value in the dtype in which JAX holds it: with x64 off, 64-bit types become 32-bit ones.

    The extreme values of an integer type, which exporters write for "no bound", become the narrower type's extremes.

    Raises:
        OverflowError: Another integer does not fit.
    """
    target = canonical(value.dtype) if value.dtype != object else value.dtype
    if target == value.dtype:
        return value
    if target.kind not in "iu":
        return value.astype(target)
    old, new = np.iinfo(value.dtype), np.iinfo(target)
    unbounded_below = value <= old.min + 1 if old.min < 0 else np.zeros(value.shape, bool)
    unbounded_above = value >= old.max - 1
    bad = ((value < new.min) & ~unbounded_below) | ((value > new.max) & ~unbounded_above)
    if bad.any():
        raise OverflowError(f"the {value.dtype} number {value[bad].flat[0]} does not fit {target}")
    return np.where(unbounded_below, new.min, np.where(unbounded_above, new.max, value)).astype(target)


def traced(value: Array) -> jax.Array:
    """A known value as a JAX array, narrowed where x64 is off; a traced one as it is."""
    if isinstance(value, jax.Array):
        return value
    if is_symbolic(value):
        flat = [cast(jnp.asarray(v.dimension_as_value() if _is_dimension(v) else v), np.int64) for v in value.flat]
        return jnp.stack(flat).reshape(value.shape)
    return jnp.asarray(narrow(np.asarray(value)))
