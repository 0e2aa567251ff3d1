"""Operators that work element by element: arithmetic, comparison, logic, rounding, activations, Cast, Where."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import onnx_ir as ir
from jax import lax

from transmuter.lowering.arrays import (
    Array,
    canonical,
    cast,
    dtype,
    in_jax,
    is_float,
    is_known,
    is_string,
    is_symbolic,
    readable,
    traced,
    xp,
)
from transmuter.lowering.registry import operator

# ---- how operators of one and of two operands are registered -------------------------------------------------------


def _unary(function: Callable[[Array], Array]) -> Callable[..., Array]:
    """An operator of one operand; `consumed_inputs` is a hint that opset 1 had."""

    def lowering(x, *, consumed_inputs):
        return function(x)

    return _documented(lowering, function)


def _binary(function: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    """An operator of two operands that are broadcast as NumPy does."""

    def lowering(a, b):
        return function(a, b)

    return _documented(lowering, function)


def _binary_from_axis(function: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    """The same up to opset 6: with `broadcast`, `b` has part of the shape of `a`, from `axis` on or at its end."""

    def lowering(a, b, *, broadcast, axis, consumed_inputs):
        if not broadcast and a.shape != b.shape:
            raise ValueError(f"shapes {a.shape} and {b.shape} differ, and the attribute broadcast is not set")
        if axis is not None and b.ndim:
            b = xp.reshape(b, b.shape + (1,) * (a.ndim - axis % a.ndim - b.ndim))
        return function(a, b)

    return lowering


def _documented(lowering: Callable[..., Array], function: Callable[..., Array]) -> Callable[..., Array]:
    """`lowering` with what is said here about `function`."""
    lowering.__doc__ = function.__doc__ if function.__module__ == __name__ else None
    return lowering


def widened(x: Array) -> Array:
    """Half types as float32, for what does not fit their range or precision on the way."""
    return cast(x, np.float32) if x.dtype in (np.float16, ml_dtypes.bfloat16) else x


# ---- arithmetic ----------------------------------------------------------------------------------------------------


def divide(a: Array, b: Array) -> Array:
    """Integer division truncates towards zero, as C++ does. By 0, where ONNX Runtime stops, it gives an integer of ones
    in all bits."""
    if is_float(a):
        return xp.divide(a, b)
    if is_symbolic(a) or is_symbolic(b):  # dimensions are never negative
        return np.floor_divide(a, b)
    if is_known((a, b)):
        ones = np.invert(np.zeros((), a.dtype))
        return xp.where(xp.equal(b, 0), ones, xp.floor_divide(xp.subtract(a, xp.fmod(a, b)), b))
    return lax.div(*jnp.broadcast_arrays(a, b))


def _power(x: Array, y: Array) -> Array:
    """The result has the type of the base, whatever that of the exponent is. Powers of integers that are no integers
    are truncated; those that do not fit, and those of 0 by a negative exponent, are undefined."""
    if not is_float(x):
        return _integer_power(x, y)
    y = cast(y, x.dtype)
    if is_known((x, y)):
        return xp.power(x, y)
    if is_known(y) and y.size == 1 and y.ndim <= x.ndim and y.item() in (1, 2, 3, 4):
        return lax.integer_pow(x, int(y.item()))
    return _float_power(*jnp.broadcast_arrays(x, y))


def _integer_power(x: Array, y: Array) -> Array:
    if is_float(y):
        return truncate(xp.power(cast(x, np.float64), cast(y, np.float64)), x.dtype)
    small = xp.logical_and(y >= 0, y < 64)  # for all other exponents, only 0, 1 and -1 have powers that fit
    power = xp.power(x, cast(xp.where(small, y, 62 + y % 2), x.dtype))
    return xp.where(xp.logical_or(y >= 0, xp.abs(x) == 1), power, 0)


@jax.custom_jvp
def _float_power(x: jax.Array, y: jax.Array) -> jax.Array:
    """A power whose derivative by the exponent is 0, not NaN, where the base is not positive (an exponent that is
    trained along with the other weights is mostly the 2 of a variance), and by the base where the exponent is 0."""
    return lax.pow(x, y)


@_float_power.defjvp
def _(primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    power = _float_power(x, y)
    slope = jnp.where(y == 0, 0, y * lax.pow(x, jnp.where(y == 0, 1, y - 1)))
    return power, dx * slope + dy * jnp.where(x > 0, power * jnp.log(jnp.where(x > 0, x, 1)), 0)


def _maximum(a: Array, b: Array) -> Array:
    """NaN where one is NaN."""
    return _of_dimensions(jax.core.max_dim, a, b) if is_symbolic(a) or is_symbolic(b) else xp.maximum(a, b)


def _minimum(a: Array, b: Array) -> Array:
    """NaN where one is NaN."""
    return _of_dimensions(jax.core.min_dim, a, b) if is_symbolic(a) or is_symbolic(b) else xp.minimum(a, b)


def _of_dimensions(function: Callable[[Any, Any], Any], a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.frompyfunc(function, 2, 1)(a, b)


@operator("Mod_10")
def Mod(a, b, *, fmod):
    """With `fmod` the result has the sign of the dividend, without that of the divisor, a zero included. An integer
    leaves 0 by 0, where ONNX Runtime stops."""
    if fmod:
        return xp.fmod(a, b)
    remainder = xp.mod(a, b)
    return xp.where(remainder == 0, xp.copysign(remainder, b), remainder) if is_float(a) else remainder


@operator()
def Max(*xs, consumed_inputs):
    return functools.reduce(_maximum, xs)


@operator()
def Min(*xs, consumed_inputs):
    return functools.reduce(_minimum, xs)


@operator()
def Sum(*xs, consumed_inputs):
    return functools.reduce(xp.add, xs)


@operator()
def Mean(*xs, consumed_inputs):
    return xp.divide(functools.reduce(xp.add, xs), np.asarray(len(xs), xs[0].dtype))


@operator()
def Clip(x, *, min, max, consumed_inputs):
    return Clip_11(x, *(None if bound is None else cast(np.float64(bound), x.dtype) for bound in (min, max)))


@operator()
def Clip_11(x, min=None, max=None):
    """A bound that is not given is the last finite number, so that infinity does not pass."""
    if is_float(x):
        finite = ml_dtypes.finfo(x.dtype)
        min, max = np.asarray(finite.min) if min is None else min, np.asarray(finite.max) if max is None else max
    x = x if min is None else _maximum(x, min)
    return x if max is None else _minimum(x, max)


# ---- bits and special values ---------------------------------------------------------------------------------------


@operator("BitShift_11")
def BitShift(x, y, *, direction):
    """A shift by all bits or more leaves nothing; to the right it leaves the sign."""
    return {"LEFT": xp.left_shift, "RIGHT": xp.right_shift}[direction](x, y)


@operator("IsInf_10")
def IsInf(x, *, detect_negative, detect_positive):
    values = [float("inf")] * bool(detect_positive) + [float("-inf")] * bool(detect_negative)
    return functools.reduce(xp.logical_or, [xp.equal(x, value) for value in values], xp.zeros_like(x, bool))


@operator("Where_9")
def Where(condition, x, y):
    if is_string(x) or is_string(y):
        condition = readable(condition, "condition")
    return xp.where(condition, x, y)


# ---- activations ---------------------------------------------------------------------------------------------------


def _gelu(x: Array) -> Array:
    return cast(widened(x) * 0.5 * (1 + lax.erf(widened(x) * 0.5**0.5)), x.dtype)


def _softsign(x: Array) -> Array:
    return x / (1 + jnp.abs(x))


def _mish(x: Array) -> Array:
    # x * tanh(softplus(x)), written with one exponential; beyond 20 it is x
    power = jnp.exp(jnp.minimum(widened(x), 20))
    ratio = power * (power + 2)
    return x * cast(ratio / (ratio + 2), x.dtype)


def _hard_swish(x: Array) -> Array:
    return x * jnp.clip(x / 6 + 0.5, 0, 1)


@operator()
def LeakyRelu(x, *, alpha, consumed_inputs):
    return jnp.where(x < 0, xp.multiply(x, alpha), x)


@operator()
def PRelu(x, slope, *, consumed_inputs):
    """Up to opset 6 a slope of several elements is one per channel."""
    if slope.size > 1 and slope.ndim == 1:
        slope = jnp.reshape(slope, (-1,) + (1,) * (x.ndim - 2))
    return PRelu_7(x, slope)


@operator()
def PRelu_7(x, slope):
    return jnp.where(x < 0, xp.multiply(x, slope), x)


@operator()
def Elu(x, *, alpha, consumed_inputs):
    return jnp.where(x > 0, x, alpha * jnp.expm1(jnp.where(x > 0, 0, x)))


@operator("Celu_12")
def Celu(x, *, alpha):
    return jnp.where(x > 0, x, alpha * jnp.expm1(jnp.where(x > 0, 0, x / alpha)))


@operator()
def Selu(x, *, alpha, gamma, consumed_inputs):
    return gamma * Elu(x, alpha=alpha, consumed_inputs=None)


@operator("ThresholdedRelu_10")
def ThresholdedRelu(x, *, alpha):
    return jnp.where(x > alpha, x, 0)


@operator()
def HardSigmoid(x, *, alpha, beta, consumed_inputs):
    return jnp.clip(xp.add(xp.multiply(x, alpha), beta), 0, 1)


@operator("Gelu_20")
def Gelu(x, *, approximate):
    return jax.nn.gelu(x, approximate=True) if approximate == "tanh" else _gelu(x)


@operator("Swish_24")
def Swish(x, *, alpha):
    return x * lax.logistic(xp.multiply(x, alpha))


@operator("Shrink_9")
def Shrink(x, *, lambd, bias):
    """Integers are shrunk as floats, then truncated."""
    y = x if is_float(x) else cast(x, np.float64)
    return cast(jnp.where(y < -lambd, y + bias, jnp.where(y > lambd, y - bias, 0)), x.dtype)


@operator("Gelu", domain="com.microsoft")
def _gelu_of_microsoft(x):
    return _gelu(x)


@operator(domain="com.microsoft")
def BiasGelu(a, b):
    return _gelu(a + b)


@operator(domain="com.microsoft")
def FastGelu(x, bias=None):
    return jax.nn.gelu(x if bias is None else x + bias, approximate=True)


@operator(domain="com.microsoft")
def QuickGelu(x, *, alpha=1.702):
    return Swish(x, alpha=alpha)


# ---- dtypes --------------------------------------------------------------------------------------------------------


@operator("Cast")
def _cast_to_name(x, *, to):
    return _convert(x, dtype(ir.DataType[to]))


@operator("Cast_6")
def Cast(x, *, to, saturate=1, round_mode="up"):
    """A float that does not fit an integer type, which ONNX leaves undefined, becomes what ONNX Runtime makes of it on
    x86: it is truncated to 32 or 64 bits with a sign, of which NaN and floats beyond them have the smallest value,
    and loses the bits above those of the type. A string holds 8 significant digits of a float, as in ONNX Runtime.

    A float64 becomes a type of 8 bits or fewer by way of float32, and NaN a zero as float4, which lacks it.
    """
    return _convert(x, dtype(to), saturate, round_mode)


@operator("CastLike_15")
def CastLike(x, target_type, *, saturate=1, round_mode="up"):
    wanted = np.dtype(np.int64) if is_symbolic(target_type) else target_type.dtype
    return _convert(x, wanted, saturate, round_mode)


@operator("BitCast_26", exact_dtypes=True, differentiable=False)
def BitCast(x, *, to):
    target = ir.DataType(to)
    given = ir.DataType.from_numpy(x.dtype)
    fits = is_known(x) or canonical(target.numpy()) == target.numpy()
    if given is ir.DataType.STRING or given.bitwidth != target.bitwidth or not fits:
        hint = ". JAX holds 64-bit types only with jax_enable_x64" if 64 in (given.bitwidth, target.bitwidth) else ""
        raise ValueError(f"{given.name} and {target.name} differ in width{hint}")
    if given is ir.DataType.BOOL:
        x = cast(x, np.uint8)
    if target is ir.DataType.BOOL:
        return xp.not_equal(_bits(x, np.uint8), 0)
    return cast(_bits(x, target.numpy()), dtype(to))


def _bits(x: Array, wanted: Any) -> Array:
    """The bits of `x` as another dtype of the same width; those of a complex number are those of its parts."""
    if not isinstance(x, jax.Array):
        return np.asarray(x).view(wanted)
    if x.dtype == wanted:
        return x
    if x.dtype == np.complex64:
        x = jnp.stack([x.real, x.imag], axis=-1)
    if wanted == np.complex64:
        parts = lax.bitcast_convert_type(x, np.float32)
        return lax.complex(parts[..., 0], parts[..., 1])
    return lax.bitcast_convert_type(x, wanted)


def _convert(x: Array, wanted: np.dtype, saturate: int = 1, round_mode: str = "up") -> Array:
    """`x` in the dtype `wanted`, as Cast defines it."""
    if wanted.kind == "O":
        return _to_strings(readable(x, "x"))
    if is_string(x):
        return _convert(_from_strings(x, wanted), wanted, saturate)
    if is_symbolic(x) and not jnp.issubdtype(wanted, jnp.integer):
        x = traced(x)
    if not in_jax(wanted):
        x = readable(x, "x")
    if wanted.name == "float8_e8m0fnu":
        return _to_powers_of_two(x, saturate, round_mode)
    if wanted.name.startswith("float8"):
        x = cast(x, np.float32)
        largest = float(ml_dtypes.finfo(wanted).max)
        return cast(xp.clip(x, -largest, largest) if saturate else x, wanted)
    if is_float(x) and jnp.issubdtype(wanted, jnp.integer):
        return truncate(x, wanted)
    if ir.DataType.from_numpy(wanted).bitwidth < 8:  # not every pair of such types has a cast of its own in NumPy
        x = cast(x, np.float32 if jnp.issubdtype(wanted, jnp.floating) else np.int32)
    return cast(x, wanted)


def truncate(x: Array, wanted: np.dtype) -> Array:
    """Floats as integers; see `Cast` for those that do not fit."""
    x = cast(x, np.float32) if x.dtype.itemsize < 4 else x
    signed = np.dtype(f"int{8 * max(wanted.itemsize, 4)}")
    signed = signed if is_known(x) else canonical(signed)
    lowest = np.iinfo(signed).min
    bound = -float(lowest)

    def fitting(low: float, high: float, kind: np.dtype, others: Array) -> Array:
        fits = xp.logical_and(x >= low, x < high)
        return xp.where(fits, cast(xp.where(fits, x, 0), kind), others)

    result = cast(fitting(-bound, bound, signed, np.array(lowest, signed)), wanted)
    if np.dtype(wanted).kind == "u" and np.dtype(wanted).itemsize >= 4:
        return fitting(bound, 2 * bound, wanted, result)
    return result


def _to_powers_of_two(x: Array, saturate: int, round_mode: str) -> Array:
    """The exponents of float32 numbers as float8_e8m0, rounded by what their fractions say. The sign, which that type
    lacks, is dropped."""
    bits = xp.bitwise_and(_bits(cast(x, np.float32), np.uint32), np.uint32(0x7FFFFFFF))
    exponent, fraction = xp.right_shift(bits, np.uint32(23)), xp.bitwise_and(bits, np.uint32(0x7FFFFF))
    # subnormal numbers from the smallest result, 2**-127, on: the bit that normal ones leave out goes
    fraction = xp.where(exponent == 0, xp.bitwise_and(fraction * np.uint32(2), np.uint32(0x7FFFFF)), fraction)
    ups = {"up": fraction > 0, "nearest": fraction >= 0x400000, "down": xp.zeros_like(fraction, bool)}
    result = xp.add(exponent, cast(ups[round_mode], np.uint32))
    not_a_number, too_small = bits > 0x7F800000, bits < 0x400000
    if saturate:
        result = xp.where(too_small, 0, xp.minimum(result, np.uint32(254)))
    else:
        not_a_number = xp.logical_or(not_a_number, too_small)
    return _bits(cast(xp.where(not_a_number, 255, result), np.uint8), ml_dtypes.float8_e8m0fnu)


def _to_strings(x: np.ndarray) -> np.ndarray:
    if is_string(x):
        return x
    number = (lambda v: f"{float(v):.8g}") if is_float(x) else (lambda v: str(int(v)))
    named = {"nan": "NaN", "inf": "INF", "-inf": "-INF"}
    texts = [number(v) for v in x.reshape(-1)]
    return np.array([named.get(text, text) for text in texts], object).reshape(x.shape)


def _from_strings(x: np.ndarray, wanted: np.dtype) -> np.ndarray:
    """The numbers that strings say, in the widest dtype of the kind that `wanted` is."""
    if jnp.issubdtype(wanted, jnp.floating):
        return np.array([float(text) for text in x.reshape(-1)], np.float64).reshape(x.shape)
    numbers = [int(text) if text.strip().lstrip("+-").isdigit() else int(float(text)) for text in x.reshape(-1)]
    return np.array(numbers, np.uint64 if wanted == np.uint64 else np.int64).reshape(x.shape)


# ---- operators that JAX has as they are ----------------------------------------------------------------------------

_UNARY = {
    "Abs": xp.abs,
    "Neg": xp.negative,
    "Reciprocal": xp.reciprocal,
    "Sqrt": xp.sqrt,
    "Exp": xp.exp,
    "Log": xp.log,
    "Erf_9": lax.erf,
    "Sin_7": xp.sin,
    "Cos_7": xp.cos,
    "Tan_7": xp.tan,
    "Asin_7": xp.arcsin,
    "Acos_7": xp.arccos,
    "Atan_7": xp.arctan,
    "Sinh_9": xp.sinh,
    "Cosh_9": xp.cosh,
    "Tanh": xp.tanh,
    "Asinh_9": xp.arcsinh,
    "Acosh_9": xp.arccosh,
    "Atanh_9": xp.arctanh,
    "Not": xp.logical_not,
    "BitwiseNot_18": xp.bitwise_not,
    "IsNaN_9": xp.isnan,
    "Relu": jax.nn.relu,
    "Sigmoid": lax.logistic,
    "Softplus": jax.nn.softplus,
    "Softsign": _softsign,
    "HardSwish_14": _hard_swish,
    "Mish_18": _mish,
}
_STEPS = {
    "Sign_9": xp.sign,
    "Floor": xp.floor,
    "Ceil": xp.ceil,
    "Round_11": xp.round,
}
_BINARY = {
    "Add": xp.add,
    "Sub": xp.subtract,
    "Mul": xp.multiply,
    "Div": divide,
    "Pow": _power,
    "Equal": xp.equal,
    "Greater": xp.greater,
    "Less": xp.less,
    "And": xp.logical_and,
    "Or": xp.logical_or,
    "Xor": xp.logical_xor,
}
_NEWER_BINARY = {
    "GreaterOrEqual_12": xp.greater_equal,
    "LessOrEqual_12": xp.less_equal,
    "BitwiseAnd_18": xp.bitwise_and,
    "BitwiseOr_18": xp.bitwise_or,
    "BitwiseXor_18": xp.bitwise_xor,
}
for _name, _function in _UNARY.items():
    operator(_name)(_unary(_function))
for _name, _function in _STEPS.items():
    operator(_name, differentiable=False)(_unary(_function))
for _name, _function in _BINARY.items():
    operator(_name)(_binary_from_axis(_function))
    operator(f"{_name}_7")(_binary(_function))
for _name, _function in _NEWER_BINARY.items():
    operator(_name)(_binary(_function))
