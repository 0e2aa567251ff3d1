"""Products with weights of few bits: from the packed weights or unpacked ones, for one row or many."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from few_bits_weights import drawn_weight
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from onenode import one_node

import transmuter
from transmuter.lowering import few_bits
from transmuter.lowering.few_bits import in_packing, in_words, product

CHOICES = ["auto", "keep", "unpack"]


def drawn(bits: int, block: int, blocks: int, columns: int, zeros: str, seed: int = 0) -> tuple[Any, ...]:
    """The bytes of a weight, its scales and zero points, and the weight itself."""
    codes, scales, zero, weight = drawn_weight(bits, block, blocks, columns, zeros, seed)
    each = 8 // bits
    shifted = codes.T.reshape(columns, -1, each) << (bits * np.arange(each, dtype=np.uint8))
    return np.bitwise_or.reduce(shifted, -1).astype(np.uint8), scales, zero, weight


@settings(max_examples=40, deadline=None)
@given(
    choice=st.sampled_from(CHOICES),
    bits=st.sampled_from([2, 4, 8]),
    block=st.sampled_from([16, 32, 64, 128, 48]),
    blocks=st.sampled_from([1, 2, 3, 4]),
    columns=st.sampled_from([1, 7, 16]),
    rows=st.sampled_from([0, 1, 3, 20]),
    zeros=st.sampled_from(["none", "integers", "floats"]),
    on_cpu=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_products_are_the_same_in_every_form(
    choice: Any, bits: int, block: int, blocks: int, columns: int, rows: int, zeros: str, on_cpu: bool, seed: int
) -> None:
    packed, scales, zero, weight = drawn(bits, block, blocks, columns, zeros, seed)
    x = np.random.default_rng(seed).normal(size=(rows, blocks * block)).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch, in_packing(choice), jax.numpy_dtype_promotion("strict"):
        patch.setattr(few_bits, "on_cpu", lambda: on_cpu)
        patch.setattr(few_bits, "_BLOCK", 256)  # so that there is more than one piece
        y = product(jnp.asarray(x), in_words(packed), scales, zero, bits)
    assert y.dtype == np.float32
    np.testing.assert_allclose(y, x @ weight, 1e-4, 2e-6 * 4**bits * x.shape[1] ** 0.5)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_products_have_gradients(choice: Any, rows: int) -> None:
    packed, scales, _, _ = drawn(4, 32, 2, 5, "none")
    x = np.random.default_rng(0).normal(size=(rows, 64)).astype(np.float32)

    def multiply(x: jax.Array, scales: jax.Array) -> jax.Array:
        return product(x, in_words(packed), scales, None, 4)

    with in_packing(choice):
        check_grads(multiply, (x, scales), 1, modes=["rev"], rtol=2e-2, atol=2e-2)
        batched = jax.vmap(multiply, (0, None))(np.stack([x, 2 * x]), scales)
        np.testing.assert_allclose(batched[1], 2 * multiply(x, scales), 1e-5, 1e-4)


def matmul(depth: int = 1024, columns: int = 256) -> tuple[onnx.ModelProto, np.ndarray]:
    """A model of one MatMulNBits for any number of rows, and one row."""
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (columns, depth // 32, 16)).astype(np.uint8)
    scales = rng.uniform(0.5, 1.5, columns * depth // 32).astype(np.float32)
    x = rng.normal(size=(1, depth)).astype(np.float32)
    attributes = {"K": depth, "N": columns, "bits": 4, "block_size": 32}
    proto = one_node("MatMulNBits", [x, packed, scales], attributes, known=(1, 2), domain="com.microsoft")
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "rows"
    return proto, x


@pytest.mark.parametrize(("choice", "times"), [("auto", 1), ("keep", 1), ("unpack", 8)])
def test_packed_weights_are_held_as_they_were_chosen_to_be(choice: Any, times: int) -> None:
    proto, x = matmul()
    model = transmuter.load(proto)
    packed, scales = (sum(s.size * s.dtype.itemsize for s in model.shapes[k].values()) for k in ("buffer", "param"))
    compiled = transmuter.compile(model, [x], packed_weights=choice)
    (executable,) = compiled.segments[0].executables
    held = sum(value.nbytes for value in executable.values)
    assert held == (packed + scales if times == 1 else times * packed)
    many = np.repeat(x, 20, 0)  # another signature shares them
    np.testing.assert_allclose(compiled([many])["y0"][3], compiled([x])["y0"][0], 1e-4, 1e-3)
    values = {id(value): value for s in compiled.segments for e in s.executables for value in e.values}
    assert sum(value.nbytes for value in values.values()) - held < 100  # for where the pieces start
    np.testing.assert_array_equal(model.buffers["x1"], transmuter.load(proto).buffers["x1"])


def test_a_wrong_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="packed_weights is 'never', not one of auto, keep, unpack"):
        transmuter.compile(transmuter.load(matmul()[0]), packed_weights="never")


def test_weights_that_do_not_fit_unpacked_stay_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    from transmuter.segments import memory

    assert memory.available() > 2**20
    proto, x = matmul()
    size = transmuter.load(proto).shapes["buffer"]["x1"].size
    monkeypatch.setattr(few_bits, "on_cpu", lambda: False)
    for available, times in ((17 * size, 8), (15 * size, 1)):
        monkeypatch.setattr(memory, "available", lambda available=available: available)
        compiled = transmuter.compile(transmuter.load(proto), [x])
        (executable,) = compiled.segments[0].executables
        assert max(value.nbytes for value in executable.values) == times * size
