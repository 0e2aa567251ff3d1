"""Operators of contrib_attention.py against ONNX Runtime, in every form its CPU kernels take; gradients, caches."""

from __future__ import annotations

import itertools
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
from onenode import one_node, ort_node, run_node

import transmuter

RNG = np.random.default_rng(0)
CONTRIB = {"domain": "com.microsoft"}
LOWEST = float(np.finfo(np.float32).min)


def draw(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def ints(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def bits(*shape: int) -> np.ndarray:
    return RNG.integers(0, 2, shape).astype(np.int32)


def chooser(draws: st.DrawFn) -> Any:
    return lambda *options: draws(st.sampled_from(options))


Case = tuple[list, dict[str, Any], int]
"""Operands, attributes, and how many outputs the node has."""


def check(op: str, case: Case, *, known: tuple[int, ...] = (), cached: np.ndarray | None = None) -> None:
    """The node's outputs are ONNX Runtime's; those behind `cached` tokens of each sequence's caches do not count."""
    operands, attributes, outputs = case
    expected = ort_node(op, operands, attributes, outputs=outputs, **CONTRIB)
    with jax.numpy_dtype_promotion("strict"):
        actual = run_node(op, operands, attributes, outputs=outputs, known=known, compiled=True, **CONTRIB)
    if cached is not None:
        for outputs in (actual, expected):
            for i in (1, 2):
                inside = np.arange(outputs[i].shape[2]) < cached[:, None, None]
                outputs[i] = np.where(inside[..., None], outputs[i], 0)
    assert_equal(actual, expected)


def padding(choose: Any, batch: int, queries: int, total: int, *more: str) -> np.ndarray | None:
    """A mask of any form: ends, starts, keys, or queries and keys."""
    ends = RNG.integers(1, total + 1, batch)
    return {
        "none": None,
        "ends": ints(*ends),
        "starts": ints(*ends, *RNG.integers(0, total, batch)),
        "keys": bits(batch, total),
        "all": bits(batch, queries, total),
        "dummy": np.ones((batch, 1), np.int32),
    }[choose("none", "ends", "keys", "all", *more)]


@st.composite
def packed_weights(draws: st.DrawFn) -> Case:
    choose = chooser(draws)
    batch, queries, heads, size, past = choose(1, 2), choose(1, 4), choose(1, 2), choose(2, 4), choose(0, 0, 3)
    hidden, values = heads * size, heads * (size if past else choose(size, 3))
    attributes = {"num_heads": heads, "unidirectional": choose(0, 1), "mask_filter_value": choose(-10000.0, LOWEST)}
    attributes |= {"qkv_hidden_sizes": [hidden, hidden, values]} if values != hidden else {}
    attributes |= {"scale": 0.3} if choose(0, 1) else {}
    operands = [
        draw(batch, queries, 6),
        draw(6, 2 * hidden + values),
        draw(2 * hidden + values) if choose(0, 1) else None,
        padding(choose, batch, queries, queries + past, "starts", "dummy"),
        draw(2, batch, heads, past, size) if past else None,
        draw(choose(1, batch), choose(1, heads), queries, queries) if choose(0, 1) and not past else None,
    ]
    return operands, attributes, 2 if past else 1


@settings(max_examples=10, deadline=None)
@given(packed_weights())
def test_attention(case: Case) -> None:
    check("Attention", case)


@st.composite
def projections(draws: st.DrawFn) -> Case:
    choose = chooser(draws)
    form = choose("separate", "cross", "growing", "buffer")
    batch, queries, heads, size, past = choose(1, 2), choose(1, 3), choose(1, 2), choose(2, 4), 3
    keys = queries if form == "buffer" else choose(queries, 4)
    hidden, values = heads * size, heads * (choose(size, 3) if form == "separate" else size)
    total, length = keys + past * (form in ("growing", "buffer")), keys + past + 2 if form == "buffer" else past
    attributes = {"num_heads": heads, "unidirectional": choose(0, 1)} | ({"scale": 0.3} if choose(0, 1) else {})
    caches = [draw(batch, heads, length, size) for _ in range(2)]
    operands = [
        draw(batch, queries, hidden),
        draw(batch, heads, keys, size) if form == "cross" else draw(batch, keys, hidden),
        draw(batch, heads, keys, size) if form == "cross" else draw(batch, keys, values),
        draw(2 * hidden + values) if form != "cross" and choose(0, 1) else None,
        padding(choose, batch, queries, total),
        draw(choose(1, batch), choose(1, heads), queries, total) if choose(0, 1) else None,
        *{"growing": caches, "buffer": [*caches, ints(past)]}.get(form, []),
    ]
    return operands, attributes, 4 if form in ("growing", "buffer") else 1


@settings(max_examples=12, deadline=None)
@given(projections())
def test_multi_head_attention(case: Case) -> None:
    check("MultiHeadAttention", case, known=(8,) if len(case[0]) == 9 else ())


def test_packed_operands_equal_separate_ones() -> None:
    q, k, v = (draw(2, 3, 2, 4) for _ in range(3))
    bias, attributes = draw(24), {"num_heads": 2}
    flat = [x.reshape(2, 3, 8) for x in (q, k, v)]
    (expected,) = run_node("MultiHeadAttention", [*flat, bias], attributes, **CONTRIB)
    for packed in ([np.stack((q, k, v), 3), None, None], [flat[0], np.stack((k, v), 3), None]):
        assert_equal(run_node("MultiHeadAttention", [*packed, bias], attributes, **CONTRIB), [expected])


@pytest.mark.parametrize("op", ["MultiHeadAttention", "DecoderMaskedMultiHeadAttention"])
def test_beams(op: str) -> None:
    new, caches, past = [draw(4, 1, 8) for _ in range(3)], [draw(4, 2, 7, 4) for _ in range(2)], ints(5)
    beams = RNG.integers(0, 2, (2, 2, 7)).astype(np.int32)
    if op == "MultiHeadAttention":
        check(op, ([*new, None, None, None, *caches, past, beams], {"num_heads": 2}, 4), known=(8,))
    else:
        operands = [*new, bits(4, 6), None, *caches, past, ints(2), beams]
        check(op, (operands, {"num_heads": 2, "past_present_share_buffer": 1, "output_qk": 1}, 4), known=(7,))


# ---- grouped queries -----------------------------------------------------------------------------------------------


@st.composite
def grouped(draws: st.DrawFn) -> tuple[Case, np.ndarray]:
    choose = chooser(draws)
    stage = choose("prompt", "step", "chunk")
    heads, groups, size = choose(1, 2), choose(1, 3), 16
    batch, new = (1 if stage == "chunk" else choose(1, 3)), (1 if stage == "step" else choose(2, 5))
    past = 0 if stage == "prompt" else choose(1, 6)
    total = past + new
    lengths = np.full(batch, total)
    if stage != "chunk":
        lengths[1:] -= RNG.integers(0, past if past else new, batch - 1)
    capacity = choose(past, total + 2)
    attributes: dict[str, Any] = {"num_heads": heads * groups, "kv_num_heads": heads}
    q, k, v = (draw(batch, new, n * size) for n in (heads * groups, heads, heads))
    operands = [np.concatenate((q, k, v), -1), None, None] if choose(0, 1) else [q, k, v]
    operands += [draw(batch, heads, capacity, size) for _ in range(2)]
    operands += [ints(*(lengths - 1)), np.array(total, np.int32)]
    if choose(0, 1):
        attributes |= {"do_rotary": 1, "rotary_interleaved": choose(0, 1)}
        positions = RNG.integers(0, 16, (batch, new)) if choose(0, 1) else None
        operands += [draw(16, 8), draw(16, 8), positions]
    else:
        operands += [None, None, None]
    operands += [draw(choose(1, batch), choose(1, heads * groups), new, total) if choose(0, 1) else None]
    operands += [draw(heads * groups) if choose(0, 1) else None]
    optional = {"local_window_size": choose(1, 4), "softcap": 1.5, "scale": 0.4, "smooth_softmax": 1, "qk_output": 1}
    attributes |= {name: value for name, value in optional.items() if choose(0, 1)}
    attributes |= {"qk_output": 2} if choose(0, 1) else {}
    return (operands, attributes, 4 if "qk_output" in attributes else 3), lengths


@settings(max_examples=15, deadline=None)
@given(grouped())
def test_group_query_attention(drawn: tuple[Case, np.ndarray]) -> None:
    case, lengths = drawn
    check("GroupQueryAttention", case, known=(6,), cached=lengths)


def generate(cache: int, *, prompt: int = 3, steps: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Outputs of a prompt in two chunks and of steps after it, and the keys; a `cache` that has a length keeps it."""
    rng = np.random.default_rng(1)
    tokens = [rng.standard_normal((1, prompt + steps, n * 16)).astype(np.float32) for n in (4, 2, 2)]
    tables = [rng.standard_normal((16, 8)).astype(np.float32) for _ in range(2)]
    keys = values = np.zeros((1, 2, cache, 16), np.float32)
    outputs, attributes = [], {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1, "local_window_size": 5}
    bounds = [0, 2, *range(prompt, prompt + steps + 1)]
    for start, end in itertools.pairwise(bounds):
        new = [x[:, start:end] for x in tokens]
        operands = [*new, keys, values, ints(end - 1), np.array(end, np.int32), *tables]
        y, keys, values = run_node("GroupQueryAttention", operands, attributes, outputs=3, **CONTRIB)
        outputs.append(y)
    return np.concatenate(outputs, 1), keys


def test_cache_grows_or_is_a_buffer() -> None:
    grown, keys = generate(0)
    written, buffer = generate(10)
    assert keys.shape[2] == 5
    assert buffer.shape[2] == 10
    assert_equal(written, grown)
    assert_equal(buffer[:, :, :5], keys)


def test_length_of_a_growing_cache_needs_no_contents() -> None:
    operands = [draw(1, 1, 32), draw(1, 1, 16), draw(1, 1, 16), draw(1, 1, 4, 16), draw(1, 1, 4, 16), ints(4), ints(5)]
    attributes = {"num_heads": 2, "kv_num_heads": 1}
    model = transmuter.load(one_node("GroupQueryAttention", operands, attributes, outputs=3, **CONTRIB))
    outputs = jax.jit(lambda x: model.apply({}, x))({f"x{i}": x for i, x in enumerate(operands)})
    assert_equal(
        [np.asarray(y) for y in outputs.values()],
        ort_node("GroupQueryAttention", operands, attributes, outputs=3, **CONTRIB),
    )


def test_padded_chunks() -> None:
    lengths, fresh = np.array([7, 5]), np.array([2, 3])
    caches = [draw(2, 1, 12, 16) for _ in range(2)]
    new = [draw(2, 4, n * 16) for n in (2, 1, 1)]
    operands = [*new, *caches, ints(*(lengths - 1)), np.array(12, np.int32), *[None] * 9, ints(*fresh)]
    attributes = {"num_heads": 2, "kv_num_heads": 1}
    actual = run_node("GroupQueryAttention", operands, attributes, outputs=3, known=(6,), **CONTRIB)
    expected = ort_node("GroupQueryAttention", operands, attributes, outputs=3, **CONTRIB)
    for row in range(2):
        assert_equal(actual[0][row, : fresh[row]], expected[0][row, : fresh[row]])
        assert_equal(actual[1][row, :, : lengths[row]], expected[1][row, :, : lengths[row]])


def test_unknown_caches_are_refused() -> None:
    operands = [draw(1, 1, 32), draw(1, 1, 16), draw(1, 1, 16), draw(1, 1, 4, 16), draw(1, 1, 4, 16), ints(4), ints(5)]
    attributes = {"num_heads": 2, "kv_num_heads": 1, "sliding_window_cache": 1, "local_window_size": 2}
    with pytest.raises(transmuter.TransmuterError, match="only a window"):
        run_node("GroupQueryAttention", operands, attributes, outputs=3, **CONTRIB)


@pytest.mark.parametrize("half", [np.float16, ml_dtypes.bfloat16])
def test_halves_are_summed_in_float32(half: Any) -> None:
    operands = [draw(1, 3, n * 16, dtype=half) for n in (2, 1, 1)] + [draw(1, 1, 9, 16, dtype=half) for _ in range(2)]
    operands += [ints(11), ints(12)]
    wide = [x.astype(np.float32) if x.dtype == half else x for x in operands]
    attributes = {"num_heads": 2, "kv_num_heads": 1}
    actual, *_ = run_node("GroupQueryAttention", operands, attributes, outputs=3, **CONTRIB)
    expected, *_ = run_node("GroupQueryAttention", wide, attributes, outputs=3, **CONTRIB)
    assert actual.dtype == half
    np.testing.assert_allclose(actual.astype(np.float32), expected, atol=4 * ml_dtypes.finfo(half).eps)


# ---- rotary embedding ----------------------------------------------------------------------------------------------


@settings(max_examples=6, deadline=None)
@given(st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_rotary_embedding(flat: bool, partial: bool, interleaved: bool, from_first: bool) -> None:
    pairs = 2 if partial else 4
    attributes = {"interleaved": int(interleaved)} | ({"num_heads": 3, "rotary_embedding_dim": 4} if partial else {})
    positions = np.array([3]) if from_first else RNG.integers(0, 10, (2, 5))
    operands = [draw(2, 5, 24) if flat else draw(2, 3, 5, 8), positions, draw(10, pairs), draw(10, pairs)]
    check("RotaryEmbedding", (operands, attributes, 1))


# ---- gradients -----------------------------------------------------------------------------------------------------

GRADIENTS = {
    "Attention": ([draw(1, 3, 2), draw(2, 12), draw(12), bits(1, 3)], {"num_heads": 2, "unidirectional": 1}),
    "MultiHeadAttention": ([draw(1, 2, 4), draw(1, 3, 4), draw(1, 3, 4), draw(12)], {"num_heads": 2}),
    "GroupQueryAttention": (
        [
            *(draw(2, 1, n * 4) for n in (2, 1, 1)),
            *(draw(2, 1, 3, 4) for _ in range(2)),
            *(ints(3, 1), ints(4)),
            *(draw(6, 2), draw(6, 2), None, draw(1, 2, 1, 4), draw(2)),
        ],
        {"num_heads": 2, "kv_num_heads": 1, "do_rotary": 1, "softcap": 2.0, "local_window_size": 2},
    ),
}


@pytest.mark.parametrize("op", GRADIENTS)
def test_gradients(op: str) -> None:
    operands, attributes = GRADIENTS[op]
    model = transmuter.load(one_node(op, operands, attributes, **CONTRIB))
    given = {f"x{i}": x for i, x in enumerate(operands) if x is not None}
    floats = {name: jnp.asarray(x) for name, x in given.items() if x.dtype.kind == "f"}
    check_grads(lambda x: model.apply({}, {**given, **x})["y0"], (floats,), 1, ["rev"], atol=2e-2, rtol=2e-2)
