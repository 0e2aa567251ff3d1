"""Matrix products beyond the conformance suite: gradients, half types, integers, ONNX Runtime's fused ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
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


@pytest.mark.parametrize(
    ("a", "b"), [((4,), (4,)), ((4,), (3, 4, 2)), ((2, 3, 4), (4,)), ((2, 3, 4), (4, 5)), ((2, 1, 3, 4), (3, 4, 5))]
)
def test_matmul_of_any_rank_has_gradients(a, b):
    assert_as_onnxruntime("MatMul", [draw(*a), draw(*b)])
    check_grads(linear.MatMul, (jnp.asarray(draw(*a)), jnp.asarray(draw(*b))), 1, ["rev"], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.uint64])
def test_matmul_of_integers(dtype):
    a, b = (RANDOM.integers(0, 2**16, shape).astype(dtype) for shape in [(3, 50), (50, 2)])
    (y,) = run_node("MatMul", [a, b])
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, a @ b)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_halves_accumulate_in_float32(dtype):
    """4096 times 1 + 1 would stop at 2048 (256) in the half type itself."""
    a, b = np.ones((1, 4096), dtype), np.ones((4096, 1), dtype)
    for y in (
        *run_node("MatMul", [a, b]),
        *run_node("Gemm", [a, b]),
        *run_node("Einsum", [a, b], {"equation": "ij,jk"}),
    ):
        assert y.dtype == dtype
        assert y.item() == 4096
    grads = jax.grad(lambda a, b: jnp.sum(linear.matmul(a, b).astype(jnp.float32)), (0, 1))(
        jnp.asarray(a), jnp.asarray(b)
    )
    assert [g.dtype for g in grads] == [dtype, dtype]


@settings(max_examples=25, deadline=None)
@given(
    transposed=st.tuples(st.booleans(), st.booleans()),
    alpha=st.sampled_from([1.0, 0.5]),
    beta=st.sampled_from([1.0, -2.0]),
    c=st.sampled_from([None, (), (1,), (5,), (3, 1), (3, 5)]),
)
def test_gemm_is_that_of_onnxruntime(transposed, alpha, beta, c):
    a, b = draw(3, 4), draw(4, 5)
    operands = [a.T.copy() if transposed[0] else a, b.T.copy() if transposed[1] else b]
    attributes = {"transA": int(transposed[0]), "transB": int(transposed[1]), "alpha": alpha, "beta": beta}
    assert_as_onnxruntime("Gemm", operands if c is None else [*operands, draw(*c)], attributes)


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


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ij,jk", [(2, 3), (3, 4)]),
        ("b i j , b j k -> b i k", [(2, 3, 4), (2, 4, 5)]),
        ("...ij,...jk->...ik", [(2, 1, 3, 4), (5, 4, 2)]),
        ("...i->...", [(2, 3, 4)]),
        ("i...->...", [(2, 3, 4)]),
        ("ii->i", [(3, 3)]),
        ("ii", [(3, 3)]),
        ("bA,aA", [(2, 3), (4, 3)]),
        ("i,j,k->ikj", [(2,), (3,), (4,)]),
        ("ij->", [(2, 3)]),
        ("...a,...a", [(2, 3), (2, 3)]),
        ("bhwc,hkc->bhwk", [(2, 3, 4, 5), (3, 6, 5)]),
    ],
)
def test_einsum_is_that_of_numpy(equation, shapes):
    operands = [draw(*shape) for shape in shapes]
    (y,) = run_node("Einsum", operands, {"equation": equation})
    np.testing.assert_allclose(y, np.einsum(equation, *operands), rtol=1e-4, atol=1e-5)
    check_grads(
        lambda *xs: linear.Einsum(*xs, equation=equation),
        [jnp.asarray(x) for x in operands],
        1,
        ["rev"],
        atol=1e-2,
        rtol=1e-2,
    )


@pytest.mark.parametrize("shape", [(2, 2), (3, 3, 3), (4, 4), (2, 6, 6)])
def test_det(shape):
    x = draw(*shape)
    assert_as_onnxruntime("Det", [x])
    check_grads(linear.Det, [jnp.asarray(x)], 1, ["rev"], atol=2e-2, rtol=2e-2)
    assert np.isfinite(jax.grad(lambda x: jnp.sum(linear.Det(x)))(jnp.zeros((4, 4)))).all()


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
