"""Products by the kernels, of operands as they lie and of packed ones, against NumPy in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_sets import by_each_variant, needs_kernels

from transmuter.native.products import Form, fits, packed, packed_shape, product, pure_product, unpacked

pytestmark = needs_kernels
EPSILON = np.finfo(np.float32).eps
SIZES = [0, 1, 2, 3, 5, 13, 14, 15, 16, 17, 31, 32, 33, 48, 64, 100, 130]
DEPTHS = [0, 1, 2, 7, 8, 9, 16, 17, 33, 384, 385, 800]
"""Beyond 384, the kernel sums in several blocks."""


@dataclass(frozen=True)
class Case:
    """Sizes of the stack, the rows, what is summed over and the columns, and the form in which operands have these."""

    stack: tuple[int, ...]
    rows: tuple[int, ...]
    depth: tuple[int, ...]
    columns: tuple[int, ...]
    form: Form

    def operands(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng(seed)
        left = random.standard_normal((*self.stack, *self.rows, *self.depth), np.float32)
        right = random.standard_normal((*self.stack, *self.depth, *self.columns), np.float32)
        return np.transpose(left, np.argsort(self.form.left)), np.transpose(right, np.argsort(self.form.right))

    def expected(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """The product in the dtype of the operands."""
        m, k, n = map(math.prod, (self.rows, self.depth, self.columns))
        lefts = left.transpose(self.form.left).reshape((*self.stack, m, k))
        rights = right.transpose(self.form.right).reshape((*self.stack, k, n))
        with np.errstate(invalid="ignore"):  # which OpenBLAS may raise for finite operands
            y = lefts @ rights
        return y.reshape((*self.stack, *self.rows, *self.columns)).transpose(self.form.result)

    def assert_close(self, actual: np.ndarray, left: np.ndarray, right: np.ndarray) -> None:
        """No element is further off than the roundings of its sum may add up to."""
        wide = left.astype(np.float64), right.astype(np.float64)
        expected, bound = self.expected(*wide), self.expected(*map(abs, wide))
        assert (actual.shape, actual.dtype) == (expected.shape, np.float32)
        off = abs(actual - expected) > EPSILON * (math.prod(self.depth) + 4) * bound
        assert not off.any(), np.argwhere(off)[:8]


def shuffled(draw: st.DrawFn, parts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The positions of dimensions in a shape that has these parts of them in any order."""
    order = list(itertools.chain(*draw(st.permutations(parts))))
    return tuple(map(order.index, range(len(order))))


@st.composite
def cases(draw: st.DrawFn, sizes: Sequence[int] = SIZES, depths: Sequence[int] = DEPTHS) -> Case:
    """Cases that the kernel takes: rows, columns and what is summed over lie together, one of the first two last."""
    stack = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    outer = st.sampled_from([(), (), (1,), (2,), (1, 2)])
    rows, columns = ((*draw(outer), draw(st.sampled_from(sizes))) for _ in range(2))
    depth = (*draw(outer), draw(st.sampled_from(depths)))
    batch = [[i] for i in range(len(stack))]
    numbers = lambda sizes, start: list(range(start, start + len(sizes)))
    left = [*batch, of_rows := numbers(rows, len(stack)), numbers(depth, len(stack) + len(rows))]
    right = [*batch, numbers(depth, len(stack)), numbers(columns, len(stack) + len(depth))]
    last = [of_rows, numbers(columns, len(stack) + len(rows))]
    last = last[:: draw(st.sampled_from([1, -1]))]
    result = [*itertools.chain(*draw(st.permutations([*batch, last[0]]))), *last[1]]
    orders = shuffled(draw, left), shuffled(draw, right), tuple(result)
    return Case(stack, rows, depth, columns, Form(*orders, len(stack), len(depth)))


@settings(max_examples=40, deadline=None)
@given(cases())
def test_operands_are_read_as_they_lie(case: Case) -> None:
    left, right = case.operands()
    assert fits(case.form, left.shape, right.shape)
    for actual in by_each_variant(partial(product, form=case.form), left, right):
        case.assert_close(actual, left, right)


@settings(max_examples=15, deadline=None)
@given(cases(sizes=[0, 1, 3, 17, 33], depths=[0, 1, 9, 17]))
def test_the_pure_form_computes_the_same(case: Case) -> None:
    left, right = case.operands()
    case.assert_close(np.asarray(jax.jit(partial(pure_product, form=case.form))(left, right)), left, right)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_dimensions_in_any_order_are_taken_or_refused(data: st.DataObject) -> None:
    counts = [data.draw(st.integers(0, 2)) for _ in range(4)]
    stack, rows, depth, columns = (tuple(data.draw(st.sampled_from([1, 2, 3, 9])) for _ in range(n)) for n in counts)
    any_order = lambda *parts: tuple(data.draw(st.permutations(range(sum(map(len, parts))))))
    orders = any_order(stack, rows, depth), any_order(stack, depth, columns), any_order(stack, rows, columns)
    case = Case(stack, rows, depth, columns, Form(*orders, len(stack), len(depth)))
    left, right = case.operands()
    if fits(case.form, left.shape, right.shape):
        for actual in by_each_variant(partial(product, form=case.form), left, right):
            case.assert_close(actual, left, right)
    else:
        with pytest.raises(ValueError, match="takes no operands"):
            product(left, right, case.form)


def test_rows_and_columns_that_lie_apart_do_not_fit() -> None:
    assert not fits(Form((0, 2, 1), (0, 1), (0, 1, 2), 0, 1), (3, 4, 5), (4, 6))  # depth between rows
    assert not fits(Form((0, 1, 2), (0, 1, 2), (1, 2, 0), 1, 1), (3, 4, 5), (3, 5, 6))  # the stack is innermost
    assert fits(Form((0, 1, 2), (0, 1, 2), (1, 2, 0), 1, 1), (1, 4, 5), (1, 5, 6))


# ---- packed matrices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", [(), (2, 3), (0,)])
@pytest.mark.parametrize(("depth", "columns"), [(7, 31), (3, 32), (5, 33), (0, 5), (3, 0)])
def test_packed_matrices_are_unpacked(stack: tuple[int, ...], depth: int, columns: int) -> None:
    matrices = np.random.default_rng(0).standard_normal((*stack, depth, columns), np.float32)
    panels, again, behind = jax.jit(
        lambda x: ((panels := packed(x)), unpacked(panels, columns), unpacked(panels, panels.shape[-3] * 32))
    )(matrices)
    assert panels.shape == packed_shape(matrices.shape)
    np.testing.assert_array_equal(again, matrices, strict=True)
    assert not np.any(behind[..., columns:])


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(SIZES),
    st.sampled_from(DEPTHS),
    st.sampled_from(SIZES),
    st.sampled_from([(), (2,)]),
    st.data(),
)
def test_packed_operands(
    stack: list[int], rows: int, depth: int, columns: int, outer: tuple[int, ...], data: st.DataObject
) -> None:
    rank, rows_rank = len(stack), len(outer) + 1
    of_rows = list(range(rank, rank + rows_rank))
    batch = [[i] for i in range(rank)]
    left_order = shuffled(data.draw, [*batch, of_rows, [rank + rows_rank]])
    result = [*itertools.chain(*data.draw(st.permutations([*batch, of_rows]))), rank + rows_rank]
    plain = Form(left_order, tuple(range(rank + 2)), tuple(result), rank, 1)
    case = Case(tuple(stack), (*outer, rows), (depth,), (columns,), plain)
    left, right = case.operands()
    form = replace(plain, columns=columns)
    assert fits(form, left.shape, packed_shape(right.shape))

    def both(left: jax.Array, right: jax.Array) -> jax.Array:
        panels = packed(right)
        return jnp.stack([product(left, panels, form), pure_product(left, panels, form=form)])

    for actual, pure in by_each_variant(both, left, right):
        case.assert_close(actual, left, right)
        case.assert_close(pure, left, right)


def test_packed_operands_have_no_transposed_result() -> None:
    assert not fits(Form((0, 1), (0, 1), (1, 0), 0, 1, columns=40), (8, 3), packed_shape((3, 40)))
    assert fits(Form((0, 1), (0, 1), (1, 0), 0, 1, columns=40), (1, 3), packed_shape((3, 40)))


# ---- sizes that take a path of their own -----------------------------------------------------------------------------


def matrices(is_packed: bool, columns: int) -> Form:
    return Form((0, 1), (0, 1), (0, 1), 0, 1, columns if is_packed else None)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(
    ("rows", "depth", "columns"),
    [
        (113, 50, 230),  # more rows than a block has, more panels than are multiplied without a copy
        (225, 385, 33),
        (30, 1024, 40),  # rows that lie a power of two apart
        (1, 2049, 1),
        (3, 4100, 1050),  # a right operand that is copied in turns
        (700, 1, 65),
        (330, 390, 48),  # a right operand that is read as it lies: its rows are short,
        (225, 20, 1040),  # or few blocks read it
        (790, 20, 784),  # many blocks, long rows: copied
        (230, 3, 1024),  # rows that lie a power of two apart
    ],
)
def test_large_matrices(is_packed: bool, rows: int, depth: int, columns: int) -> None:
    form = matrices(is_packed, columns)
    case = Case((), (rows,), (depth,), (columns,), form)
    left, right = case.operands()
    given = packed(jnp.asarray(right)) if is_packed else right
    for actual in by_each_variant(partial(product, form=form), left, given):
        case.assert_close(actual, left, right)


@pytest.mark.parametrize(("rows", "depth", "columns"), [(240, 800, 48), (384, 50, 784), (1000, 390, 32), (226, 17, 33)])
def test_gradients_of_weights(rows: int, depth: int, columns: int) -> None:
    """What is summed over are the rows of both operands."""
    case = Case((), (rows,), (depth,), (columns,), Form((1, 0), (0, 1), (0, 1), 0, 1))
    left, right = case.operands()
    for actual in by_each_variant(partial(product, form=case.form), left, right):
        case.assert_close(actual, left, right)


def test_every_size_of_a_tile() -> None:
    """In one call, the rows and columns of each count up to beyond one tile."""
    lefts = [np.random.default_rng(m).standard_normal((m, 5), np.float32) for m in range(1, 30)]
    rights = [np.random.default_rng(n).standard_normal((5, n), np.float32) for n in (1, 7, 8, 9, 15, 16, 17, 24, 31)]

    def all_products() -> jax.Array:
        return jnp.concatenate([product(a, b, matrices(False, 0)).ravel() for a in lefts for b in rights])

    expected = np.concatenate([np.einsum("ik,kj->ij", a, b).ravel() for a in lefts for b in rights])
    for actual in by_each_variant(all_products):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)])
def test_a_stack_of_very_many_tiny_matrices(order: tuple[int, ...]) -> None:
    form = Form((0, 1, 2), (0, 1, 2), order, 1, 1)
    case = Case((20_000,), (2,), (3,), (5,), form)
    left, right = case.operands()
    for actual in by_each_variant(partial(product, form=form), left, right):
        case.assert_close(actual, left, right)


@pytest.mark.parametrize("right", [(1, 0), (0, 1)])
def test_an_array_by_itself(right: tuple[int, int]) -> None:
    form = Form((0, 1), right, (0, 1), 0, 1)
    case = Case((), (70,), (70,), (70,), form)
    x, _ = case.operands()
    for actual in by_each_variant(lambda x: product(x, x, form), x):
        case.assert_close(actual, x, x)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(
    ("rows", "depth", "columns"), [(17, 9, 33), (33, 400, 17), (130, 40, 250), (5, 1024, 31), (240, 390, 48)]
)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row_and_column(
    is_packed: bool, rows: int, depth: int, columns: int, value: float
) -> None:
    form = matrices(is_packed, columns)
    left, right = Case((), (rows,), (depth,), (columns,), form).operands()
    left[rows // 2, depth - 1] = right[0, columns - 1] = value
    right[depth // 2, 0] = np.nan
    given = packed(jnp.asarray(right)) if is_packed else right
    with np.errstate(invalid="ignore"):
        expected = left @ right
    for actual in by_each_variant(partial(product, form=form), left, given):
        np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
        np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_an_earlier_product_left_in_memory_is_not_seen(order: tuple[int, int]) -> None:
    """Copies have room behind the last row and column, which is not cleared."""
    ones, columns = np.ones((3, 130), np.float32), 33
    right = np.ones((130, columns) if order == (0, 1) else (columns, 130), np.float32)
    spoil = np.full((200, 200), np.nan, np.float32)

    def both(left: jax.Array, right: jax.Array, spoil: jax.Array) -> jax.Array:
        spoiled = product(spoil, spoil, matrices(False, 0))
        right, spoiled = jax.lax.optimization_barrier((right, spoiled))
        return product(left, right, Form((0, 1), order, (0, 1), 0, 1))

    for actual in by_each_variant(both, ones, right, spoil):
        np.testing.assert_array_equal(actual, np.full((3, columns), 130, np.float32))


def test_denormals_are_those_of_xla() -> None:
    """Both flush them to zero, or neither does."""
    left, right = np.full((20, 40), 1e-30, np.float32), np.full((40, 50), 1e-10, np.float32)
    left[3], right[:, 7] = 1e-41, 1.0
    form = matrices(False, 50)
    expected = np.asarray(jax.jit(partial(pure_product, form=form))(left, right))
    for actual in by_each_variant(partial(product, form=form), left, right):
        np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-42)


def test_the_pure_form_is_what_other_platforms_compute() -> None:
    form = matrices(True, 5)
    lowered = jax.jit(partial(product, form=form)).trace(np.ones((3, 6), np.float32), packed(jnp.ones((6, 5))))
    assert "dot_general" in lowered.lower(lowering_platforms=("tpu",)).as_text()
    assert "transmuter_product" in lowered.lower(lowering_platforms=("cpu",)).as_text()
