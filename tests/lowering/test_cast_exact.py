"""Cast to and from the types of 8 bits and fewer, bit by bit over all numbers of 16 bits."""

from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from onenode import reference_node, run_node
from onnx import TensorProto, helper

FLOAT8 = ["FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ"]
INTEGERS = ["INT4", "UINT4", "INT2", "UINT2"]
CODES = np.arange(65536, dtype=np.uint16)
HALVES = {"FLOAT16": CODES.view(np.float16), "BFLOAT16": CODES.view(ml_dtypes.bfloat16)}

pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning"),  # by the reference
    pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning"),
]


def casts(x: np.ndarray, to: str, **attributes: Any) -> list[np.ndarray]:
    """The results for a traced operand and for a known one."""
    attributes |= {"to": getattr(TensorProto, to)}
    options = {"opset": 25, "output_types": [attributes["to"]]}
    return [run_node("Cast", [x], attributes, known=known, **options)[0] for known in ((), (0,))]


def same_bits(actual: np.ndarray, expected: np.ndarray, where: np.ndarray | slice = slice(None)) -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    bits = f"u{actual.dtype.itemsize}"
    np.testing.assert_array_equal(actual[where].view(bits), expected[where].view(bits))


def reference(x: np.ndarray, to: str, **attributes: Any) -> np.ndarray:
    attributes |= {"to": getattr(TensorProto, to)}
    return np.asarray(reference_node("Cast", [x], attributes, opset=25, output_types=[attributes["to"]])[0])


@pytest.mark.parametrize("source", HALVES)
@pytest.mark.parametrize("saturate", [0, 1])
@pytest.mark.parametrize("to", FLOAT8)
def test_halves_to_float8(to: str, saturate: int, source: str) -> None:
    x = HALVES[source]
    for y in casts(x, to, saturate=saturate):
        same_bits(y, reference(x, to, saturate=saturate))


def power_of_two(x: float, saturate: int, round_mode: str) -> int:
    """The code of a positive number as float8e8m0, as the operator's documentation has it."""
    if np.isnan(x):
        return 255
    if x < 2.0**-127:
        return 0 if saturate else 255
    if np.isinf(x):
        return 254 if saturate else 255
    mantissa, exponent = np.frexp(x)  # from 0.5 to 1
    rounds_up = {"up": mantissa > 0.5, "down": False, "nearest": mantissa >= 0.75}[round_mode]
    code = int(exponent) - 1 + rounds_up + 127
    return min(code, 254) if saturate else min(code, 255)


@pytest.mark.parametrize("source", HALVES)
@pytest.mark.parametrize("saturate", [0, 1])
@pytest.mark.parametrize("round_mode", ["up", "down", "nearest"])
def test_halves_to_powers_of_two(round_mode: str, saturate: int, source: str) -> None:
    """Unlike in the reference evaluator, infinity saturates, subnormal numbers are rounded by what they are worth, and
    0 does not fit. What negative numbers become is not specified."""
    x = HALVES[source][:32768]
    wanted = np.array([power_of_two(v, saturate, round_mode) for v in x.astype(float)], np.uint8)
    for y in casts(x, "FLOAT8E8M0", saturate=saturate, round_mode=round_mode):
        same_bits(y, wanted.view(ml_dtypes.float8_e8m0fnu))


@pytest.mark.parametrize("source", HALVES)
@pytest.mark.parametrize("to", [*INTEGERS, "FLOAT4E2M1"])
def test_halves_to_few_bits(to: str, source: str) -> None:
    x = HALVES[source]
    is_number = ~np.isnan(x.astype(np.float32))
    for y in casts(x, to):
        same_bits(y, reference(x, to), is_number)
        assert not y[~is_number].astype(float).any()


@pytest.mark.parametrize("to", [*FLOAT8, *INTEGERS, "FLOAT4E2M1"])
@pytest.mark.parametrize("source", [np.int16, np.uint16, np.int8])
def test_integers(source: Any, to: str) -> None:
    x = CODES.astype(source)
    for y in casts(x, to):
        if to in FLOAT8:  # by way of float32, which has them all
            same_bits(y, reference(x.astype(np.float32), to))
        else:
            same_bits(y, x.astype(np.float32 if to == "FLOAT4E2M1" else np.int32).astype(y.dtype))


@pytest.mark.parametrize("to", ["FLOAT", "FLOAT16", "BFLOAT16"])
@pytest.mark.parametrize("source", [*FLOAT8, "FLOAT8E8M0", *INTEGERS, "FLOAT4E2M1"])
def test_few_bits_to_floats(source: str, to: str) -> None:
    kind = helper.tensor_dtype_to_np_dtype(getattr(TensorProto, source))
    bits = 8 if source.startswith("FLOAT8") else int("".join(filter(str.isdigit, source))[0])
    x = np.arange(2**bits, dtype=np.uint8).astype(kind) if source in INTEGERS else CODES[: 2**bits].astype(np.uint8)
    x = x if source in INTEGERS else x.view(kind)
    with np.errstate(over="ignore"):
        wanted = x.astype(np.float32).astype(helper.tensor_dtype_to_np_dtype(getattr(TensorProto, to)))
    for y in casts(x, to):
        assert y.dtype == wanted.dtype
        np.testing.assert_array_equal(y.astype(float), wanted.astype(float))


@pytest.mark.parametrize("to", [*FLOAT8, "FLOAT4E2M1"])
def test_next_to_halfway(to: str) -> None:
    """Float32 is rounded once, float64 by way of it."""
    kind = helper.tensor_dtype_to_np_dtype(getattr(TensorProto, to))
    numbers = np.arange(16 if to == "FLOAT4E2M1" else 256, dtype=np.uint8).view(kind).astype(float)
    numbers = np.unique(numbers[np.isfinite(numbers)])
    halfway = (numbers[1:] + numbers[:-1]) / 2
    below, above = (halfway + sign * abs(halfway) * 2.0**-20 for sign in (-1, 1))
    for y in casts(np.concatenate([below, above]).astype(np.float32), to):
        np.testing.assert_array_equal(y.astype(float), np.concatenate([numbers[:-1], numbers[1:]]))
    beside = halfway * (1 + 2.0**-40)
    with jax.enable_x64(True):
        for y in casts(beside, to):
            same_bits(y, casts(beside.astype(np.float32), to)[0])
            same_bits(y, reference(beside, to))
