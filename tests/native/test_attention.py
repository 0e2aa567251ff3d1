"""Attention by the kernel and its gradients, as operands lie, against NumPy in float64; and under transforms."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_sets import by_each_variant, needs_kernels

from transmuter.lowering import registry
from transmuter.native.attention import (
    Heads,
    attention,
    attention_gradients_p,
    attention_p,
    attention_tangent_p,
    pure_attention,
)
from transmuter.segments.attention import attention as attention_rule
from transmuter.segments.rewriting import rewriting

pytestmark = needs_kernels
TOLERANCE = 4e-6
"""Of the sum of what an element adds up, without signs."""
LOWEST = np.finfo(np.float32).min
ORDERS = list(itertools.permutations(range(4)))
STRAIGHT = (0, 1, 2, 3)
COUNTS = [1, 2, 7, 13, 14, 15, 16, 17, 28, 31, 33, 56, 57, 64, 130]
SIZES = [1, 3, 8, 16, 20, 31, 32, 33, 48, 64, 80]


@dataclass(frozen=True)
class Case:
    """Sizes (batch, heads, queries, keys, elements of a key, of a value), the shape of a bias if any, and the form."""

    sizes: tuple[int, int, int, int, int, int]
    bias: tuple[int, ...] | None
    form: Heads

    def operands(self, seed: int = 0) -> list[np.ndarray]:
        """Query, key, value, what the result gets of gradients, and the bias if there is one."""
        random = np.random.default_rng(seed)
        batch, heads, queries, keys, depth, width = self.sizes
        shapes = [(queries, depth), (keys, depth), (keys, width)]
        given = [random.standard_normal((batch, heads, *shape), np.float32) for shape in shapes]
        orders = (self.form.query, self.form.key, self.form.value)
        given = [x.transpose(np.argsort(order)) for x, order in zip(given, orders)]
        result = random.standard_normal((batch, heads, queries, width), np.float32).transpose(self.form.result)
        bias = [] if self.bias is None else [random.standard_normal(self.bias, np.float32)]
        return [*map(np.ascontiguousarray, (*given, result)), *bias]

    def expected(self, operands: Sequence[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
        """The result and the gradients, each with the sums of what its elements add up without signs."""
        form, scale = self.form, self.form.scale
        query, key, value, output, *bias = (x.astype(np.float64) for x in operands)
        query, key, value = (x.transpose(o) for x, o in zip((query, key, value), (form.query, form.key, form.value)))
        output = output.transpose(np.argsort(form.result))
        flipped = lambda x: x.swapaxes(-1, -2)
        scores = query @ flipped(key) * scale + (bias[0] if bias else 0)
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        shares = powers / powers.sum(-1, keepdims=True)
        of_shares, most = output @ flipped(value), abs(output) @ flipped(abs(value))
        of_scores = scale * shares * (of_shares - (shares * of_shares).sum(-1, keepdims=True))
        bound = abs(scale) * shares * (most + (shares * most).sum(-1, keepdims=True))
        # a score's rounding makes a share wrong by as much of it
        shares_bound = shares * (1 + abs(scale) * (abs(query) @ flipped(abs(key))).max(-1, keepdims=True) / 4)
        bound *= 1 + abs(scale) * (abs(query) @ flipped(abs(key))).max(-1, keepdims=True) / 4
        found = [
            (shares @ value, shares_bound @ abs(value), np.argsort(form.result)),
            (of_scores @ key, bound @ abs(key), form.query),
            (flipped(of_scores) @ query, flipped(bound) @ abs(query), form.key),
            (flipped(shares) @ output, flipped(shares_bound) @ abs(output), form.value),
        ]
        return [(x.transpose(np.argsort(order)), most.transpose(np.argsort(order))) for x, most, order in found]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    batch, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    queries, keys = draw(st.sampled_from(COUNTS)), draw(st.sampled_from(COUNTS))
    sizes = batch, heads, queries, keys, draw(st.sampled_from(SIZES)), draw(st.sampled_from(SIZES))
    full = st.tuples(*(st.sampled_from([1, n]) for n in sizes[:4]))
    orders = (draw(st.sampled_from(ORDERS)) for _ in range(4))
    return Case(sizes, draw(st.none() | full), Heads(*orders, draw(st.sampled_from([1.0, 0.25, -0.5]))))


def forwards_and_backwards(form: Heads, *operands: Any) -> list[jax.Array]:
    query, key, value, output, *bias = operands
    result = attention(query, key, value, *bias, form=form)
    return [result, *attention_gradients_p.bind(query, key, value, output, *bias, form=form)]


def of_each_variant(form: Heads, operands: Sequence[Any]) -> list[list[np.ndarray]]:
    """For the result and the gradients, what each variant makes of them."""
    parts = [partial(lambda i, *operands: forwards_and_backwards(form, *operands)[i], i) for i in range(4)]
    return [list(by_each_variant(part, *operands)) for part in parts]


def check(case: Case, operands: Sequence[np.ndarray]) -> None:
    for (expected, bound), found in zip(case.expected(operands), of_each_variant(case.form, operands), strict=True):
        for actual in found:
            assert (actual.shape, actual.dtype) == (expected.shape, np.float32)
            off = abs(actual - expected) > TOLERANCE * bound
            assert not off.any(), np.argwhere(off)[:8]


@settings(deadline=None, max_examples=40)
@given(cases(), st.integers(0, 9))
def test_attention_is_that_of_numpy(case, seed):
    check(case, case.operands(seed))


@pytest.mark.parametrize(
    "sizes",
    [
        (16, 12, 20, 20, 32, 32),
        (1, 1, 600, 40, 16, 16),  # so many rows that they are shared among threads
        (1, 1, 40, 5000, 16, 24),  # so many keys that few rows are there at once
        (1, 2, 1, 256, 64, 64),
        (2, 2, 130, 1, 16, 16),
    ],
)
def test_sizes_of_models(sizes):
    by_rows = (0, 2, 1, 3)
    form = Heads(by_rows, by_rows, by_rows, by_rows, sizes[4] ** -0.5)
    case = Case(sizes, (sizes[0], 1, 1, sizes[3]), form)
    check(case, case.operands())


def plain(queries: int, keys: int, size: int, bias: np.ndarray | None, scale: float = 1.0) -> tuple[Case, list]:
    form = Heads(STRAIGHT, STRAIGHT, STRAIGHT, STRAIGHT, scale)
    case = Case((1, 1, queries, keys, size, size), None, form)
    return case, [*case.operands(), *([] if bias is None else [bias.reshape(1, 1, -1, keys).astype(np.float32)])]


def test_shares_are_those_of_softmax():
    """From the largest to those that are 0: values that are one for one key each show the shares."""
    case, (query, key, _, output) = plain(60, 40, 40, None)
    value = np.eye(40, dtype=np.float32)[None, None]
    scores = 30 * (query @ key.swapaxes(-1, -2))
    # products with ones and zeros are exact, so that the scores are these numbers
    found = of_each_variant(case.form, [scores, value, value, output])[0]
    wide = scores.astype(np.float64)
    powers = np.exp(wide - wide.max(-1, keepdims=True))
    expected = powers / powers.sum(-1, keepdims=True)
    for actual in found:
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-36)  # a rounding of 150 is 1e-5
        large = expected > 0.05
        np.testing.assert_allclose(actual[large], expected[large], rtol=2e-6)


@pytest.mark.parametrize("masked", [-np.inf, LOWEST, -1e9, -10000.0])
@pytest.mark.parametrize("keys", [16, 21, 64])
def test_keys_that_are_masked_have_no_share(masked, keys):
    bias = np.zeros((20, keys))
    bias[:, keys // 2 :] = masked
    case, operands = plain(20, keys, 24, bias)
    check(case, operands)
    for actual in of_each_variant(case.form, operands)[2]:
        assert not actual[0, 0, keys // 2 :].any()


@pytest.mark.parametrize("keys", [16, 21, 64])
def test_queries_whose_keys_are_all_masked_by_a_number_see_what_softmax_shows(keys):
    bias = np.zeros((20, keys))
    bias[3:5] = LOWEST
    case, operands = plain(20, keys, 24, bias)
    # as in float32, where scores vanish beside such a number
    in_float32 = (operands[0] @ operands[1].swapaxes(-1, -2) + operands[4]).astype(np.float64)
    assert (in_float32[0, 0, 3:5] == LOWEST).all()
    for found, pure in zip(of_each_variant(case.form, operands), purely(case.form, operands), strict=True):
        for actual in found:
            np.testing.assert_allclose(actual, pure, rtol=1e-4, atol=1e-5)
    for actual in of_each_variant(case.form, operands)[0]:
        np.testing.assert_allclose(actual[0, 0, 3], operands[2][0, 0].mean(0), rtol=1e-5, atol=1e-6)


def purely(form: Heads, operands: Sequence[Any]) -> list[np.ndarray]:
    query, key, value, output, *bias = map(jnp.asarray, operands)
    result, pullback = jax.vjp(lambda *primary: pure_attention(*primary, *bias, form=form), query, key, value)
    return [np.asarray(x) for x in (result, *pullback(output))]


@pytest.mark.parametrize("keys", [5, 32])
def test_queries_that_see_nothing_are_nan_and_leave_no_nan_in_gradients(keys):
    bias = np.zeros((20, keys))
    bias[7] = -np.inf
    case, operands = plain(20, keys, 24, bias)
    results, *gradients = of_each_variant(case.form, operands)
    pure, *pure_gradients = purely(case.form, operands)
    for actual in [*results, pure]:
        assert np.isnan(actual[0, 0, 7]).all()
        assert np.isfinite(np.delete(actual, 7, 2)).all()
    for found, expected in zip(gradients, pure_gradients, strict=True):
        for actual in found:
            np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_with_its_query(value):
    case, operands = plain(30, 21, 20, None)
    clean = of_each_variant(case.form, operands)
    operands[0][0, 0, 17, 3] = value
    broken = of_each_variant(case.form, operands)
    for which in (0, 1):
        for actual, before in zip(broken[which], clean[which], strict=True):
            assert np.isnan(actual[0, 0, 17]).any()
            np.testing.assert_array_equal(np.delete(actual, 17, 2), np.delete(before, 17, 2))


def test_what_is_no_number_stays_with_its_head():
    form = Heads(STRAIGHT, STRAIGHT, STRAIGHT, STRAIGHT, 1.0)
    case = Case((2, 3, 20, 21, 17, 19), None, form)
    operands = case.operands()
    clean = of_each_variant(form, operands)
    operands[2][1, 1, 4, 5] = np.nan
    for found, before in zip(of_each_variant(form, operands), clean, strict=True):
        for actual, expected in zip(found, before, strict=True):
            is_same = actual == expected
            is_same[1, 1] = True
            assert is_same.all()


def test_a_size_of_zero_is_refused():
    form = Heads(STRAIGHT, STRAIGHT, STRAIGHT, STRAIGHT, 1.0)
    query, key = jnp.zeros((1, 2, 3, 8)), jnp.zeros((1, 2, 0, 8))
    with pytest.raises(jax.errors.JaxRuntimeError, match="size of 0"):
        jax.block_until_ready(jax.jit(partial(attention, form=form))(query, key, key))


# ---- transforms ------------------------------------------------------------------------------------------------------

FORM = Heads((0, 2, 1, 3), (0, 2, 3, 1), (1, 0, 2, 3), (0, 2, 1, 3), 0.3)
CASE = Case((2, 3, 18, 21, 8, 12), (2, 1, 1, 21), FORM)


def both(order: int = 4) -> tuple[Callable[..., jax.Array], Callable[..., jax.Array], list[jax.Array]]:
    """The primitive and the pure form as functions of `order` operands, and these."""
    query, key, value, _, bias = map(jnp.asarray, CASE.operands())
    operands = [query, key, value, bias]
    functions = (
        partial(lambda of, *given: of(*given, *operands[order:], form=FORM), of) for of in (attention, pure_attention)
    )
    return *functions, operands[:order]


def assert_close(actual: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(abs(b).max()))


def names(function: Callable[..., Any], *operands: Any) -> set[str]:
    return {
        name
        for name in map(str, (attention_p, attention_tangent_p, attention_gradients_p))
        if f"= {name}[" in str(jax.make_jaxpr(function)(*operands))
    }


def total(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda *operands: jnp.sum(jnp.sin(3 * function(*operands)))


@pytest.mark.parametrize("count", [3, 4])
def test_gradients(count):
    kernel, pure, operands = both(count)
    gradient = lambda function: jax.grad(total(function), range(count))
    assert_close(gradient(kernel)(*operands), gradient(pure)(*operands))
    assert_close(jax.jit(gradient(kernel))(*operands), gradient(pure)(*operands))
    # the gradient of a bias is computed by JAX's operations, and the others with it
    expected = {"cpu_attention", "cpu_attention_gradients"} if count == 3 else set()
    assert names(gradient(kernel), *operands) == expected


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_gradient_of_one_operand(which):
    kernel, pure, operands = both(3)
    assert_close(jax.grad(total(kernel), which)(*operands), jax.grad(total(pure), which)(*operands))


def test_tangents():
    kernel, pure, operands = both(3)
    operands, moved = tuple(operands), tuple(jnp.cos(x) for x in operands)
    assert_close(jax.jvp(kernel, operands, moved), jax.jvp(pure, operands, moved))
    assert names(lambda *x: jax.jvp(kernel, x, moved), *operands) == {"cpu_attention", "cpu_attention_tangent"}


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, 1), (None, None, 2)])
def test_vmap(axes):
    kernel, pure, operands = both(3)
    stacks = [x if axis is None else jnp.stack([x, -x, 2 * x], axis) for x, axis in zip(operands, axes, strict=True)]
    for change in (lambda f: f, lambda f: jax.grad(total(f), (0, 1, 2))):
        assert_close(jax.vmap(change(kernel), axes)(*stacks), jax.vmap(change(pure), axes)(*stacks))


@pytest.mark.parametrize("outer", [jax.jacfwd, jax.jacrev])
def test_derivatives_of_the_second_order(outer):
    kernel, pure, operands = both(3)
    inner = lambda function: lambda *x: sum(jnp.sum(jnp.sin(g)) for g in jax.grad(total(function), (0, 1, 2))(*x))
    assert_close(outer(inner(kernel), (0, 1, 2))(*operands), outer(inner(pure), (0, 1, 2))(*operands))


def test_checkpoint_scan_and_export():
    kernel, pure, operands = both(3)
    again = jax.grad(total(jax.checkpoint(kernel)), (0, 1, 2))
    assert_close(again(*operands), jax.grad(total(pure), (0, 1, 2))(*operands))
    repeated = lambda function: lambda *x: jax.lax.scan(lambda c, i: (c + total(function)(*x) * i, None), 0.0, X)[0]
    assert_close(jax.grad(repeated(kernel))(*operands), jax.grad(repeated(pure))(*operands))
    exported = jax.export.export(jax.jit(kernel), platforms=["cuda"])(*operands)
    assert "transmuter_attention" not in exported.mlir_module()


X = jnp.arange(3.0)


def test_shares_that_are_summed_over_queries_are_no_attention() -> None:
    """As an Einsum can have it: the rule is for values mixed over the keys."""
    x = np.random.default_rng(0).standard_normal((1, 2, 64, 32), np.float32)
    lowered = registry.find("", "Softmax", 13).function

    def mixed(over: str) -> Callable[[jax.Array], jax.Array]:
        softmax = lambda q: lowered(jnp.einsum("bhid,bhjd->bhij", q, q), axis=-1)
        function = lambda q: jnp.einsum(f"bhij,bh{over}d->bh{'ij'.replace(over, '')}d", softmax(q), q)
        found = rewriting(function, attention_rule)
        np.testing.assert_allclose(jax.jit(found)(x), jax.jit(function)(x), rtol=1e-4, atol=1e-4)
        return found

    assert "cpu_attention" in str(jax.make_jaxpr(mixed("j"))(x))
    assert "cpu_attention" not in str(jax.make_jaxpr(mixed("i"))(x))
