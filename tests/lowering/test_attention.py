"""Operators of attention.py: ONNX Runtime, masks, gradients, half types, x64 off, symbolic dimensions."""

from __future__ import annotations

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
from jax import export
from jax.test_util import check_grads
from onenode import one_node, ort_node, reference_node, run_node
from onnx import helper

import transmuter

RNG = np.random.default_rng(0)


def draw(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def function(op: str, inputs: list, attributes: dict | None = None, **kwargs: Any):
    """The node's first output as a JAX function of its floating-point operands, and these."""
    model = transmuter.load(one_node(op, inputs, attributes, **kwargs), compute_type=None)
    given = {f"x{i}": x for i, x in enumerate(inputs) if x is not None and i not in kwargs.get("known", ())}
    floats = {name: x for name, x in given.items() if x.dtype.kind == "f"}
    return lambda floats: model.apply({}, {**given, **floats})["y0"], jax.tree.map(jnp.asarray, floats)


# ---- Attention -----------------------------------------------------------------------------------------------------


@st.composite
def attentions(draws: st.DrawFn) -> tuple[list, dict, int]:
    """Operands and attributes in which every query sees a key, and how many outputs the node has."""
    choose = lambda *options: draws(st.sampled_from(options))
    batch, queries, keys, groups, size = choose(1, 2), choose(1, 3, 4), choose(4, 6), choose(1, 2), choose(2, 4)
    kv_heads, value_size, past = choose(1, 2), choose(3, 4), choose(0, 3)
    count, total = kv_heads * groups, keys + past
    attributes: dict[str, Any] = {"is_causal": choose(0, 1) if queries > 1 else 0}
    sizes = (count, queries, size), (kv_heads, keys, size), (kv_heads, keys, value_size)
    operands = [draw(batch, *shape) for shape in sizes]
    if choose(False, True):
        operands = [np.ascontiguousarray(x.swapaxes(1, 2)).reshape(batch, x.shape[2], -1) for x in operands]
        attributes.update(q_num_heads=count, kv_num_heads=kv_heads)
    mask = draw(choose(1, batch), choose(1, count), queries, total)
    if choose(False, True):
        mask = mask > 0
        mask[..., 0] = True
    mask = {"none": None, "2-D": mask[0, 0], "4-D": mask}[choose("none", "2-D", "4-D")]
    cache = [draw(batch, kv_heads, past, size), draw(batch, kv_heads, past, value_size)] if past else []
    if choose(False, True):
        attributes["softcap"] = 2.0
    if choose(False, True):
        attributes["scale"] = 0.3
    return [*operands, mask, *cache] if cache or mask is not None else operands, attributes, 3 if past else 1


@settings(max_examples=15, deadline=None)
@given(attentions())
def test_attention_equals_onnxruntime(case: tuple[list, dict, int]) -> None:
    operands, attributes, outputs = case
    expected = ort_node("Attention", operands, attributes, outputs=outputs)
    with jax.numpy_dtype_promotion("strict"):
        actual = run_node("Attention", operands, attributes, outputs=outputs, compiled=True)
    assert_equal(actual, expected)


@st.composite
def masked_attentions(draws: st.DrawFn) -> tuple[list, dict, int]:
    """Operands and attributes in which a query may see no key, and an opset."""
    choose = lambda *options: draws(st.sampled_from(options))
    opset, batch, queries, past, count, groups = choose(23, 24, 25), choose(2, 0), choose(3, 1), choose(0, 2), 2, 2
    attributes: dict[str, Any] = {"is_causal": choose(0, 1), "qk_matmul_output_mode": choose(0, 1, 2, 3)}
    attributes |= choose({}, {"softcap": 1.5}, {"softmax_precision": onnx.TensorProto.DOUBLE, "scale": 0.3})
    if "softcap" in attributes:  # the reference caps even what comes before
        attributes["qk_matmul_output_mode"] = max(attributes["qk_matmul_output_mode"], 1)
    if opset == 25:
        attributes |= {"left_window_size": choose(-1, 0, 2), "right_window_size": choose(-1, 0, 1)}
    operands = [draw(batch, count * groups, queries, 4), draw(batch, count, 5, 4), draw(batch, count, 5, 3)]
    if batch and choose(False, True):
        operands = [np.ascontiguousarray(x.swapaxes(1, 2)).reshape(batch, x.shape[2], -1) for x in operands]
        attributes |= {"q_num_heads": count * groups, "kv_num_heads": count}
    total = 5 + past
    shape = choose(None, (queries, total), (4, queries, total), (1, 1, queries, total), (queries, total - 1))
    mask = None if shape is None else draw(*shape)
    kind = choose("a bias", "which keys count", "a bias that hides keys")
    if mask is not None and kind != "a bias":
        hidden = RNG.random(shape) < 0.4
        mask = ~hidden if kind == "which keys count" else np.where(hidden, -np.inf, mask).astype(np.float32)
    operands.append(mask)
    if past:
        operands += [draw(batch, count, past, 4), draw(batch, count, past, 3)]
    elif opset > 23 and choose(False, True):
        operands += [None, None, RNG.integers(0, total + 1, batch)]
    while operands[-1] is None:
        operands.pop()
    return operands, attributes, opset


@settings(max_examples=20, deadline=None)
@given(masked_attentions())
def test_masked_attention_equals_the_reference(case: tuple[list, dict, int]) -> None:
    operands, attributes, opset = case
    expected = reference_node("Attention", operands, attributes, outputs=4, opset=opset)
    actual = run_node("Attention", operands, attributes, outputs=4, opset=opset, compiled=True)
    assert_equal(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.int64, np.int8, np.float64])
def test_a_short_mask_of_another_dtype_hides_the_rest(dtype: Any) -> None:
    operands, mask = [draw(1, 2, n, 4) for n in (3, 5, 5)], RNG.integers(-2, 3, (3, 4)).astype(dtype)
    as_float = np.pad(mask.astype(np.float32), [(0, 0), (0, 1)], constant_values=-np.inf)
    assert_equal(run_node("Attention", [*operands, mask]), run_node("Attention", [*operands, as_float]))


def test_query_without_a_key_is_zero_and_has_no_gradient() -> None:
    mask = np.array([[True, False, True], [False, False, False]])
    operands = [draw(1, 2, 2, 4), draw(1, 2, 3, 4), draw(1, 2, 3, 4), mask]
    call, floats = function("Attention", operands)
    assert not np.asarray(call(floats))[:, :, 1].any()
    for gradient in jax.tree.leaves(jax.grad(lambda x: jnp.sum(call(x) ** 2))(floats)):
        assert np.isfinite(gradient).all()
    assert_equal(
        run_node("Attention", [*operands[:3], np.where(mask, 0, -np.inf).astype(np.float32)]),
        [np.asarray(call(floats))],
    )


def test_infinite_scores_of_hidden_keys_do_not_matter() -> None:
    q, k, v = draw(1, 1, 2, 4), draw(1, 1, 3, 4), draw(1, 1, 3, 4)
    k[:, :, 2] = np.inf
    mask = np.array([[True, True, False]] * 2)
    assert_equal(run_node("Attention", [q, k, v, mask]), run_node("Attention", [q, k[:, :, :2], v[:, :, :2]]))


@pytest.mark.parametrize("mode", range(4))
def test_scores_are_given_at_every_stage(mode: int) -> None:
    q, k, v = draw(1, 2, 3, 4), draw(1, 1, 3, 4), draw(1, 1, 3, 4)
    attributes = {"is_causal": 1, "softcap": 1.5, "qk_matmul_output_mode": mode}
    *_, actual = run_node("Attention", [q, k, v], attributes, outputs=4)
    wanted = q @ k.swapaxes(2, 3) / 2
    wanted = wanted if mode == 0 else 1.5 * np.tanh(wanted / 1.5)
    wanted = wanted if mode < 2 else np.where(np.tri(3, dtype=bool), wanted, -np.inf).astype(np.float32)
    wanted = wanted if mode < 3 else np.asarray(jax.nn.softmax(wanted))
    assert_equal(actual, wanted)


def test_external_cache_in_a_batch_of_lengths() -> None:
    q, k, v = draw(2, 2, 2, 4), draw(2, 2, 5, 4), draw(2, 2, 5, 4)
    lengths = np.array([3, 5], np.int64)
    attributes = {"is_causal": 1, "left_window_size": 2}
    (actual,) = run_node("Attention", [q, k, v, None, None, None, lengths], attributes, opset=25)
    for row, length in enumerate(lengths):
        past = k[row : row + 1, :, : length - 2], v[row : row + 1, :, : length - 2]
        new = q[row : row + 1], k[row : row + 1, :, length - 2 : length], v[row : row + 1, :, length - 2 : length]
        expected, *_ = run_node("Attention", [*new, None, *past], attributes, outputs=3, opset=25)
        assert_equal(actual[row : row + 1], expected)


def test_operands_that_do_not_fit() -> None:
    q, k, v = draw(1, 3, 2, 4), draw(1, 2, 3, 4), draw(1, 2, 3, 4)
    with pytest.raises(transmuter.TransmuterError, match="3 heads of queries are no multiple of 2"):
        run_node("Attention", [q, k, v])
    with pytest.raises(transmuter.TransmuterError, match="q_num_heads and kv_num_heads"):
        run_node("Attention", [x.reshape(1, -1, 4) for x in (q, k, v)])


@pytest.mark.parametrize("half", [np.float16, ml_dtypes.bfloat16])
def test_halves_are_summed_in_float32(half: Any) -> None:
    q, k, v = (draw(1, 2, n, 16, dtype=half) for n in (3, 40, 40))
    (actual,) = run_node("Attention", [q, k, v])
    (expected,) = run_node("Attention", [x.astype(np.float32) for x in (q, k, v)])
    assert actual.dtype == half
    np.testing.assert_allclose(actual.astype(np.float32), expected, atol=2 * ml_dtypes.finfo(half).eps)


def test_softmax_precision() -> None:
    operands = [draw(1, 1, 3, 4, dtype=np.float16) for _ in range(3)]
    for precision in (onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE):
        (actual,) = run_node("Attention", operands, {"softmax_precision": precision})
        assert_equal(actual, run_node("Attention", operands)[0], atol=2e-3)


# ---- the other operators -------------------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(st.booleans(), st.sampled_from([0, 4]), st.booleans(), st.booleans(), st.sampled_from([5, 1]))
def test_rotary_embedding_equals_onnxruntime(
    flat: bool, size: int, interleaved: bool, has_positions: bool, n: int
) -> None:
    attributes = {"interleaved": int(interleaved), "num_heads": 3}
    attributes |= {"rotary_embedding_dim": size} if size else {}
    pairs = (size or 8) // 2
    tables = [draw(10, pairs), draw(10, pairs)] if has_positions else [draw(2, n, pairs), draw(2, n, pairs)]
    positions = [RNG.integers(0, 10, (2, n))] if has_positions else []
    operands = [draw(2, n, 24) if flat else draw(2, 3, n, 8), *tables, *positions]
    assert_equal(run_node("RotaryEmbedding", operands, attributes), ort_node("RotaryEmbedding", operands, attributes))


@settings(max_examples=8, deadline=None)
@given(
    shape=st.sampled_from([(2, 3), (0, 3), (), (1, 4, 1)]),
    alpha=st.sampled_from([None, 1.0, 1.7, 0.0]),
    dtype=st.sampled_from([np.float32, np.float64, np.float16]),
)
def test_swiglu_equals_the_reference(shape: tuple[int, ...], alpha: float | None, dtype: Any) -> None:
    operands, attributes = [np.asarray(10 * draw(*shape, dtype=dtype)) for _ in "ab"], {}
    attributes = {} if alpha is None else {"alpha": alpha}
    expected = reference_node("SwiGLU", operands, attributes, opset=28)
    tolerance = 5e-3 if dtype == np.float16 else 1e-5
    assert_equal(run_node("SwiGLU", operands, attributes, opset=28), expected, rtol=tolerance, atol=tolerance)


@settings(max_examples=12, deadline=None)
@given(
    groups=st.sampled_from([1, 2]),
    lengths=st.sampled_from([(2, 3), (1, 5), (3, 1)]),
    batch=st.sampled_from([2, 0]),
    scale=st.sampled_from([None, 0.3]),
    modified=st.tuples(st.booleans(), st.booleans()),
    precision=st.sampled_from([None, onnx.TensorProto.FLOAT]),
)
def test_flex_attention_is_softmax_attention_with_functions_in_between(
    groups, lengths, batch, scale, modified, precision
) -> None:
    (queries, keys), kv_heads = lengths, 2
    q, k = draw(batch, kv_heads * groups, queries, 4), draw(batch, kv_heads, keys, 4)
    v = draw(batch, kv_heads, keys, 3)
    attributes: dict[str, Any] = {} if scale is None else {"scale": scale}
    attributes |= {} if precision is None else {"softmax_precision": precision}
    attributes |= {"score_mod": graph("score", "Tanh")} if modified[0] else {}
    attributes |= {"prob_mod": graph("prob", "Sigmoid")} if modified[1] else {}
    scores = q @ np.repeat(k, groups, 1).swapaxes(2, 3) * (scale or 0.5)
    scores = np.tanh(scores) if modified[0] else scores
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    shares = 1 / (1 + np.exp(-shares)) if modified[1] else shares
    actual = run_node("FlexAttention", [q, k, v], attributes, domain="ai.onnx.preview", compiled=True)
    assert_equal(actual, [shares @ np.repeat(v, groups, 1)], rtol=1e-4, atol=1e-5)


RULES = {"linear": (0, 0), "gated": (1, 0), "delta": (0, 1), "gated_delta": (1, 1)}


@settings(max_examples=8, deadline=None)
@given(st.sampled_from(sorted(RULES)), st.sampled_from([1, 4]), st.sampled_from([2, 8]), st.booleans(), st.booleans())
def test_linear_attention_equals_onnxruntime(rule: str, length: int, gates: int, shared: bool, has_past: bool) -> None:
    gated, corrected = RULES[rule]
    operands = [
        draw(2, length, 4 * 4),
        draw(2, length, 2 * 4),
        draw(2, length, 2 * 3),
        draw(2, 2, 4, 3) if has_past else None,
        -np.abs(draw(2, length, gates)) if gated else None,
        np.abs(draw(2, length, 1 if shared else 2)) if corrected else None,
    ]
    attributes = {"q_num_heads": 4, "kv_num_heads": 2, "update_rule": rule}
    actual = run_node("LinearAttention", operands, attributes, outputs=2, opset=27, compiled=True)
    assert_equal(actual, ort_node("LinearAttention", operands, attributes, outputs=2, domain="com.microsoft"))


def test_linear_attention_wants_the_operands_of_its_rule() -> None:
    operands = [draw(1, 2, 4), draw(1, 2, 4), draw(1, 2, 4)]
    with pytest.raises(transmuter.TransmuterError, match="'delta' needs beta"):
        run_node(
            "LinearAttention",
            operands,
            {"q_num_heads": 1, "kv_num_heads": 1, "update_rule": "delta"},
            outputs=2,
            opset=27,
        )


def graph(name: str, operator: str) -> onnx.GraphProto:
    x, y = (helper.make_tensor_value_info(f"{name}_{side}", onnx.TensorProto.FLOAT, None) for side in "xy")
    return helper.make_graph([helper.make_node(operator, [x.name], [y.name])], name, [x], [y])


GRADIENTS = {
    "causal": (
        "Attention",
        [draw(1, 4, 3, 2), draw(1, 2, 3, 2), draw(1, 2, 3, 2)],
        {"is_causal": 1, "softcap": 2.0},
        {},
    ),
    "masked": ("Attention", [draw(1, 2, 2, 2), draw(1, 2, 3, 2), draw(1, 2, 3, 2), draw(2, 3)], {}, {}),
    "flex": (
        "FlexAttention",
        [draw(1, 2, 2, 2), draw(1, 1, 3, 2), draw(1, 1, 3, 2)],
        {"score_mod": graph("score", "Tanh"), "prob_mod": graph("prob", "Sigmoid")},
        {"domain": "ai.onnx.preview"},
    ),
    "linear": (
        "LinearAttention",
        [draw(1, 3, 4), draw(1, 3, 2), draw(1, 3, 2), draw(1, 1, 2, 2), draw(1, 3, 2), draw(1, 3, 1)],
        {"q_num_heads": 2, "kv_num_heads": 1},
        {"opset": 27, "outputs": 2},
    ),
    "rotary": (
        "RotaryEmbedding",
        [draw(1, 2, 3, 6), draw(5, 2), draw(5, 2), np.array([[4, 0, 2]])],
        {"rotary_embedding_dim": 4},
        {},
    ),
    "swiglu": ("SwiGLU", [draw(2, 3), draw(2, 3)], {"alpha": 1.5}, {"opset": 28}),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name: str) -> None:
    op, operands, attributes, options = GRADIENTS[name]
    call, floats = function(op, operands, attributes, **options)
    with jax.default_matmul_precision("highest"):
        check_grads(call, (floats,), order=1, modes=["rev"], atol=2e-2, rtol=2e-2)


# ---- how it is called ----------------------------------------------------------------------------------------------


def test_x64_off_under_jit() -> None:
    operands = [draw(2, 2, 2, 4), draw(2, 2, 5, 4), draw(2, 2, 5, 4), None, None, None, np.array([3, 5], np.int64)]
    call, floats = function("Attention", operands, {"is_causal": 1}, opset=24)
    assert not jax.config.jax_enable_x64
    assert_equal(np.asarray(jax.jit(call)(floats)), run_node("Attention", operands, {"is_causal": 1}, opset=24)[0])


def test_vmap() -> None:
    call, floats = function("Attention", [draw(1, 2, 3, 4) for _ in range(3)], {"is_causal": 1})
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), floats)
    actual = jax.vmap(call)(stacked)
    assert_equal(np.asarray(actual[1]), np.asarray(call(jax.tree.map(lambda x: 2 * x, floats))))


def test_symbolic_lengths() -> None:
    operands = [draw(2, 2, 3, 4), draw(2, 2, 3, 4), draw(2, 2, 3, 4), draw(3, 8), draw(2, 2, 5, 4), draw(2, 2, 5, 4)]
    proto = one_node("Attention", operands, {"is_causal": 1}, outputs=3)
    for value in proto.graph.input:
        for axis, dimension in enumerate(value.type.tensor_type.shape.dim):
            dimension.dim_param = f"{value.name}_{axis}"
    model = transmuter.load(proto)
    b, s, p = export.symbolic_shape("b, s, p")
    shapes = [(b, 2, s, 4)] * 3 + [(s, p + s)] + [(b, 2, p, 4)] * 2
    given = {f"x{i}": jax.ShapeDtypeStruct(shape, np.float32) for i, shape in enumerate(shapes)}
    exported = export.export(jax.jit(lambda x: model.apply({}, x)))(given)
    actual = exported.call({f"x{i}": x for i, x in enumerate(operands)})
    expected = run_node("Attention", operands, {"is_causal": 1}, outputs=3)
    assert_equal([np.asarray(y) for y in actual.values()], expected)
