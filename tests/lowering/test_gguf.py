"""Tables packed in the formats of GGUF, against ONNX Runtime."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from comparison import assert_equal
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from onenode import ort_node, run_node
from onnx import TensorProto as T

import transmuter
from transmuter.lowering import gguf

CONTRIB = {"domain": "com.microsoft"}
WIDTHS = {0: 4, 1: 2, 2: 9 / 16, 6: 11 / 16, 8: 17 / 16, 13: 11 / 16, 14: 105 / 128, 20: 9 / 16, 23: 17 / 32, 30: 2}
WIDTHS[42] = 9 / 32
SCALES = {2: [0], 6: [0], 8: [0], 13: [0, 2], 14: [208], 20: [0], 23: [0], 42: [0]}
BLOCKS = {2: 18, 6: 22, 8: 34, 13: 176, 14: 210, 20: 18, 23: 136, 42: 18}


def table(packed_type: int, rows: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """Random rows whose scales and numbers are finite."""
    if packed_type in (0, 1, 30):
        kind = {0: np.float32, 1: np.float16, 30: ml_dtypes.bfloat16}[packed_type]
        return rng.normal(size=(rows, width)).astype(kind).view(np.uint8)
    data = rng.integers(0, 256, (rows, int(width * WIDTHS[packed_type]))).astype(np.uint8)
    blocks = data.reshape(-1, BLOCKS[packed_type])
    for at in SCALES[packed_type]:
        blocks[:, at : at + 2] = rng.normal(size=(len(blocks), 1)).astype(np.float16).view(np.uint8)
    return data


@pytest.mark.parametrize("packed_type", WIDTHS)
@settings(max_examples=5, deadline=None)
@given(
    indices=st.sampled_from([[[2, 0], [-1, 3]], [[1, 1], [2**31 - 1, -(2**31)]]]),
    output=st.sampled_from([None, T.FLOAT, T.FLOAT16, T.BFLOAT16]),
    kind=st.sampled_from([np.int32, np.int64]),
    seed=st.integers(0, 99),
)
def test_gathered_rows(packed_type: int, indices: Any, output: int | None, kind: Any, seed: int) -> None:
    data = table(packed_type, 3, 512, np.random.default_rng(seed))
    attributes = {"packed_type": packed_type, "K": 512} | ({"output_dtype": output} if output else {})
    # ONNX Runtime in Python has no arrays of bfloat16
    exact = ort_node(
        "GatherPacked",
        [data, np.array(indices, kind)],
        {**attributes, "output_dtype": T.FLOAT},
        output_types=[T.FLOAT],
        **CONTRIB,
    )[0]
    wanted = {T.FLOAT: np.float32, T.FLOAT16: np.float16}.get(output, ml_dtypes.bfloat16)
    (y,) = run_node(
        "GatherPacked", [data, np.array(indices, kind)], attributes, output_types=[output or T.BFLOAT16], **CONTRIB
    )
    assert_equal(y, exact.astype(wanted), rtol=1e-6 if output == T.FLOAT else 8e-3, atol=1e-6)


def test_the_table_is_a_weight() -> None:
    data = table(13, 3, 256, np.random.default_rng(0))
    inputs, attributes = [data, np.array([1, 0])], {"packed_type": 13, "K": 256, "output_dtype": T.FLOAT}
    (wanted,) = ort_node("GatherPacked", inputs, attributes, output_types=[T.FLOAT], known=[0], **CONTRIB)
    (y,) = run_node("GatherPacked", inputs, attributes, output_types=[T.FLOAT], known=[0], compiled=True, **CONTRIB)
    assert_equal(y, wanted, rtol=1e-6, atol=1e-6)


@settings(max_examples=10, deadline=None)
@given(
    activation=st.sampled_from([None, "none", "silu", "relu2", "relu_squared"]),
    scale=st.sampled_from([None, 0.5]),
    kind=st.sampled_from([np.float16, ml_dtypes.bfloat16]),
    seed=st.integers(0, 99),
)
def test_products_with_packed_weights(activation: str | None, scale: float | None, kind: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    data, a = table(8, 3, 64, rng), (rng.normal(size=(2, 4, 64)) / 64).astype(kind)
    row_options = {"output_types": [T.FLOAT], **CONTRIB}
    rows = {"packed_type": 8, "K": 64, "output_dtype": T.FLOAT}
    weight = ort_node("GatherPacked", [data, np.arange(3)], rows, **row_options)[0].astype(kind)
    y = a.astype(np.float64) @ weight.astype(np.float64).T * (scale or 1)
    wanted = {"silu": y / (1 + np.exp(-y)), "relu2": np.maximum(y, 0) ** 2, "relu_squared": np.maximum(y, 0) ** 2}
    attributes = {"packed_type": 8, "N": 3, "K": 64} | ({"activation_type": activation} if activation else {})
    (actual,) = run_node(
        "MatMulPacked", [a, data] + ([np.array(scale, np.float32)] if scale else []), attributes, **CONTRIB
    )
    assert actual.dtype == kind
    tolerance = 2e-3 if kind is np.float16 else 2e-2
    assert_equal(actual.astype(np.float64), wanted.get(activation, y), rtol=tolerance, atol=tolerance / 4)


def test_gradients_of_a_product_with_packed_weights() -> None:
    data = table(8, 3, 64, np.random.default_rng(0))
    with jax.enable_x64(True):
        a = jnp.asarray(np.random.default_rng(1).normal(size=(2, 64))) / 2000
        for activation in ("none", "silu", "relu2"):
            product = functools.partial(gguf.MatMulPacked, B=data, packed_type=8, N=3, K=64, activation_type=activation)
            check_grads(product, (a,), 1, ["rev"], rtol=1e-3)


@pytest.mark.parametrize(
    ("packed_type", "K", "size", "message"),
    [(16, 256, 66, "format 16 is not supported"), (2, 40, 18, "blocks of 32"), (2, 32, 17, "17 bytes, not 18")],
)
def test_what_does_not_fit_is_an_error(packed_type: int, K: int, size: int, message: str) -> None:
    inputs = [np.zeros((2, size), np.uint8), np.array([0])]
    with pytest.raises(transmuter.TransmuterError, match=message):
        run_node("GatherPacked", inputs, {"packed_type": packed_type, "K": K}, output_types=[T.BFLOAT16], **CONTRIB)
