"""Matrix products beyond the conformance suite: gradients, half types, integers, ONNX Runtime's fused ones."""

from __future__ import annotations

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

from transmuter.lowering import linear

MICROSOFT = {"domain": "com.microsoft"}
RANDOM = np.random.default_rng(0)


def draw(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def assert_as_onnxruntime(op: str, inputs: list, attributes: dict | None = None, **kwargs: object) -> None:
    for ours, theirs in zip(run_node(op, inputs, attributes, **kwargs), ort_node(op, inputs, attributes, **kwargs)):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def draw_of(dtype: type, shape: tuple[int, ...], special: float = 0.0) -> np.ndarray:
    """Normal floats, where `special` says how often to put an infinity or NaN instead, or any integers of a dtype."""
    if np.dtype(dtype).kind in "iu":
        return RANDOM.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, dtype, endpoint=True)
    x = np.asarray(RANDOM.standard_normal(shape))
    return np.where(RANDOM.random(shape) < special, RANDOM.choice([np.inf, -np.inf, np.nan], shape), x).astype(dtype)


FACTORS = {
    "vectors": ((4,), (4,)),
    "vectors of nothing": ((0,), (0,)),
    "vectors of one": ((1,), (1,)),
    "a vector and matrices": ((4,), (3, 4, 2)),
    "matrices and a vector": ((2, 3, 4), (4,)),
    "matrices and one matrix": ((2, 3, 4), (4, 5)),
    "batches that broadcast": ((2, 1, 3, 4), (3, 4, 5)),
    "no rows": ((0, 3), (3, 2)),
    "no terms": ((2, 0), (0, 3)),
    "no terms in a batch": ((1, 3, 0), (2, 0, 1)),
    "no batch": ((0, 1, 3, 4), (3, 4, 5)),
}


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(sorted(FACTORS)),
    dtype=st.sampled_from([np.float32, np.float64, np.int32, np.uint32, np.int64, np.uint64]),
    special=st.sampled_from([0.0, 0.1]),
)
def test_matmul_is_that_of_onnxruntime(name, dtype, special):
    """Integers overflow as NumPy's do, with which ONNX Runtime agrees where it does not fail."""
    a, b = (draw_of(dtype, shape, special) for shape in FACTORS[name])
    is_integer = np.dtype(dtype).kind in "iu"
    expected = [np.asarray(a @ b)] if is_integer else ort_node("MatMul", [a, b])
    assert_equal(run_node("MatMul", [a, b]), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("a", "b"), FACTORS.values(), ids=FACTORS)
def test_matmul_of_any_rank_has_gradients(a, b):
    with jax.enable_x64(True):
        operands = [jnp.asarray(draw(*shape), jnp.float64) for shape in (a, b)]
        check_grads(linear.MatMul, operands, 1, ["rev"])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_halves_accumulate_in_float32(dtype):
    """4096 times 1 + 1 would stop at 2048 (256) in the half type itself."""
    a, b = np.ones((1, 4096), dtype), np.ones((4096, 1), dtype)
    for y in (
        *run_node("MatMul", [a, b]),
        *run_node("Gemm", [a, b]),
        *run_node("Einsum", [a, b], {"equation": "ij,jk"}),
        *run_node("Einsum", [a], {"equation": "ij->i"}),
        *run_node("Einsum", [a, b[:1]], {"equation": "ij,kl->il"}),
    ):
        assert y.dtype == dtype
        assert y.item() == 4096
    grads = jax.grad(lambda a, b: jnp.sum(linear.matmul(a, b).astype(jnp.float32)), (0, 1))(
        jnp.asarray(a), jnp.asarray(b)
    )
    assert [g.dtype for g in grads] == [dtype, dtype]


@settings(max_examples=25, deadline=None)
@given(
    sides=st.sampled_from([(3, 4, 5), (1, 4, 1), (0, 4, 5), (3, 0, 5), (3, 4, 0)]),
    transposed=st.tuples(st.booleans(), st.booleans()),
    alpha=st.sampled_from([0.0, 1.0, 0.5]),
    beta=st.sampled_from([0.0, 1.0, -2.0]),
    bias=st.sampled_from(["absent", "scalar", "one", "one of two axes", "row", "row of two axes", "column", "matrix"]),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_gemm_is_that_of_onnxruntime(sides, transposed, alpha, beta, bias, dtype):
    m, k, n = sides
    attributes = {"transA": int(transposed[0]), "transB": int(transposed[1]), "alpha": alpha, "beta": beta}
    operands = [draw(*reversed(s)) if t else draw(*s) for s, t in zip([(m, k), (k, n)], transposed, strict=True)]
    of_bias = {"scalar": (), "one": (1,), "one of two axes": (1, 1), "row": (n,), "row of two axes": (1, n)}
    of_bias |= {"column": (m, 1), "matrix": (m, n)}
    operands += [] if bias == "absent" else [np.asarray(draw(*of_bias[bias]))]
    operands = [x.astype(dtype) for x in operands]
    expected = ort_node("Gemm", operands, attributes)
    assert_equal(run_node("Gemm", operands, attributes), expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=10, deadline=None)
@given(
    dtype=st.sampled_from([np.int32, np.uint32, np.int64, np.uint64]),
    c=st.sampled_from([None, (), (2,), (3, 1)]),
    alpha=st.sampled_from([1, 3, -2]),
    beta=st.sampled_from([0, 1, -1]),
)
def test_gemm_of_integers_overflows_as_numpy_does(dtype, c, alpha, beta):
    a, b = draw_of(dtype, (3, 4)), draw_of(dtype, (4, 2))
    operands = [a, b] if c is None else [a, b, draw_of(dtype, c)]
    (y,) = run_node("Gemm", operands, {"alpha": float(alpha), "beta": float(beta)})
    wide = [x.astype(object) for x in operands]
    expected = alpha * (wide[0] @ wide[1]) + (0 if c is None else beta * wide[2])
    assert y.dtype == dtype
    bits = 8 * np.dtype(dtype).itemsize
    assert [int(v) % 2**bits for v in y.flat] == [v % 2**bits for v in expected.flat]


@pytest.mark.parametrize("opset", [1, 6, 7, 9, 11, 13])
def test_gemm_of_every_version(opset):
    a, b, c = draw(4, 3), draw(5, 4), draw(5)
    attributes = {"transA": 1, "transB": 1, "alpha": 2.0} | ({"broadcast": 1} if opset < 7 else {})
    (y,) = run_node("Gemm", [a, b, c], attributes, opset=opset)
    np.testing.assert_allclose(y, 2 * a.T @ b.T + c, rtol=1e-5)


def test_gemm_has_gradients_and_scales_integers_exactly():
    attributes = {"alpha": 0.5, "beta": 2.0, "transA": 1, "transB": 1}
    operands = [jnp.asarray(draw(*shape)) for shape in [(4, 3), (5, 4), (5,)]]
    check_grads(lambda *xs: linear.Gemm_7(*xs, **attributes), operands, 1, ["rev"], atol=1e-2, rtol=1e-2)
    ones = np.ones((2, 2), np.int32)
    (y,) = run_node("Gemm", [ones, ones, ones], {"alpha": 3.0})
    np.testing.assert_array_equal(y, 7 * ones)
    with pytest.raises(Exception, match="cannot be scaled"):
        run_node("Gemm", [ones, ones], {"alpha": 0.5})


EQUATIONS = [
    ("ij,jk", [(2, 3), (3, 4)]),
    ("ij,jk->ik", [(2, 0), (0, 4)]),
    ("ij,jk->ik", [(0, 3), (3, 4)]),
    ("b i j , b j k -> b i k", [(2, 3, 4), (2, 4, 5)]),
    ("...ij,...jk->...ik", [(2, 1, 3, 4), (1, 5, 4, 2)]),
    ("...ij,...jk->...ik", [(2, 1, 3, 4), (5, 4, 2)]),
    ("...i->...", [(2, 3, 4)]),
    ("i...->...", [(2, 3, 4)]),
    ("a...b->b...a", [(2, 3, 4)]),
    ("...,...->...", [(2, 3), (3,)]),
    ("...,...", [(), (3,)]),
    ("i...,i...->...", [(2, 3), (2, 3)]),
    ("ii->i", [(3, 3)]),
    ("ii", [(3, 3)]),
    ("...ii->...i", [(2, 3, 3)]),
    ("iji->j", [(2, 3, 2)]),
    ("ij,ii->j", [(2, 3), (2, 2)]),
    ("ij,ij->ij", [(1, 3), (2, 3)]),
    ("bA,aA", [(2, 3), (4, 3)]),
    ("ba", [(2, 3)]),
    ("i,j,k->ikj", [(2,), (3,), (4,)]),
    ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 2)]),
    ("ij->", [(2, 3)]),
    ("i->", [(0,)]),
    (",ij->ij", [(), (2, 3)]),
    ("...a,...a", [(2, 3), (2, 3)]),
    ("bhwc,hkc->bhwk", [(2, 3, 4, 5), (3, 6, 5)]),
]


@settings(max_examples=25, deadline=None)
@given(case=st.sampled_from(EQUATIONS), dtype=st.sampled_from([np.float32, np.float64, np.int32, np.int64, np.int8]))
def test_einsum_is_that_of_onnxruntime(case, dtype):
    """NumPy stands in where ONNX Runtime refuses ellipses of different ranks, or does not let integers overflow."""
    equation, shapes = case
    operands = [draw_of(dtype, shape) for shape in shapes]
    ranks = {len(shape) for shape in shapes}
    if np.dtype(dtype).kind == "i" or ("..." in equation and len(ranks) > 1):
        expected = [np.einsum(equation, *operands, dtype=dtype)]
    else:
        expected = ort_node("Einsum", operands, {"equation": equation})
    assert_equal(run_node("Einsum", operands, {"equation": equation}), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("equation", "shapes"), EQUATIONS)
def test_einsum_has_gradients(equation, shapes):
    with jax.enable_x64(True):
        operands = [jnp.asarray(draw_of(np.float64, shape)) for shape in shapes]
        check_grads(jax.jit(lambda *xs: linear.Einsum(*xs, equation=equation)), operands, 1, ["rev"])


@pytest.mark.parametrize("shape", [(2, 2), (3, 3, 3), (4, 4), (2, 6, 6), (1, 1), (0, 2, 2)])
def test_det(shape):
    x = draw(*shape)
    for operand in (x, np.zeros_like(x), np.ones_like(x), np.full_like(x, np.nan)):
        assert_as_onnxruntime("Det", [operand])
    with jax.enable_x64(True):
        check_grads(linear.Det, [jnp.asarray(x, jnp.float64)], 1, ["rev"])
    for singular in (jnp.zeros(shape), jnp.ones(shape)):
        assert np.isfinite(jax.grad(lambda x: jnp.sum(linear.Det(x)))(singular)).all()


@settings(max_examples=25, deadline=None)
@given(
    kinds=st.tuples(st.sampled_from([np.int8, np.uint8]), st.sampled_from([np.int8, np.uint8])),
    depth=st.sampled_from([1, 258, 259, 2000]),
    zero_points=st.sampled_from(["none", "scalars", "vectors"]),
    extreme=st.booleans(),
)
def test_integer_products_are_exact(kinds, depth, zero_points, extreme):
    def integers(kind: type, *shape: int) -> np.ndarray:
        bounds = np.iinfo(kind)
        return np.full(shape, bounds.max, kind) if extreme else RANDOM.integers(bounds.min, bounds.max + 1, shape, kind)

    a, b = integers(kinds[0], 3, depth), integers(kinds[1], depth, 2)
    zeros = {
        "none": [],
        "scalars": [np.array(np.iinfo(k).min, k) for k in kinds],
        "vectors": [RANDOM.integers(0, 100, n).astype(k) for k, n in zip(kinds, (3, 2))],
    }[zero_points]
    (y,) = run_node("MatMulInteger", [a, b, *zeros], output_types=[6])
    a_zero, b_zero = [z.astype(np.int64) for z in zeros] or [np.int64(0)] * 2
    expected = (a - (a_zero[:, None] if zero_points == "vectors" else a_zero)) @ (b.astype(np.int64) - b_zero)
    assert y.dtype == np.int32
    np.testing.assert_array_equal(y, expected)


def test_integer_products_need_no_x64():
    with jax.enable_x64(False):
        y = linear.MatMulInteger(jnp.full((2, 999), 255, jnp.uint8), jnp.full((999, 2), 255, jnp.uint8))
    assert y.dtype == jnp.int32
    np.testing.assert_array_equal(y, 999 * 255 * 255)


@pytest.mark.parametrize(
    ("a", "b", "attributes"),
    [
        ((2, 4, 3), (2, 5, 4), {"transA": 1, "transB": 1, "alpha": 0.5}),
        ((3, 2, 6, 4), (2, 6, 4, 5), {"transBatchA": 1}),
        ((4, 2, 6, 3), (5, 2, 6, 4), {"transBatchA": 1, "transBatchB": 1, "transA": 1, "transB": 1}),
        ((4,), (4, 5), {"transA": 1}),
    ],
)
def test_fused_matmul_is_that_of_onnxruntime(a, b, attributes):
    assert_as_onnxruntime("FusedMatMul", [draw(*a), draw(*b)], attributes, **MICROSOFT)


@pytest.mark.parametrize(
    "attributes",
    [
        {"activation": "Relu"},
        {"activation": "LeakyRelu", "activation_alpha": 0.3},
        {"activation": "HardSigmoid", "activation_alpha": 0.3, "activation_beta": 0.4},
        {"activation": "Tanh"},
        {"activation": "Elu", "activation_alpha": 0.7},
    ],
)
def test_activations_after_a_product(attributes):
    a, b, c = draw(3, 4), draw(4, 5), draw(5)
    assert_as_onnxruntime("FusedGemm", [a, b, c], attributes, **MICROSOFT)
    product = run_node("FusedMatMulActivation", [a, b], attributes, **MICROSOFT)
    np.testing.assert_allclose(product, run_node("FusedGemm", [a, b], attributes, **MICROSOFT), rtol=1e-6)


def test_gemm_fast_gelu():
    x, w, bias = draw(3, 4), draw(4, 5), draw(5)
    (y,) = run_node("GemmFastGelu", [x, w, bias], **MICROSOFT)
    z = x @ w + bias
    np.testing.assert_allclose(
        y, 0.5 * z * (1 + np.tanh(z * (0.035677408 * z * z + 0.797884583))), rtol=1e-4, atol=1e-5
    )


def test_products_of_16_bits():
    a, b = (RANDOM.integers(-(2**15), 2**15, shape).astype(np.int16) for shape in [(3, 1), (1, 2)])
    assert_as_onnxruntime("MatMulInteger16", [a, b], output_types=[6], **MICROSOFT)
