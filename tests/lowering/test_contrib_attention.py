"""Operators of contrib_attention.py against ONNX Runtime, in every form its CPU kernels take; gradients, caches."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import onnx
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


@st.composite
def quantized_weights(draws: st.DrawFn) -> Case:
    choose = chooser(draws)
    batch, queries, heads, size, past, width = 2, choose(1, 4), 2, 4, choose(0, 3), choose(6, 300)
    columns, kind = 3 * heads * size, choose(np.int8, np.uint8)

    def integers(of: Any, *shape: int) -> np.ndarray:
        extremes = np.iinfo(of).min, np.iinfo(of).max
        return np.asarray(RNG.integers(extremes[0], extremes[1] + 1, shape), of)

    attributes = {"num_heads": heads, "unidirectional": choose(0, 1), "mask_filter_value": choose(-10000.0, LOWEST)}
    attributes |= {"scale": 0.3} if choose(0, 1) else {}
    per_column = {"tensor": (), "vector": (1,), "columns": (columns,)}
    operands = [
        integers(np.uint8, batch, queries, width),
        integers(kind, width, columns),
        draw(columns),
        np.full(choose((), (1,)), 2e-3, np.float32),
        np.asarray(RNG.uniform(1e-3, 1e-2, per_column[choose("tensor", "vector", "columns")]), np.float32),
        padding(choose, batch, queries, queries + past, "starts", "dummy"),
        integers(np.uint8, *choose((), (1,))) if choose(0, 1) else None,
        integers(kind, *per_column[choose("tensor", "vector", "columns")]) if choose(0, 1) else None,
        draw(2, batch, heads, past, size) if past else None,
    ]
    return operands, attributes, 2 if past else 1


@settings(max_examples=15, deadline=None)
@given(quantized_weights(), st.booleans())
def test_quantized_attention(case: Case, known: bool) -> None:
    operands, attributes, outputs = case
    types = [onnx.TensorProto.FLOAT] * 2
    given = {"outputs": outputs, "output_types": types[:outputs], "known": (1, 4) if known else (), **CONTRIB}
    assert_equal(
        run_node("QAttention", operands, attributes, **given),
        ort_node("QAttention", operands, attributes, **given),
        rtol=1e-5,
        atol=1e-5,
    )


def test_signed_quantized_inputs() -> None:
    """Which ONNX Runtime's CPU kernel does not take: the same as unsigned ones 128 higher."""
    signed, weights = (RNG.integers(-128, 128, shape).astype(np.int8) for shape in ((1, 3, 5), (5, 12)))
    rest = [weights, draw(12), *[np.array(0.01, np.float32)] * 2, None]
    zeros, attributes = np.array(-3, np.int8), {"num_heads": 2}
    types = {"output_types": [onnx.TensorProto.FLOAT], **CONTRIB}
    assert_equal(
        run_node("QAttention", [signed, *rest, zeros], attributes, **types),
        ort_node(
            "QAttention",
            [(signed.astype(np.int16) + 128).astype(np.uint8), *rest, np.array(125, np.uint8)],
            attributes,
            **types,
        ),
    )


# ---- decoding ------------------------------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None)
@given(st.booleans(), st.booleans(), st.booleans(), st.sampled_from([0.0, 0.3]))
def test_decoder_masked_multi_head_attention(masked: bool, biased: bool, projected: bool, scale: float) -> None:
    operands = [
        *(draw(2, 1, 8) for _ in range(3)),
        bits(2, 4) if masked else None,
        draw(1, 2, 1, 4) if biased else None,
        *(draw(2, 2, 6, 4) for _ in range(2)),
        *(ints(3), None, None),
        draw(24) if projected else None,
    ]
    attributes = {"num_heads": 2, "past_present_share_buffer": 1, "scale": scale}
    check("DecoderMaskedMultiHeadAttention", (operands, attributes, 3), known=(7,))


def in_chunks(keys: np.ndarray, chunk: int) -> np.ndarray:
    """Keys in the order of DecoderMaskedSelfAttention: chunk by chunk, and of each chunk token by token."""
    order = np.zeros_like(keys)
    length, size = keys.shape[2:]
    for b, h, t, i in np.ndindex(*keys.shape):
        order[b, h].reshape(size // chunk, length, chunk)[i // chunk, t, i % chunk] = keys[b, h, t, i]
    return order


@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize("rotary", [0, 1])
def test_decoder_masked_self_attention(kind: Any, rotary: int) -> None:
    """As Attention on a buffer of keys in plain order, whatever the model computes in."""
    x, weights, bias, past = (draw(*shape, dtype=kind) for shape in ((2, 1, 5), (5, 48), (48,), (2, 2, 2, 6, 8)))
    mask, attributes = np.array([[1, 1, 1, 1], [0, 1, 1, 1]], np.int32), {"num_heads": 2, "do_rotary": rotary}
    attributes |= {"past_present_share_buffer": 1}
    y, present = run_node("Attention", [x, weights, bias, mask, past, None, ints(3)], attributes, outputs=2, **CONTRIB)
    chunk = 16 // np.dtype(kind).itemsize
    operands = [x, weights, bias, mask, np.stack((in_chunks(past[0], chunk), past[1])), None, ints(3)]
    expected = [y, np.stack((in_chunks(present[0], chunk), present[1]))]
    assert_equal(run_node("DecoderMaskedSelfAttention", operands, attributes, outputs=2, **CONTRIB), expected)
    model = transmuter.load(one_node("DecoderMaskedSelfAttention", operands, attributes, outputs=2, **CONTRIB))
    widened = transmuter.run(model, {f"x{i}": x for i, x in enumerate(operands) if x is not None})
    assert_equal([np.asarray(v) for v in widened.values()], expected, atol=1e-2 if kind == np.float16 else 1e-4)


def test_beams_of_decoder_masked_self_attention() -> None:
    weights = [draw(5, 24), draw(24)]
    x, past, beams = draw(4, 1, 5), draw(2, 4, 2, 7, 4), RNG.integers(0, 2, (2, 2, 7)).astype(np.int32)
    q, k, v = np.split(x @ weights[0] + weights[1], 3, axis=-1)
    attributes = {"num_heads": 2, "past_present_share_buffer": 1}
    plain = [q, k, v, None, None, past[0], past[1], ints(5), ints(2), beams]
    expected, *_ = ort_node("DecoderMaskedMultiHeadAttention", plain, attributes, outputs=3, known=(7,), **CONTRIB)
    operands = [x, *weights, None, np.stack((in_chunks(past[0], 4), past[1])), None, ints(5), ints(2), beams]
    assert_equal(run_node("DecoderMaskedSelfAttention", operands, attributes, outputs=2, **CONTRIB)[0], expected)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_decoder_attention(static: bool, cached: bool, padded: bool) -> None:
    length, batch, heads, size, others, past = 2, 2, 2, 3, 4, 5
    hidden = heads * size
    query, key = draw(length, batch, hidden), draw(others, batch, hidden)
    weight, kv_weight, bias = draw(hidden, hidden), draw(hidden, 2 * hidden), draw(3 * hidden)
    caches = [draw(batch, heads, past, size) for _ in range(2)]

    def by_head(x: np.ndarray) -> np.ndarray:
        return x.reshape(*x.shape[:2], heads, size).transpose(1, 2, 0, 3)

    q = by_head(query @ weight + bias[:hidden])
    new = np.split((key if static else query) @ kv_weight + bias[hidden:], 2, axis=-1)
    k, v = caches if cached and static else map(by_head, new)
    if cached and not static:
        k, v = (np.concatenate(pair, axis=2) for pair in zip(caches, (k, v), strict=True))
    mask = RNG.integers(0, 2, (batch, k.shape[2])).astype(bool)
    mask[0] = [True] * k.shape[2]  # a sequence of nothing but padding yields zeros
    scores = q @ k.swapaxes(2, 3) / np.sqrt(size)
    scores = np.where(mask[:, None, None], -np.inf, scores) if padded else scores
    shares = np.where(np.isneginf(scores), 0, np.exp(scores - np.max(scores, axis=-1, keepdims=True, initial=-1e9)))
    y = shares / np.maximum(shares.sum(-1, keepdims=True), 1e-30) @ v
    expected = [y.transpose(2, 0, 1, 3).reshape(query.shape), k, v]
    flags = [np.array([flag]) for flag in (static, True, cached, padded)]
    operands = [
        query,
        key,
        weight,
        kv_weight,
        bias,
        mask if padded else None,
        *(caches if cached else [None] * 2),
        *flags,
    ]
    actual = run_node("DecoderAttention", operands, {"num_heads": heads}, outputs=3, known=(8, 9, 10, 11), **CONTRIB)
    assert_equal(actual, [x.astype(np.float32) for x in expected])


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
    attributes |= {"causal": 0} if stage == "prompt" and choose(0, 1) else {"local_window_size": choose(-1, 1, 4)}
    optional = {"softcap": 1.5, "scale": 0.4, "smooth_softmax": 1, "qk_output": 1}
    attributes |= {name: value for name, value in optional.items() if choose(0, 1)}
    attributes |= {"qk_output": 2} if choose(0, 1) else {}
    return (operands, attributes, 4 if "qk_output" in attributes else 3), lengths


@settings(max_examples=15, deadline=None)
@given(grouped())
def test_group_query_attention(drawn: tuple[Case, np.ndarray]) -> None:
    case, lengths = drawn
    check("GroupQueryAttention", case, known=(6,), cached=lengths)


@settings(max_examples=8, deadline=None)
@given(st.sampled_from([8, 4]), st.sampled_from(["PER_TENSOR", "PER_CHANNEL"]), st.booleans(), st.sampled_from([0, 3]))
def test_quantized_caches(width: int, kind: str, grows: bool, past: int) -> None:
    new, size, total = 2, 16, past + 2
    stored = np.int8 if width == 8 else np.uint8
    shape = (1, 1, past if grows else total + 3, size * width // 8)
    caches = [RNG.integers(0, 256, shape).astype(np.uint8).view(stored) for _ in range(2)]
    scale_shape = (1,) if kind == "PER_TENSOR" else (1, 1, 1, size)
    scales = [RNG.uniform(0.3, 3, scale_shape).astype(np.float32) / 2**width for _ in range(2)]
    operands = [draw(1, new, 2 * size), *(draw(1, new, size) for _ in range(2)), *caches, ints(total - 1)]
    operands += [np.array(total, np.int32), *[None] * 5, *scales]
    attributes = {"num_heads": 2, "kv_num_heads": 1, "k_quant_type": kind, "v_quant_type": kind}
    attributes |= {"kv_cache_bit_width": width}
    types = [onnx.TensorProto.FLOAT, *[onnx.helper.np_dtype_to_tensor_dtype(np.dtype(stored))] * 2]
    given = {"outputs": 3, "output_types": types, "known": (6,), **CONTRIB}
    actual = run_node("GroupQueryAttention", operands, attributes, **given)
    expected = ort_node("GroupQueryAttention", operands, attributes, **given)
    for i, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert_equal(mine[:, :, :total] if i else mine, theirs[:, :, :total] if i else theirs)


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


@settings(max_examples=8, deadline=None)
@given(st.sampled_from(["step", "chunk", "padded"]), st.sampled_from([3, 5]), st.booleans(), st.booleans(), st.data())
def test_caches_that_hold_a_window(form: str, window: int, biased: bool, quantized: bool, data: st.DataObject) -> None:
    capacity, size, longest = 5, 16, 16
    new = {"step": 1, "chunk": 7, "padded": 3}[form]
    batch = 1 if form == "chunk" else 2
    fresh = RNG.integers(0, new + 1, batch) if form == "padded" else np.full(batch, new)
    lengths = np.array([data.draw(st.integers(new, longest)), longest][:batch])
    total = longest if form == "padded" else lengths.max()
    stored = np.int8 if quantized else np.float32
    caches = [(draw(batch, 1, capacity, size) * (50 if quantized else 1)).astype(stored) for _ in range(2)]
    operands = [draw(batch, new, 2 * size), *(draw(batch, new, size) for _ in range(2)), *caches]
    operands += [ints(*(lengths - 1)), np.array(total, np.int32), draw(longest, 8), draw(longest, 8), None]
    operands += [draw(1, 2, new, total) if biased else None, None]
    operands += [np.full(1, 0.02, np.float32)] * 2 if quantized else [None] * 2
    operands += [None, None, ints(*fresh) if form == "padded" else None]
    attributes = {"num_heads": 2, "kv_num_heads": 1, "do_rotary": 1, "local_window_size": window}
    attributes |= {"sliding_window_cache": 1}
    attributes |= (
        {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8} if quantized else {}
    )
    types = [onnx.TensorProto.FLOAT, *[onnx.helper.np_dtype_to_tensor_dtype(np.dtype(stored))] * 2]
    given = {"outputs": 3, "output_types": types, "known": (6,), **CONTRIB}
    actual = run_node("GroupQueryAttention", operands, attributes, **given)
    expected = ort_node("GroupQueryAttention", operands, attributes, **given)
    drop = capacity - window + 1
    for row, length in enumerate(lengths):
        held = length - drop * max(0, -((capacity - length) // drop))
        assert_equal(actual[0][row, : fresh[row]], expected[0][row, : fresh[row]])
        for i in (1, 2):
            assert_equal(actual[i][row, :, :held], expected[i][row, :, :held])


def test_queries_and_keys_are_normalized() -> None:
    q, k, v, *norms = draw(1, 2, 2, 16), draw(1, 2, 1, 16), draw(1, 2, 16), draw(16), draw(16)
    rest, attributes = [draw(1, 1, 3, 16), draw(1, 1, 3, 16), ints(4), ints(5)], {"num_heads": 2, "kv_num_heads": 1}
    operands = [q.reshape(1, 2, 32), k.reshape(1, 2, 16), v, *rest, *[None] * 7, *norms]
    attributes |= {"qk_norm_epsilon": 0.1, "k_norm_epsilon": 0.2}
    actual = run_node("GroupQueryAttention", operands, attributes, outputs=3, known=(6,), **CONTRIB)
    q, k = (
        x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * norm
        for x, epsilon, norm in zip((q, k), np.float32([0.1, 0.2]), norms, strict=True)
    )
    plain = [q.reshape(1, 2, 32), k.reshape(1, 2, 16), v, *rest]
    expected = ort_node(
        "GroupQueryAttention", plain, {"num_heads": 2, "kv_num_heads": 1}, outputs=3, known=(6,), **CONTRIB
    )
    assert_equal(actual, expected)


def test_a_window_gives_no_scores() -> None:
    operands = [draw(1, 1, 32), draw(1, 1, 16), draw(1, 1, 16), draw(1, 1, 4, 16), draw(1, 1, 4, 16), ints(4), ints(5)]
    attributes = {"num_heads": 2, "kv_num_heads": 1, "sliding_window_cache": 1, "local_window_size": 2, "qk_output": 1}
    with pytest.raises(transmuter.TransmuterError, match="only a window"):
        run_node("GroupQueryAttention", operands, attributes, outputs=4, **CONTRIB)


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


@settings(max_examples=10, deadline=None)
@given(
    st.integers(0, 1), st.integers(0, 1), st.booleans(), st.sampled_from([(2, 1, 1), (1, 2, 1), (0, 0, 4), (4, 0, 0)])
)
def test_rotary_embedding_of_three_positions(
    layout: int, interleaved: int, flat: bool, sections: tuple[int, ...]
) -> None:
    operands = [draw(2, 5, 24) if flat else draw(2, 3, 5, 8), RNG.integers(0, 10, (3, 2, 5)), draw(10, 4), draw(10, 4)]
    attributes = {"mrope_section": sections, "mrope_layout": layout, "interleaved": interleaved, "scale": 1.5}
    check("MRotaryEmbedding", (operands, attributes | {"num_heads": 3}, 1))


def test_rotary_embedding_of_a_part_by_three_positions() -> None:
    operands = [draw(1, 2, 30), RNG.integers(0, 10, (3, 1, 2)), draw(10, 3), draw(10, 3)]
    attributes = {"mrope_section": [1, 1, 1], "mrope_layout": 1, "num_heads": 3, "rotary_embedding_dim": 6}
    check("MRotaryEmbedding", (operands, attributes, 1))
    with pytest.raises(transmuter.TransmuterError, match="sections of 2 angles"):
        run_node("MRotaryEmbedding", operands, attributes | {"mrope_section": [1, 1, 0]}, **CONTRIB)


def test_gemma_rotary_embedding() -> None:
    angles, states = draw(2, 3, 4), [draw(2, 2, 3, 4, dtype=np.float16) for _ in range(4)]
    sin, cos = (f(angles).astype(np.float16)[:, None] for f in (np.sin, np.cos))
    expected = [states[0] * cos + states[1] * sin, states[2] * cos + states[3] * sin]
    half = [onnx.TensorProto.FLOAT16] * 2
    actual = run_node("GemmaRotaryEmbedding", [angles, *states], outputs=2, output_types=half, **CONTRIB)
    assert_equal(actual, expected, atol=1e-2)


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([np.float16, ml_dtypes.bfloat16]),
    st.sampled_from([np.float32, ml_dtypes.bfloat16]),
    st.sampled_from([None, 0, 1]),
    st.fixed_dictionaries(
        {name: st.integers(0, 1) for name in ("flatten_batch", "output_fp16", "use_fp32_arithmetic")}
    ),
    st.sampled_from([(0, 0), (2, 6)]),
    st.booleans(),
)
def test_normalized_rotary_embedding(
    kind: Any, tables: Any, prefill: int | None, attributes: dict, part: tuple[int, int], from_first: bool
) -> None:
    batch, length, heads, stride, turned = 2, 3, 2, 8, 4
    start, width = part[0], part[1] or stride
    x, scale = draw(batch, length, heads, stride, dtype=kind), draw(width)
    cos, sin = draw(12, turned // 2, dtype=tables), draw(12, turned // 2, dtype=tables)
    positions = np.array([[5]]) if from_first else RNG.integers(0, 12, (batch, length))
    target = np.float16 if attributes["output_fp16"] else ml_dtypes.bfloat16
    rounded = ml_dtypes.bfloat16 if {kind, tables, target} == {ml_dtypes.bfloat16} else np.float32
    inside = rounded if prefill or not attributes["use_fp32_arithmetic"] else np.float32
    unrotated, y = np.zeros((batch, length, heads, width), np.float32), np.zeros((batch, length, heads, width), target)
    for b, s, h in np.ndindex(batch, length, heads):
        row = x[b, s, h, start : start + width].astype(np.float32)
        row = (row / np.sqrt(np.mean(row * row) + 1e-6) * scale).astype(rounded)
        unrotated[b, s, h] = row.astype(np.float32)
        row = row.astype(inside)
        position = positions[b, s] if not from_first else 5 + s + (b * length if attributes["flatten_batch"] else 0)
        for i in range(turned // 2):
            c, d, low, high = (
                cos[position, i].astype(inside),
                sin[position, i].astype(inside),
                row[i],
                row[i + turned // 2],
            )
            row[i], row[i + turned // 2] = low * c - high * d, low * d + high * c
        y[b, s, h] = row.astype(target)
    shape = (1, batch * length, -1) if attributes["flatten_batch"] else (batch, length, -1)
    operands = [x, scale, positions, cos, sin, None if prefill is None else np.array(prefill, np.int32)]
    attributes = attributes | {"rotary_embedding_dim": turned, "input_start": part[0], "input_width": part[1]}
    types = [onnx.helper.np_dtype_to_tensor_dtype(np.dtype(target)), onnx.TensorProto.FLOAT]
    known = () if prefill is None else (5,)
    actual = run_node("RMSNormRotary", operands, attributes, outputs=2, output_types=types, known=known, **CONTRIB)
    tolerance = 2 * float(ml_dtypes.finfo(target).eps)
    assert_equal(actual[0], y.reshape(shape), rtol=tolerance, atol=tolerance)
    half = 0.008 if rounded != np.float32 else 1e-5
    assert_equal(actual[1], unrotated, rtol=half, atol=half)


# ---- gradients -----------------------------------------------------------------------------------------------------

GRADIENTS = {
    "Attention": ([draw(1, 3, 2), draw(2, 12), draw(12), bits(1, 3)], {"num_heads": 2, "unidirectional": 1}),
    "QAttention": (
        [
            *(RNG.integers(98, 103, shape).astype(np.uint8) for shape in ((1, 3, 4), (4, 12))),
            *(draw(12), np.array(0.5), np.full(12, 0.5), bits(1, 5), np.array(100, np.uint8), np.array(101, np.uint8)),
            draw(2, 1, 2, 2, 2),
        ],
        {"num_heads": 2},
    ),
    "MultiHeadAttention": (
        [draw(1, 2, 4), draw(1, 3, 4), draw(1, 3, 4), draw(12), ints([0, 0, 0]), draw(1, 1, 2, 3)],
        {"num_heads": 2},
    ),
    "DecoderMaskedMultiHeadAttention": (
        [*(draw(1, 1, 4) for _ in range(3)), ints([1, 0, 1]), None, draw(1, 2, 2, 2), draw(1, 2, 2, 2)],
        {"num_heads": 2},
    ),
    "DecoderMaskedSelfAttention": (
        [draw(1, 1, 3), draw(3, 24), draw(24), ints([1, 0, 1]), draw(2, 1, 2, 4, 4), None, ints(2)],
        {"num_heads": 2, "past_present_share_buffer": 1},
    ),
    "DecoderAttention": (
        [
            *(draw(2, 2, 4), draw(3, 2, 4), draw(4, 4), draw(4, 8), draw(12)),
            *(np.array([[True] * 3, [False, True, False]]), None, None),
            *(np.array([flag]) for flag in (True, False, False, True)),
        ],
        {"num_heads": 2},
    ),
    "GroupQueryAttention": (
        [
            *(draw(2, 1, n * 4) for n in (2, 1, 1)),
            *(draw(2, 1, 3, 4) for _ in range(2)),
            *(ints(3, 1), ints(4)),
            *(draw(6, 2), draw(6, 2), None, draw(1, 2, 1, 4), draw(2), None, None, draw(4), draw(4)),
        ],
        {"num_heads": 2, "kv_num_heads": 1, "do_rotary": 1, "softcap": 2.0, "local_window_size": 2},
    ),
    "RotaryEmbedding": ([draw(1, 3, 8), np.array([[0, 2, 1]]), draw(3, 2), draw(3, 2)], {}),
    "MRotaryEmbedding": (
        [draw(1, 3, 8), RNG.integers(0, 4, (3, 1, 3)), draw(4, 2), draw(4, 2)],
        {"mrope_section": [1, 1, 0], "num_heads": 2},
    ),
    "GemmaRotaryEmbedding": ([draw(1, 2, 4), *(draw(1, 2, 2, 4) for _ in range(4))], {}),
}


@pytest.mark.parametrize("op", GRADIENTS)
def test_gradients(op: str) -> None:
    """Also where all keys of a query are masked."""
    operands, attributes = GRADIENTS[op]
    known = (8, 9, 10, 11) if op == "DecoderAttention" else ()
    with jax.enable_x64(True):
        wide = [x.astype(np.float64) if x is not None and x.dtype == np.float32 else x for x in operands]
        model = transmuter.load(one_node(op, wide, attributes, known=known, **CONTRIB))
        given = {f"x{i}": x for i, x in enumerate(wide) if x is not None and i not in known}
        floats = {name: jnp.asarray(x) for name, x in given.items() if x.dtype.kind == "f"}
        y = jax.jit(lambda x: model.apply({}, {**given, **x})["y0"])
        near = {"eps": 1e-3, "atol": 1e-2, "rtol": 1e-2} if op == "QAttention" else {"eps": 1e-6}  # in float32
        check_grads(y, (floats,), 1, ["rev"], **near)


def test_normalized_rotary_embedding_has_a_gradient() -> None:
    operands = [draw(1, 2, 1, 6, dtype=ml_dtypes.bfloat16), draw(6), np.array([[3, 1]]), draw(4, 2), draw(4, 2)]
    model = transmuter.load(one_node("RMSNormRotary", operands, {"rotary_embedding_dim": 4}, **CONTRIB))
    operands[0][0, 0] = 0
    given = {f"x{i}": jnp.asarray(x) for i, x in enumerate(operands)}
    floats = {name: given[name].astype(np.float32) for name in ("x0", "x1", "x3", "x4")}

    def total(floats: dict[str, jax.Array]) -> jax.Array:
        y = model.apply({}, given | floats | {"x0": floats["x0"].astype(ml_dtypes.bfloat16)})["y0"]
        return jnp.sum(y.astype(np.float32) ** 2)

    gradients = jax.grad(total)(floats)
    assert all(np.isfinite(x).all() for x in gradients.values())
    assert np.abs(gradients["x0"][0, 1]).max() > 0
