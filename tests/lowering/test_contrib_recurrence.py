"""Operators of contrib_recurrence.py, and AttnLSTM: ONNX Runtime, loops for what its CPU kernels refuse, gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_equal
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export
from jax.test_util import check_grads
from onenode import one_node, ort_node, run_node

import transmuter

RNG = np.random.default_rng(0)
CONTRIB = {"domain": "com.microsoft"}
FLOAT, INT32, INT64, FLOAT16 = 1, 6, 7, 10
few = settings(max_examples=15, deadline=None)


def draw(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def ids(*shape: int, high: int = 5, dtype: Any = np.int32) -> np.ndarray:
    return RNG.integers(0, high, shape).astype(dtype)


def check(op: str, operands: list, attributes: dict, types: tuple = (FLOAT,), **kwargs: Any) -> list[np.ndarray]:
    """What the operator gives, after a check that ONNX Runtime gives the same."""
    options = {"outputs": len(types), "output_types": types, **CONTRIB, **kwargs}
    actual = run_node(op, operands, attributes, **options)
    options.pop("compiled", None)
    assert_equal(actual, ort_node(op, operands, attributes, **options))
    return actual


def gradients(op: str, operands: list, attributes: dict, outputs: int = 1) -> None:
    """Checks those of the first and the last output in the floating-point operands, in float64."""
    wide = [x if x is None or x.dtype.kind != "f" else x.astype(np.float64) for x in operands]
    model = transmuter.load(one_node(op, wide, attributes, outputs=outputs, **CONTRIB), compute_type=None)
    feeds = {f"x{i}": x for i, x in enumerate(wide) if x is not None}
    floats = {name: x for name, x in feeds.items() if x.dtype.kind == "f"}
    with jax.enable_x64(True):

        def call(floats: dict) -> list:
            results = model.apply({}, {**feeds, **floats})
            return [results["y0"], results[f"y{outputs - 1}"]]

        check_grads(jax.jit(call), ({k: jnp.asarray(x) for k, x in floats.items()},), 1, ["rev"])


# ---- causal convolution --------------------------------------------------------------------------------------------


@few
@given(
    st.sampled_from([1, 5]),
    st.sampled_from([1, 3]),
    st.sampled_from([1, 2]),
    st.sampled_from(["none", "silu", "swish"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_causal_conv(length: int, taps: int, dilation: int, activation: str, last: bool, past: bool, biased: bool):
    layout = (lambda x: np.ascontiguousarray(np.moveaxis(x, 1, -1))) if last else lambda x: x
    state = layout(draw(2, 4, (taps - 1) * dilation)) if past else None
    operands = [layout(draw(2, 4, length)), draw(4, 1, taps), draw(4) if biased else None, state]
    attributes = {"activation": activation, "dilation": dilation, "channels_last": int(last)}
    check("CausalConvWithState", operands, attributes, (FLOAT, FLOAT))


def test_causal_conv_with_channels_in_two_dimensions() -> None:
    operands = [draw(2, 3, 2, 2), draw(4, 1, 2), None, draw(2, 1, 2, 2)]
    check("CausalConvWithState", operands, {"channels_last": 1}, (FLOAT, FLOAT))


def test_causal_conv_on_the_extended_path() -> None:
    """A slice of the channels, a longer state in a layout of its own, a window of states, the first rows."""
    x, w, past = draw(2, 3, 6), draw(4, 1, 2), draw(2, 4, 3)
    attributes = {
        "channels_last": 1,
        "state_channels_last": 0,
        "state_length": 3,
        "input_channels": 4,
        "input_channel_offset": 1,
        "state_update_capacity": 5,
    }
    y, state, rows = run_node("CausalConvWithState", [x, w, None, past], attributes, outputs=3, **CONTRIB)
    inner = np.ascontiguousarray(x[:, :, 1:5].swapaxes(1, 2))
    expected, _ = ort_node("CausalConvWithState", [inner, w, None, past[:, :, 2:]], {}, outputs=2, **CONTRIB)
    assert_equal([y, state], [expected.swapaxes(1, 2), inner])
    assert_equal(rows, np.pad(x[:, :, 1:5], [(0, 0), (0, 2), (0, 0)]))


@pytest.mark.parametrize("window", [2, 5])
def test_a_window_holds_the_states_after_the_last_tokens(window: int) -> None:
    x, w, past = draw(1, 2, 3), draw(2, 1, 3), draw(window, 1, 2, 2)
    attributes = {"state_window": window}
    y, states = run_node("CausalConvWithState", [x, w, None, past], attributes, outputs=2, **CONTRIB)
    expected = ort_node("CausalConvWithState", [x, w, None, past[-1]], {}, outputs=2, **CONTRIB)
    assert_equal([y, states[-1]], expected)
    for slot, state in enumerate(states):
        after = 3 - window + slot + 1
        whole = np.concatenate([past[-1], x], 2)
        assert_equal(state, whole[:, :, after : after + 2] if after > 0 else np.zeros_like(state))

    operands = [draw(1, 3, 4), draw(1, 3, 4), draw(1, 3, 6), draw(window, 1, 2, 2, 3), -abs(draw(1, 3, 2)), None]
    rule = {"q_num_heads": 2, "kv_num_heads": 2, "update_rule": "gated"}
    y, states = run_node("LinearAttention", operands, {**rule, "state_window": window}, outputs=2, **CONTRIB)
    state, parts = operands[3][-1], []
    for t in range(3):
        token = [x if x is None else x[:, t : t + 1] for x in operands]
        part, state = ort_node("LinearAttention", [*token[:3], state, *token[4:]], rule, outputs=2, **CONTRIB)
        parts.append(part)
        if (slot := t - 3 + window) >= 0:
            assert_equal(states[slot], state)
    assert_equal(y, np.concatenate(parts, 1))
    assert not states[: max(0, window - 3)].any()


@few
@given(
    st.sampled_from([[0, 3, 5], [0, 1, 5]]),
    st.sampled_from([(1, 1), (3, 1), (3, 2)]),
    st.sampled_from(["none", "silu"]),
    st.sampled_from([0, 2]),
)
def test_packed_causal_conv(bounds: list, kernel: tuple, activation: str, capacity: int):
    (taps, dilation), batch = kernel, len(bounds) - 1
    operands = [draw(5, 4), draw(4, 1, taps), np.int32(bounds), draw(4), draw(batch, 4, (taps - 1) * dilation)]
    operands += [ids(batch, high=9)] if capacity else []
    attributes = {"activation": activation, "dilation": dilation, "state_update_capacity": capacity}
    check("VarlenCausalConvWithState", operands, attributes, (FLOAT,) * (3 if capacity else 2))


def test_packed_causal_conv_with_weights_of_each_token() -> None:
    x, w, state, bounds = draw(5, 4), draw(4, 1, 2), draw(2, 4, 1), np.int32([0, 2, 5])
    deltas, mask = draw(5, 3, 2), draw(5, 1)
    operands = [x, w, bounds, None, state, None, deltas, mask]
    y, _ = run_node("VarlenCausalConvWithState", operands, {"delta_offset": 1, "group_size": 2}, outputs=2, **CONTRIB)
    expected = np.zeros_like(x)
    for t in range(5):
        before = state[0, :, 0] if t == 0 else state[1, :, 0] if t == 2 else x[t - 1]
        for c in range(4):
            now = x[t, c] * (w[c, 0, 1] + deltas[t, 1, c // 2])
            expected[t, c] = now + before[c] * (w[c, 0, 0] + deltas[t, 2, c // 2]) * mask[t, 0]
    assert_equal(y, expected)


# ---- linear attention ----------------------------------------------------------------------------------------------

RULES = {"linear": (0, 0), "gated": (1, 0), "delta": (0, 1), "gated_delta": (1, 1)}


@few
@given(
    st.sampled_from(sorted(RULES)),
    st.sampled_from([(4, 2, 2), (2, 2, 2), (2, 4, 4), (2, 4, 2), (1, 2, 1)]),
    st.sampled_from([0.0, 0.5]),
    st.booleans(),
    st.booleans(),
)
def test_linear_attention_shares_heads_either_way(rule: str, heads: tuple, scale: float, by_size: bool, past: bool):
    queries, values, keys = heads
    gated, corrected = RULES[rule]
    operands = [
        draw(2, 3, queries * 2),
        draw(2, 3, keys * 2),
        draw(2, 3, values * 3),
        draw(2, values, 2, 3) if past else None,
        -abs(draw(2, 3, values * (2 if by_size else 1))) if gated else None,
        abs(draw(2, 3, values)) if corrected else None,
    ]
    attributes = {"q_num_heads": queries, "kv_num_heads": values, "update_rule": rule, "scale": scale}
    check("LinearAttention", operands, attributes, (FLOAT, FLOAT))


@few
@given(
    st.sampled_from(sorted(RULES)),
    st.sampled_from([None, [0, 1, 6], [0, 4, 6]]),
    st.sampled_from(["none", "softplus", "sigmoid"]),
    st.sampled_from(["none", "sigmoid"]),
    st.sampled_from(["rank 3", "rank 4", "packed"]),
    st.sampled_from([0, 2, 4]),
    st.booleans(),
    st.booleans(),
)
def test_gated_delta_net(
    rule: str, bounds: list, gate: str, rate: str, form: str, capacity: int, by_size: bool, normal: bool
) -> None:
    gated, corrected = RULES[rule]
    query, key, value = draw(6, 2, 2), draw(6, 2, 2) / 2, draw(6, 4, 3)
    decay = -abs(draw(6, 4, 2) if by_size else draw(6, 4)) if gated else None
    beta = abs(draw(6, 4)) / 2 if corrected else None
    if form == "packed":
        query, key, value = np.concatenate([x.reshape(6, -1) for x in (query, key, value)], 1), None, None
    elif form == "rank 4" and bounds is None:
        split = lambda x: None if x is None else x.reshape(2, 3, *x.shape[1:])
        query, key, value, decay, beta = map(split, (query, key, value, decay, beta))
    has_gate = gated and gate != "none"
    operands = [query, key, value, None if bounds is None else np.int32(bounds), decay, beta, draw(2, 4, 3, 2)]
    operands += [draw(4), draw(4, 2) if by_size else draw(4)] if has_gate else [None, None]
    counts = ids(2, high=6)
    operands += [counts] if capacity else []
    attributes = {
        "update_rule": rule,
        "gate_activation": gate if gated else "none",
        "beta_activation": rate if corrected else "none",
        "qk_l2_norm": int(normal),
        "state_update_capacity": capacity,
        "gate_lower_bound": -2.0,
    }
    options = {"outputs": 3 if capacity else 2, **CONTRIB}
    actual = run_node("GatedDeltaNet", operands, attributes, **options)
    expected = ort_node("GatedDeltaNet", operands, attributes, **options)
    assert_equal(actual[:2], expected[:2])
    if capacity:  # beyond what is captured anything may be
        lengths = [3, 3] if bounds is None else np.diff(bounds)
        used = np.arange(capacity) < np.minimum(counts, lengths)[:, None]
        parts = [4 * (2 if by_size and gated else 1), 4, 12]
        used = np.concatenate([np.repeat(used, part, axis=1) for part in parts], 1)
        assert_equal(actual[2], np.where(used, expected[2], 0))


def test_gated_delta_net_without_capture_in_use() -> None:
    operands = [draw(3, 1, 2), draw(3, 1, 2), draw(3, 1, 2), np.int32([0, 1, 3]), None, None, None, None, None]
    operands += [np.int32([1, 1]), np.int32([0])]
    attributes = {"update_rule": "linear", "state_update_capacity": 1}
    _, _, update = run_node("GatedDeltaNet", operands, attributes, outputs=3, **CONTRIB)
    assert_equal(update, np.zeros((2, 5), np.float32))


# ---- hashed n-grams ------------------------------------------------------------------------------------------------


@few
@given(
    st.sampled_from([(1, 2), (4, 3)]),
    st.sampled_from([0, 1]),
    *[st.booleans()] * 4,
)
def test_ngram_hashes(lengths: tuple, reset: int, past: bool, end: bool, segmented: bool, offset: bool):
    length, largest = lengths
    heads = (largest - 1) * 2
    operands = [
        ids(2, length, dtype=np.int64),
        RNG.integers(-(2**63), 2**63, largest),
        RNG.integers(1, 50, heads).astype(np.int64),
        ids(2, largest - 1, dtype=np.int64) if past else None,
        ids(heads, high=99, dtype=np.int64) if offset else None,
        np.array(1, np.int64) if end else None,
        ids(2, length, high=2) if segmented else None,
    ]
    attributes = {"max_ngram_size": largest, "n_head_per_ngram": 2, "pad_id": 3, "reset_on_eos": reset}
    with jax.enable_x64(True):
        check("NGramHashMapping", operands, attributes, (INT64,) * 2)


@few
@given(
    st.sampled_from([[0, 3, 5], [0, 1, 5]]),
    st.sampled_from([2, 4]),
    st.sampled_from([0, 1]),
    st.sampled_from([0, 2]),
    *[st.booleans()] * 5,
)
def test_packed_ngram_hashes(
    bounds: list,
    largest: int,
    reset: int,
    capacity: int,
    past: bool,
    end: bool,
    segmented: bool,
    kept: bool,
    offset: bool,
):
    heads, batch = (largest - 1) * 2, len(bounds) - 1
    operands = [
        ids(5),
        RNG.integers(-(2**31), 2**31, largest).astype(np.int32),
        RNG.integers(1, 50, heads).astype(np.int32),
        np.int32(bounds),
        ids(batch, largest - 1) if past or kept else None,
        np.full(heads, 2**31 - 9, np.int32) if offset else None,
        np.array(1, np.int32) if end else None,
        ids(5, high=2) if segmented else None,
        ids(batch, largest - 1, high=2) if segmented and kept else None,
        ids(batch, high=5) if capacity else None,
    ]
    attributes = {"max_ngram_size": largest, "n_head_per_ngram": 2, "pad_id": 3, "reset_on_eos": reset}
    outputs = 4 if capacity else 3
    if not segmented:  # then ONNX Runtime has no third output
        operands, outputs = operands[:9], 2
    elif capacity:
        attributes["state_update_capacity"] = capacity
    check("VarlenNGramHashMapping", operands, attributes, (INT32,) * outputs)


# ---- an LSTM with a memory -----------------------------------------------------------------------------------------


@settings(max_examples=6, deadline=None)  # each compiles a layer
@given(
    st.sampled_from(["forward", "reverse", "bidirectional"]),
    st.sampled_from([0, 1]),
    *[st.booleans()] * 4,
)
def test_attentive_lstm(direction: str, coupled: int, layered: bool, uneven: bool, initial: bool, peeks: bool):
    directions, size, hidden, depth, memory = 1 + (direction == "bidirectional"), 2, 3, 2, 4
    read = 5 if layered else memory
    operands = [
        draw(3, 2, size),
        draw(directions, 4 * hidden, size + read),
        draw(directions, 4 * hidden, hidden),
        draw(directions, 8 * hidden),
        np.int32([3, 1]) if uneven else None,
        draw(directions, 2, hidden) if initial else None,
        draw(directions, 2, hidden) if initial else None,
        draw(directions, 3 * hidden) if peeks else None,
        draw(directions, hidden, depth),
        draw(directions, memory, depth),
        draw(directions, depth),
        draw(2, 4, memory),
        np.int32([2, 4]) if uneven else None,
        draw(directions, memory + hidden, read) if layered else None,
    ]
    attributes = {
        "direction": direction,
        "hidden_size": hidden,
        "input_forget": coupled,
        "activations": ["Sigmoid", "Tanh", "Tanh"] * directions,
    }
    check("AttnLSTM", operands, attributes, (FLOAT,) * 3)


# ---- how they are called -------------------------------------------------------------------------------------------


def test_halves_are_accumulated_in_float32() -> None:
    half = lambda *shape: draw(*shape, dtype=np.float16)
    bounds, state = np.int32([0, 2, 6]), draw(2, 2, 3, 2)
    operands = [half(6, 1, 2), half(6, 1, 2), half(6, 2, 3), bounds, -abs(half(6, 2)), half(6, 2), state]
    check("GatedDeltaNet", operands, {"qk_l2_norm": 1}, (FLOAT16, FLOAT))
    operands = [half(6, 4), half(4, 1, 3), bounds, half(4), half(2, 4, 2)]
    check("VarlenCausalConvWithState", operands, {"activation": "silu"}, (FLOAT16, FLOAT16))


@pytest.mark.parametrize(
    ("op", "operands", "attributes", "kind"),
    [
        (
            "LinearAttention",
            [draw(2, 0, 4), draw(2, 0, 4), draw(2, 0, 4), draw(2, 2, 2, 2)],
            {"q_num_heads": 2, "kv_num_heads": 2, "update_rule": "linear"},
            FLOAT,
        ),
        ("CausalConvWithState", [draw(2, 4, 0), draw(4, 1, 3), None, draw(2, 4, 2)], {}, FLOAT),
        (
            "NGramHashMapping",
            [ids(2, 0), np.int32([1, 2, 3]), np.int32([3, 4]), ids(2, 2)],
            {"max_ngram_size": 3, "n_head_per_ngram": 1, "pad_id": 0},
            INT32,
        ),
    ],
)
def test_without_tokens_states_stay(op: str, operands: list, attributes: dict, kind: int) -> None:
    check(op, operands, attributes, (kind, kind))


def test_64_bit_ids_with_x64_off() -> None:
    operands = [ids(2, 4, dtype=np.int64), np.int64([7, 3, 5]), np.int64([11, 13]), None, np.int64([0, 11])]
    attributes = {"max_ngram_size": 3, "n_head_per_ngram": 1, "pad_id": 3}
    check("NGramHashMapping", operands, attributes, (INT64, INT64), known=[1, 2, 4], compiled=True)


def test_symbolic_batch_and_length() -> None:
    b, s = export.symbolic_shape("b, s")
    operands = [draw(2, 3, 1, 2), draw(2, 3, 1, 2), draw(2, 3, 2, 3), None, -abs(draw(2, 3, 2)), draw(2, 3, 2)]
    model = transmuter.load(one_node("GatedDeltaNet", operands, outputs=2, **CONTRIB))
    given = {f"x{i}": x for i, x in enumerate(operands) if x is not None}
    shapes = {name: jax.ShapeDtypeStruct((b, s, *x.shape[2:]), x.dtype) for name, x in given.items()}
    exported = export.export(jax.jit(lambda x: model.apply({}, x)))(shapes)
    expected = ort_node("GatedDeltaNet", operands, outputs=2, **CONTRIB)
    assert_equal([np.asarray(y) for y in exported.call(given).values()], expected)


# ---- gradients -----------------------------------------------------------------------------------------------------

MEMORY = [draw(1, 2, 2), draw(1, 3, 2), draw(1, 2), draw(2, 2, 3), np.int32([2, 1])]
GRADIENTS = {
    "CausalConvWithState": ([draw(1, 2, 4), draw(2, 1, 3), draw(2), draw(1, 2, 2)], {"activation": "silu"}, 2),
    "VarlenCausalConvWithState": (
        [draw(3, 2), draw(2, 1, 3), np.int32([0, 1, 3]), draw(2), draw(2, 2, 2)],
        {"activation": "silu"},
        2,
    ),
    "LinearAttention": (
        [draw(1, 2, 2), draw(1, 2, 2), draw(1, 2, 4), draw(3, 1, 2, 2, 2), draw(1, 2, 4), draw(1, 2, 1)],
        {"q_num_heads": 1, "kv_num_heads": 2, "state_window": 3},
        2,
    ),
    "GatedDeltaNet": (
        [
            *(draw(3, 1, 2), draw(3, 1, 2), draw(3, 2, 2), np.int32([0, 1, 3]), draw(3, 2), draw(3, 2)),
            *(draw(2, 2, 2, 2), draw(2), draw(2, 2)),
        ],
        {"gate_activation": "softplus", "beta_activation": "sigmoid", "qk_l2_norm": 1},
        2,
    ),
    "AttnLSTM": ([draw(3, 2, 2), draw(1, 8, 5), draw(1, 8, 2), None, np.int32([3, 1]), *[None] * 3, *MEMORY], {}, 3),
}


@pytest.mark.parametrize("op", GRADIENTS)
def test_gradients(op: str) -> None:
    gradients(op, *GRADIENTS[op])


@pytest.mark.parametrize(
    ("op", "operands", "attributes", "message"),
    [
        ("CausalConvWithState", [draw(1, 2, 3, 3), draw(2, 1, 2, 2)], {"ndim": 2}, "one spatial dimension"),
        ("CausalConvWithState", [draw(1, 2, 3), draw(2, 1, 2)], {"activation": "relu"}, "no activation 'relu'"),
        ("LinearAttention", [draw(1, 2, 2)] * 3, {"q_num_heads": 1, "kv_num_heads": 1}, "needs decay"),
    ],
)
def test_what_is_not_supported_is_refused(op: str, operands: list, attributes: dict, message: str) -> None:
    with pytest.raises(transmuter.TransmuterError, match=message):
        run_node(op, operands, attributes, outputs=2, **CONTRIB)
