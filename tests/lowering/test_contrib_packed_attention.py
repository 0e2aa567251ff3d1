"""Operators of contrib_packed_attention.py, against ONNX Runtime where it has a CPU kernel, else against loops."""

from __future__ import annotations

import itertools
import math
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
from onenode import one_node, run_node

import transmuter

CONTRIB = {"domain": "com.microsoft"}
FLOAT, INT32 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT32
SEEDS = st.integers(0, 2**32 - 1)


class Draw:
    """Arrays of one seed."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)

    def __call__(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(np.float32)

    def ints(self, low: int, high: int, *shape: int) -> np.ndarray:
        return self.rng.integers(low, high + 1, shape).astype(np.int32)

    def either(self, *options: Any) -> Any:
        return options[self.rng.integers(len(options))]


def attended(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    visible: np.ndarray,
    *,
    scale: float = 0.0,
    bias: np.ndarray | None = None,
    softcap: float = 0.0,
    sink: float | None = None,
) -> np.ndarray:
    """One head's attention, query by query and key by key; zero where a query sees no key."""
    result = np.zeros((q.shape[0], v.shape[1]), np.float64)
    for i in range(q.shape[0]):
        weights: dict[int, float] = {}
        for j in np.flatnonzero(visible[i]):
            score = float(q[i].astype(np.float64) @ k[j]) * (scale or 1 / math.sqrt(q.shape[1]))
            score = softcap * math.tanh(score / softcap) if softcap else score
            weights[j] = math.exp(score + (0.0 if bias is None else float(bias[i, j])))
        total = sum(weights.values()) + (0.0 if sink is None else math.exp(sink))
        for j, weight in weights.items():
            result[i] += weight / total * v[j]
    return result


# ---- packed sequences ----------------------------------------------------------------------------------------------


def packing(counts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """token_offset and cumulative_sequence_length."""
    used = [b * length + s for b, count in enumerate(counts) for s in range(count)]
    unused = [b * length + s for b, count in enumerate(counts) for s in range(count, length)]
    offsets = np.array(used + unused, np.int32).reshape(len(counts), length)
    return offsets, np.array([0, *itertools.accumulate(int(c) for c in counts)], np.int32)


@settings(max_examples=15, deadline=None)
@given(SEEDS, st.sampled_from([(1, 3), (3, 4), (2, 1), (0, 2), (2, 0)]))
def test_padding_is_removed_and_restored(seed: int, shape: tuple[int, int]) -> None:
    draw = Draw(seed)
    counts, x = draw.ints(0, shape[1], shape[0]), draw(*shape, 5)
    offsets, ends = packing(counts, shape[1])
    packed = x.reshape(-1, 5)[offsets.reshape(-1)[: ends[-1]]]
    expected = [packed, offsets, ends, np.array([max(counts, default=0)], np.int32)]
    types = [FLOAT, INT32, INT32, INT32]
    assert_equal(run_node("RemovePadding", [x, counts], outputs=4, output_types=types, **CONTRIB), expected)
    padding = np.arange(shape[1]) >= counts[:, None]
    assert_equal(run_node("RestorePadding", [packed, offsets], **CONTRIB), [np.where(padding[..., None], 0, x)])


def test_padding_is_removed_within_a_compiled_model() -> None:
    x, counts = Draw(0)(2, 3, 4), np.array([2, 1], np.int32)
    types = [FLOAT, INT32, INT32, INT32]
    tokens, offsets, *_ = run_node(
        "RemovePadding", [x, counts], outputs=4, output_types=types, compiled=True, **CONTRIB
    )
    assert_equal(tokens, np.concatenate((x[0, :2], x[1, :1])))
    assert offsets.tolist() == [[0, 1, 3], [2, 4, 5]]


def packed_reference(q, k, v, counts, length, heads, scale, bias) -> np.ndarray:
    starts = np.cumsum(counts) - counts
    y = np.zeros((q.shape[0], v.shape[1]), np.float64)
    size, wide = q.shape[1] // heads, v.shape[1] // heads
    for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
        for h in range(heads):
            rows, columns, values = (
                slice(start, start + count),
                slice(h * size, h * size + size),
                slice(h * wide, h * wide + wide),
            )
            y[rows, values] = attended(
                q[rows, columns],
                k[rows, columns],
                v[rows, values],
                np.ones((count, count), bool),
                scale=scale,
                bias=None if bias is None else bias[b % bias.shape[0], h % bias.shape[1], :count, :count],
            )
    return y.astype(np.float32)


@pytest.mark.parametrize("op", ["PackedAttention", "PackedMultiHeadAttention"])
@settings(max_examples=12, deadline=None)
@given(SEEDS, st.sampled_from(["none", "whole", "shared"]))
def test_packed_attention(op: str, seed: int, biased: str) -> None:
    draw, heads, size, length, tokens = Draw(seed), 2, 4, 4, 6
    counts = np.array(draw.either([4, 2, 0], [2, 0, 4], [0, 3, 3], [1, 1, 4]))
    offsets, ends = packing(counts, length)
    wide = heads * draw.either(size, 3)
    attributes: dict[str, Any] = {"num_heads": heads} | ({"scale": 0.3} if draw.either(0, 1) else {})
    projection = draw(2 * heads * size + wide)
    bias = {"none": None, "whole": draw(len(counts), heads, length, length), "shared": draw(1, 1, length, length)}[
        biased
    ]
    sections = [heads * size, 2 * heads * size]
    if op == "PackedAttention":
        x, weights = draw(tokens, 5), draw(5, 2 * heads * size + wide)
        q, k, v = np.split(x @ weights + projection, sections, axis=1)
        attributes |= {"qkv_hidden_sizes": [heads * size, heads * size, wide]} if wide != heads * size else {}
        operands = [x, weights, projection, offsets, ends, bias]
    else:
        form = draw.either("separate", "packed") if wide == heads * size else "separate"
        q, k, v = draw(tokens, heads * size), draw(tokens, heads * size), draw(tokens, wide)
        parts = [q, k, v]
        if form == "packed":
            parts = [np.stack([x.reshape(tokens, heads, size) for x in parts], axis=2), None, None]
        projection = projection if draw.either(0, 1) else None
        operands = [*parts, projection, offsets, ends, bias]
        if projection is not None:
            q, k, v = (x + b for x, b in zip((q, k, v), np.split(projection, sections), strict=True))
    expected = packed_reference(q, k, v, counts, length, heads, attributes.get("scale", 0.0), bias)
    assert_equal(run_node(op, operands, attributes, **CONTRIB), [expected])


# ---- biases by distance --------------------------------------------------------------------------------------------


def bucket_of(distance: int, buckets: int, furthest: int, bidirectional: int) -> int:
    """The bucket of a key `distance` tokens after the query."""
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if distance > 0 else 0
    distance = abs(distance)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    ratio = np.log(np.float32(distance) / np.float32(exact)) / np.log(np.float32(furthest) / np.float32(exact))
    return first + min(exact + int(np.float32(ratio) * (buckets - exact)), buckets - 1)


@settings(max_examples=12, deadline=None)
@given(SEEDS, st.sampled_from([0, 1]), st.sampled_from([9, 20, 128]), st.sampled_from([0, 1, 24]))
def test_relative_position_bias(seed: int, bidirectional: int, furthest: int, length: int) -> None:
    table = Draw(seed)(16, 3)
    expected = np.zeros((1, 3, length, length), np.float32)
    for i in range(length):
        for j in range(length):
            expected[0, :, i, j] = table[bucket_of(j - i, 16, furthest, bidirectional)]
    size = np.array([length], np.int64)
    attributes = {"max_distance": furthest, "is_bidirectional": bidirectional}
    assert_equal(run_node("RelativePositionBias", [table, size, size], attributes, known=(1, 2), **CONTRIB), [expected])


@settings(max_examples=10, deadline=None)
@given(SEEDS, st.booleans())
def test_gated_relative_position_bias(seed: int, packed: bool) -> None:
    draw, heads, size, length = Draw(seed), 2, 3, 4
    counts = np.array([3, 1])
    offsets, ends = packing(counts, length)
    query = draw(2, length, heads * size)
    if packed:
        query[np.arange(length) >= counts[:, None]] = 0
    bias, positions, weight, weight_bias, scale = (
        draw(heads * size),
        draw(1, heads, length, length),
        draw(size, 8),
        draw(8),
        draw(1, heads, 1, 1),
    )
    expected = np.zeros((2, heads, length, length), np.float32)
    for b, h, s in itertools.product(range(2), range(heads), range(length)):
        gates = (query + bias)[b, s, h * size : (h + 1) * size] @ weight + weight_bias
        update, reset = (1 / (1 + np.exp(-half.sum())) for half in (gates[:4], gates[4:]))
        expected[b, h, s] = (update * (reset * scale[0, h, 0, 0] - 1) + 2) * positions[0, h, s]
    operands = [query, bias, positions, weight, weight_bias, scale]
    if packed:
        operands = [query.reshape(-1, heads * size)[offsets.reshape(-1)[: ends[-1]]], *operands[1:], offsets]
    assert_equal(run_node("GatedRelativePositionBias", operands, {"num_heads": heads}, **CONTRIB), [expected])


# ---- windows and blocks --------------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(SEEDS, st.sampled_from([1, 2, 4]))
def test_longformer_attention(seed: int, window: int) -> None:
    draw, batch, length, heads, size = Draw(seed), 2, 8, 2, 3
    hidden = heads * size
    x, flags = draw(batch, length, hidden), draw.ints(0, 3, batch, length) == 3
    hidden_tokens = draw.ints(0, 3, batch, length) == 3
    weights, biases = [draw(hidden, 3 * hidden) for _ in range(2)], [draw(3 * hidden) for _ in range(2)]
    projections = [np.split(x @ w + b, 3, axis=-1) for w, b in zip(weights, biases, strict=True)]
    expected = np.zeros((batch, length, hidden), np.float32)
    for b, h, s in itertools.product(range(batch), range(heads), range(length)):
        if hidden_tokens[b, s]:
            continue
        q, k, v = (part[b, :, h * size : (h + 1) * size] for part in projections[int(flags[b, s])])
        visible = [
            not hidden_tokens[b, t] and (flags[b, s] or flags[b, t] or abs(s - t) <= window) for t in range(length)
        ]
        expected[b, s, h * size : (h + 1) * size] = attended(q[s : s + 1], k, v, np.array([visible]))[0]
    mask = np.where(hidden_tokens, -10000, 0).astype(np.float32)
    operands = [x, weights[0], biases[0], mask, weights[1], biases[1], flags.astype(np.int32)]
    attributes = {"num_heads": heads, "window": window}
    assert_equal(run_node("LongformerAttention", operands, attributes, **CONTRIB), [expected])


def bound_node(op: str, operands: list, attributes: dict, shared: dict[int, int]) -> list[np.ndarray]:
    """ONNX Runtime's outputs, where output i writes over the operand `shared[i]`."""
    import onnxruntime

    model = one_node(op, operands, attributes, outputs=1 + len(shared), **CONTRIB)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    copies = {i: x.copy() for i, x in enumerate(operands) if x is not None}  # which the values do not own
    values = {i: onnxruntime.OrtValue.ortvalue_from_numpy(x) for i, x in copies.items()}
    for i, value in values.items():
        binding.bind_ortvalue_input(f"x{i}", value)
    binding.bind_output("y0")
    for i, operand in shared.items():
        binding.bind_ortvalue_output(f"y{i}", values[operand])
    session.run_with_iobinding(binding)
    return [value.numpy().copy() for value in binding.get_outputs()]


def compressed(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row and column indices of block masks (layouts, blocks, blocks), in CSR form."""
    rows = np.array([[0, *np.cumsum(layout.sum(1))] for layout in blocks], np.int32)
    columns = np.full((len(blocks), blocks[0].size), -1, np.int32)
    for layout, row in zip(blocks, columns, strict=True):
        found = np.nonzero(layout)[1]
        row[: len(found)] = found
    return rows, columns


@settings(max_examples=12, deadline=None)
@given(SEEDS, st.sampled_from(["prompt", "step"]))
def test_sparse_attention(seed: int, stage: str) -> None:
    draw, block, count, layouts, heads, groups, size = Draw(seed), 16, 3, 2, 2, 2, 16
    new = 1 if stage == "step" else 35
    lengths = np.array([37, 20]) if stage == "step" else np.array([35, 35 if seed % 2 else 18])
    blocks = np.tril(draw.ints(0, 1, layouts, count, count)) | np.eye(count, dtype=np.int32)
    parts = [draw(2, new, n * size) for n in (heads * groups, heads, heads)]
    operands = [np.concatenate(parts, axis=-1), None, None] if draw.either(0, 1) else parts
    operands += [draw(2, heads, block * count, size) for _ in range(2)]
    operands += [*compressed(blocks), np.array([lengths.max()], np.int32), lengths.astype(np.int32)]
    attributes: dict[str, Any] = {"num_heads": heads * groups, "kv_num_heads": heads, "sparse_block_size": block}
    attributes |= {"scale": 0.4} if draw.either(0, 1) else {}
    if draw.either(0, 1):
        attributes |= {"do_rotary": 1, "rotary_interleaved": draw.either(0, 1)}
        operands += [draw(block * count, size // 2) for _ in range(2)]
    actual = run_node("SparseAttention", operands, attributes, outputs=3, **CONTRIB)
    shared = {1: 3, 2: 4}
    assert_equal(actual[1:], bound_node("SparseAttention", operands, attributes, shared)[1:])
    for row, length in enumerate(lengths):  # one by one: of a batch, the kernel misreads the shorter sequences
        used = min(length, new)
        alone = [x if x is None or i in (5, 6) or i > 8 else x[row : row + 1] for i, x in enumerate(operands)]
        alone[:3] = [None if x is None else x[:, :used] for x in alone[:3]]
        alone[7:9] = [np.array([length], np.int32)] * 2
        expected = bound_node("SparseAttention", alone, attributes, shared)[0]
        assert_equal(actual[0][row : row + 1, :used], expected)


# ---- pages ---------------------------------------------------------------------------------------------------------


def rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: int) -> np.ndarray:
    """A head turned pair by pair."""
    x, half = x.copy(), len(cos)
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, half + i)
        x[a], x[b] = x[a] * cos[i] - x[b] * sin[i], x[a] * sin[i] + x[b] * cos[i]
    return x


PAGES, PAGE_SIZE, SIZE = 7, 4, 8


@settings(max_examples=20, deadline=None)
@given(
    SEEDS,
    st.sampled_from(["SEPARATE", "SEPARATE", "LATENT"]),
    st.sampled_from(["NONE", "NONE", "PER_TENSOR", "PER_CHANNEL"]),
)
def test_paged_attention(seed: int, layout: str, quantization: str) -> None:
    draw, latent = Draw(seed), layout == "LATENT"
    heads, groups = (1, 4) if latent else (2, 2)
    counts, past = draw.either(([3, 1, 2], [2, 5, 0]), ([0, 3, 3], [7, 3, 0]), ([2, 1, 3], [6, 0, 1]))
    tokens, ends = sum(counts), np.cumsum([0, *counts]).astype(np.int32)
    table = draw.rng.permutation(PAGES)[:6].reshape(3, 2).astype(np.int32)
    if draw.either(0, 1):
        table[1, 1] = draw.either(-1, PAGES + 3)
    q, k, v = (draw(tokens, n, SIZE) for n in (heads * groups, heads, heads))
    attributes: dict[str, Any] = {"num_heads": heads * groups, "kv_num_heads": heads, "is_causal": draw.either(1, 1, 0)}
    optional = {"scale": 0.4, "softcap": 1.5, "local_window_size": 3, "qk_norm_epsilon": 1e-2}
    attributes |= {name: value for name, value in optional.items() if draw.either(0, 1)}
    attributes |= {"kv_cache_layout": layout, "v_head_size": 6, "scale": 0.4} if latent else {}
    kind, scales = np.float32, [None, None]
    if quantization != "NONE":
        kind = draw.either(np.int8, ml_dtypes.float8_e4m3fn)
        shape = (1,) if quantization == "PER_TENSOR" else (heads, 1, SIZE)
        scales = [draw.rng.uniform(0.01, 0.05, shape).astype(np.float32) for _ in range(2)]
        attributes |= {"k_quant_type": quantization} | ({} if latent else {"v_quant_type": quantization})
    caches = [
        (draw(PAGES, PAGE_SIZE, heads, SIZE) * (20 if quantization != "NONE" else 1)).astype(kind) for _ in range(2)
    ]

    def kept(x: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
        """Heads of one token in the form of the cache."""
        if scale is None:
            return x
        scaled = x / np.broadcast_to(scale, (heads, 1, SIZE))[:, 0]
        return (np.clip(np.round(scaled), -128, 127) if kind is np.int8 else np.clip(scaled, -448, 448)).astype(kind)

    def read(cache: np.ndarray, page: int, offset: int, scale: np.ndarray | None) -> np.ndarray:
        return cache[page, offset] * (1 if scale is None else np.broadcast_to(scale, (heads, 1, SIZE))[:, 0])

    norms = [draw(SIZE), draw(SIZE)] if draw.either(0, 1) else [None, None]
    tables, offset = [None, None], 0
    if draw.either(0, 1):
        offset, tables = draw.either(0, 2), [draw(16, 3), draw(16, 3)]
        attributes |= {"do_rotary": 1, "rotary_interleaved": draw.either(0, 1), "rotary_offset": offset}
    sinks, slots = draw(heads * groups) if draw.either(0, 1) else None, None
    flat = q.reshape(tokens, -1), k.reshape(tokens, -1), v.reshape(tokens, -1)
    operands = [*flat[:2], None] if latent else draw.either([*flat], [np.concatenate(flat, 1), None, None])
    operands += [caches[0], None if latent else caches[1], ends, np.array(past, np.int32), table, *tables]

    # the reference: token by token into the pages, then query by query over them
    q, k, places, written = q.copy(), k.copy(), [], [cache.copy() for cache in caches]
    for b, count in enumerate(counts):
        for s in range(count):
            token, position = ends[b] + s, past[b] + s
            for x, norm in ((q, norms[0]), (k, norms[1])):
                if norm is not None:
                    mean = (x[token] ** 2).mean(-1, keepdims=True) + attributes.get("qk_norm_epsilon", 1e-6)
                    x[token] = x[token] / np.sqrt(mean) * norm
                if tables[0] is not None:
                    for h in range(x.shape[1]):
                        turned = rotated(
                            x[token, h, offset:],
                            tables[0][position],
                            tables[1][position],
                            attributes["rotary_interleaved"],
                        )
                        x[token, h, offset:] = turned
            page = table[b, position // PAGE_SIZE]
            places.append(page * PAGE_SIZE + position % PAGE_SIZE if 0 <= page < PAGES else -1)
    if draw.either(0, 1):  # a store that is suppressed
        places[draw.rng.integers(tokens)] = -1
        slots = np.array(places, np.int32)
    for token, place in enumerate(places):
        if place >= 0:
            written[0][place // PAGE_SIZE, place % PAGE_SIZE] = kept(k[token], scales[0])
            written[1][place // PAGE_SIZE, place % PAGE_SIZE] = kept(v[token], scales[1])
    wide = 6 if latent else SIZE
    expected = np.zeros((tokens, heads * groups, wide), np.float32)
    for b, count in enumerate(counts):
        total, keys, values, mapped = past[b] + count, [], [], []
        for position in range(total):
            page = table[b, position // PAGE_SIZE]
            mapped.append(0 <= page < PAGES)
            page = page if mapped[-1] else 0
            keys.append(read(written[0], page, position % PAGE_SIZE, scales[0]))
            values.append(keys[-1][:, :wide] if latent else read(written[1], page, position % PAGE_SIZE, scales[1]))
        for s, h in itertools.product(range(count), range(heads * groups)):
            position, window = past[b] + s, attributes.get("local_window_size", total)
            visible = [
                mapped[t] and t > position - window and (t <= position or not attributes["is_causal"])
                for t in range(total)
            ]
            expected[ends[b] + s, h] = attended(
                q[ends[b] + s, h][None],
                np.array(keys)[:, h // groups],
                np.array(values)[:, h // groups],
                np.array([visible]),
                scale=attributes.get("scale", 0.0),
                softcap=attributes.get("softcap", 0.0),
                sink=None if sinks is None else sinks[h],
            )[0]
    operands += [slots, sinks, *norms, scales[0], None if latent else scales[1], np.array([8, 16], np.int32)]
    outputs = 2 if latent else 3
    types = [FLOAT, *[onnx.helper.np_dtype_to_tensor_dtype(np.dtype(kind))] * (outputs - 1)]
    actual = run_node("PagedAttention", operands, attributes, outputs=outputs, output_types=types, **CONTRIB)
    assert_equal(actual[0], expected.reshape(tokens, -1))
    for cache, reference in zip(actual[1:], written, strict=False):
        assert_equal(cache.astype(np.float32), reference.astype(np.float32))


def test_pages_of_sequences_of_hidden_length() -> None:
    draw = Draw(3)
    operands = [*(draw(4, 8) for _ in range(3)), *(draw(5, 4, 1, 8) for _ in range(2))]
    operands += [np.array([0, 3, 4], np.int32), np.array([2, 1], np.int32), np.array([[1, 0], [3, 2]], np.int32)]
    attributes = {"num_heads": 1, "kv_num_heads": 1}
    model = transmuter.load(one_node("PagedAttention", operands, attributes, outputs=3, **CONTRIB))
    given = {f"x{i}": x for i, x in enumerate(operands)}
    hidden = jax.jit(lambda x: model.apply({}, x))(given)
    assert_equal(
        [np.asarray(y) for y in hidden.values()],
        run_node("PagedAttention", operands, attributes, outputs=3, **CONTRIB),
    )


def test_small_elements_in_pages_are_refused() -> None:
    operands = [np.zeros((1, 8), np.float32)] * 3 + [np.zeros((2, 4, 1, 4), np.uint8)] * 2
    operands += [np.array([0, 1], np.int32), np.array([0], np.int32), np.array([[0, 1]], np.int32)]
    with pytest.raises(transmuter.TransmuterError, match="less than a byte"):
        run_node("PagedAttention", operands, {"num_heads": 1, "kv_num_heads": 1}, **CONTRIB)


# ---- gradients -----------------------------------------------------------------------------------------------------

D = Draw(5)
OFFSETS, ENDS = packing(np.array([2, 0, 3]), 3)
ROWS, COLUMNS = compressed(np.array([[[1, 0], [1, 1]], [[1, 0], [0, 1]]]))
GRADIENTS = {
    "RemovePadding": ([D(2, 3, 2), np.array([1, 3], np.int32)], {}, (1,)),
    "RestorePadding": ([D(5, 2), OFFSETS], {}, ()),
    "PackedAttention": ([D(5, 2), D(2, 12), D(12), OFFSETS, ENDS, D(1, 2, 3, 3)], {"num_heads": 2}, ()),
    "PackedMultiHeadAttention": ([D(5, 2, 3, 2), None, None, D(12), OFFSETS, ENDS], {"num_heads": 2}, ()),
    "RelativePositionBias": (
        [D(4, 2), np.array([5], np.int64), np.array([5], np.int64)],
        {"max_distance": 4},
        (1, 2),
    ),
    "GatedRelativePositionBias": (
        [D(1, 3, 4), D(4), D(1, 2, 3, 3), D(2, 4), D(4), D(1, 2, 1, 1)],
        {"num_heads": 2},
        (),
    ),
    "LongformerAttention": (
        [
            *(D(1, 4, 2), D(2, 6), D(6), np.array([[0.5, 0.2, -10000, 0.3]], np.float32)),
            *(D(2, 6), D(6), np.array([[1, 0, 0, 0]], np.int32)),
        ],
        {"num_heads": 1, "window": 1},
        (),
    ),
    "SparseAttention": (
        [
            *(D(1, 2, n * 4) for n in (2, 1, 1)),
            *(D(1, 1, 32, 4) for _ in range(2)),
            *(ROWS, COLUMNS, np.array([18], np.int32), np.array([18], np.int32)),
            *(D(32, 2), D(32, 2)),
        ],
        {"num_heads": 2, "kv_num_heads": 1, "sparse_block_size": 16, "do_rotary": 1},
        (),
    ),
    "PagedAttention": (
        [
            *(D(3, n * 4) for n in (2, 1, 1)),
            *(D(4, 2, 1, 4) for _ in range(2)),
            *(np.array([0, 2, 3], np.int32), np.array([1, 0], np.int32), np.array([[2, 0], [-1, 3]], np.int32)),
            *(D(6, 2), D(6, 2), None, D(2), D(4), D(4)),
        ],
        {"num_heads": 2, "kv_num_heads": 1, "do_rotary": 1, "softcap": 2.0},
        (),
    ),
}


@pytest.mark.parametrize("op", GRADIENTS)
def test_gradients(op: str) -> None:
    """Also where a sequence is empty, a query is masked, or sees no mapped page."""
    operands, attributes, known = GRADIENTS[op]
    with jax.enable_x64(True):
        wide = [x.astype(np.float64) if x is not None and x.dtype.kind == "f" else x for x in operands]
        model = transmuter.load(one_node(op, wide, attributes, known=known, **CONTRIB))
        given = {f"x{i}": x for i, x in enumerate(wide) if x is not None and i not in known}
        floats = {name: jnp.asarray(x) for name, x in given.items() if x.dtype.kind == "f"}
        y = jax.jit(lambda x: model.apply({}, {**given, **x})["y0"])
        check_grads(y, (floats,), 1, ["rev"], eps=1e-6)
