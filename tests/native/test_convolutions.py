"""Convolutions and their gradients by the kernels, against NumPy in float64 and JAX's own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_sets import by_each_variant, needs_kernels
from jax import lax

from transmuter.native.convolutions import Convolution, convolution, packed_kernel, pure_convolution

pytestmark = needs_kernels
EPSILON = np.finfo(np.float32).eps
FEW, MANY = [1, 2, 3, 5, 13], [8, 15, 16, 17, 31, 32, 33, 64, 97]
"""Channels that fill no tile or vector, and those that do."""


@dataclass(frozen=True)
class Case:
    """A convolution, and in which order its kernel has the dimensions (spatial, channels, features)."""

    how: Convolution
    order: tuple[int, ...]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        how = self.how
        kernel = (*how.kernel, how.channels, how.groups * how.features)
        return {
            "input": (how.batch, *how.input, how.groups * how.channels),
            "kernel": tuple(kernel[i] for i in self.order),
            "output": (how.batch, *how.output, how.groups * how.features),
        }

    def operands(self, seed: int = 0) -> list[np.ndarray]:
        random = np.random.default_rng(seed)
        drawn = {name: random.standard_normal(shape, np.float32) for name, shape in self.shapes.items()}
        given = {"output": ("input", "kernel"), "input": ("output", "kernel"), "kernel": ("input", "output")}
        return [drawn[name] for name in given[self.how.wanted]]

    def computed(self, first: jax.Array, second: jax.Array) -> jax.Array:
        return convolution(first, second, self.how, self.shapes[self.how.wanted])

    def expected(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """What is wanted in the dtype of the operands, tap after tap."""
        how, wanted = self.how, self.how.wanted
        if wanted != "kernel":
            second = np.transpose(second, np.argsort(self.order))
        shape = {**self.shapes, "kernel": (*how.kernel, how.channels, how.groups * how.features)}[wanted]
        result = np.zeros(shape, first.dtype)
        for tap in itertools.product(*map(range, how.kernel)):
            for group in range(how.groups):
                channels = slice(group * how.channels, (group + 1) * how.channels)
                features = slice(group * how.features, (group + 1) * how.features)
                for output, input in self._pairs(tap):
                    here, there = (slice(None), *output), (slice(None), *input)
                    of_kernel = (*tap, slice(None), features)
                    with np.errstate(invalid="ignore"):  # which OpenBLAS may raise for finite operands
                        if wanted == "output":
                            result[*here, features] += first[*there, channels] @ second[of_kernel]
                        elif wanted == "input":
                            result[*there, channels] += first[*here, features] @ second[of_kernel].T
                        else:
                            seen, slopes = first[*there, channels], second[*here, features]
                            result[of_kernel] += seen.reshape(-1, how.channels).T @ slopes.reshape(-1, how.features)
        return result if wanted != "kernel" else np.transpose(result, self.order)

    def _pairs(self, tap: Sequence[int]) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """The positions of the output that see the input through a tap, and those that they see; none or one."""
        how, outputs, inputs = self.how, [], []
        for d, k in enumerate(tap):
            shift, stride = k * how.dilations[d] - how.low[d], how.strides[d]
            first = max(0, -(shift // stride))
            last = min(how.output[d] - 1, (how.input[d] - 1 - shift) // stride)
            if last < first:
                return
            outputs.append(slice(first, last + 1))
            inputs.append(slice(first * stride + shift, last * stride + shift + 1, stride))
        yield tuple(outputs), tuple(inputs)

    def assert_close(self, actual: np.ndarray, first: np.ndarray, second: np.ndarray) -> None:
        """No element is further off than the roundings of its sum may add up to."""
        how, wide = self.how, (first.astype(np.float64), second.astype(np.float64))
        expected, bound = self.expected(*wide), self.expected(*map(abs, wide))
        assert (actual.shape, actual.dtype) == (expected.shape, np.float32)
        lengths = {"kernel": (how.batch, *how.output), "input": (*how.kernel, how.features)}
        length = math.prod(lengths.get(how.wanted, (*how.kernel, how.channels)))
        off = ~(abs(actual - expected) <= EPSILON * (length + 4) * bound)
        assert not off.any(), (self, np.argwhere(off)[:8])


def case_of(
    wanted: str = "output",
    batch: int = 2,
    groups: int = 1,
    channels: int = 8,
    features: int = 16,
    input: tuple[int, ...] = (9, 8),
    kernel: tuple[int, ...] = (3, 3),
    strides: tuple[int, ...] = (1, 1),
    dilations: tuple[int, ...] = (1, 1),
    padding: tuple[tuple[int, int], ...] = ((1, 1), (1, 1)),
    order: tuple[int, ...] | None = None,
) -> Case:
    rank = len(kernel)
    order = tuple(range(rank + 2)) if order is None else order
    extents = [(k - 1) * d + 1 for k, d in zip(kernel, dilations)]
    output = [(n + sum(pad) - e) // s + 1 for n, pad, e, s in zip(input, padding, extents, strides)]
    dense = [*kernel, channels, groups * features]
    stored = [dense[i] for i in order]
    steps = [math.prod(stored[order.index(i) + 1 :]) for i in range(rank + 2)]
    how = Convolution(
        wanted=wanted,
        batch=batch,
        groups=groups,
        channels=channels,
        features=features,
        input=tuple(input),
        output=tuple(output),
        kernel=tuple(kernel),
        strides=tuple(strides),
        dilations=tuple(dilations),
        low=tuple(low for low, _ in padding),
        steps=tuple(steps),
    )
    return Case(how, order)


@st.composite
def cases(draw: st.DrawFn, wanted: str, *, largest: int = 12) -> Case:
    rank = draw(st.sampled_from([1, 2]))
    each = lambda numbers: tuple(draw(numbers) for _ in range(rank))
    case = case_of(
        wanted,
        batch=draw(st.integers(1, 3)),
        groups=draw(st.sampled_from([1, 1, 2, 3])),
        channels=draw(st.sampled_from(FEW + MANY)),
        features=draw(st.sampled_from(FEW + MANY)),
        input=each(st.integers(1, largest) if rank == 2 else st.sampled_from([1, 7, 30, 57, 113])),
        kernel=each(st.sampled_from([1, 2, 3, 3, 5, 7])),
        strides=each(st.sampled_from([1, 1, 2, 3])),
        dilations=each(st.sampled_from([1, 1, 2, 3])),
        padding=tuple((draw(st.integers(-2, 8)), draw(st.integers(-2, 8))) for _ in range(rank)),
        order=tuple(draw(st.permutations(range(rank + 2)))),
    )
    # enough padding for one position, at least
    return case if min(case.how.output) > 0 else Case(replace(case.how, output=(1,) * rank), case.order)


@settings(max_examples=60, deadline=None)
@given(st.one_of(cases("output"), cases("input"), cases("kernel")))
def test_each_of_the_three(case: Case) -> None:
    operands = case.operands()
    for actual in by_each_variant(case.computed, *operands):
        case.assert_close(actual, *operands)


@settings(max_examples=12, deadline=None)
@given(cases("output"))
def test_packed_kernels(case: Case) -> None:
    input, kernel = case.operands()
    how, shape = replace(case.how, is_packed=True, steps=(0,) * len(case.order)), case.shapes["output"]

    def all_forms(input: jax.Array, kernel: jax.Array) -> jax.Array:
        panels = packed_kernel(lax.transpose(kernel, np.argsort(case.order)), how.groups)
        by_library = convolution(input, panels, how, shape), case.computed(input, kernel)
        return jnp.stack([*by_library, pure_convolution(input, panels, how=how, shape=shape)])

    for packed, as_it_lies, pure in by_each_variant(all_forms, input, kernel):
        case.assert_close(packed, input, kernel)
        case.assert_close(as_it_lies, input, kernel)
        case.assert_close(pure, input, kernel)


HWIO, OIHW = (0, 1, 2, 3), (3, 2, 0, 1)


@pytest.mark.parametrize("wanted", ["output", "input", "kernel"])
@pytest.mark.parametrize("order", [HWIO, OIHW], ids=["HWIO", "OIHW"])
@pytest.mark.parametrize(
    "sizes",
    [
        {
            "channels": 3,
            "features": 64,
            "kernel": (7, 7),
            "strides": (2, 2),
            "input": (33, 61),
            "padding": ((3, 3),) * 2,
        },
        {"channels": 64, "features": 33, "input": (7, 7), "batch": 5},
        {"channels": 17, "features": 100, "kernel": (1, 1), "padding": ((0, 0),) * 2, "input": (14, 14)},
        {"channels": 40, "features": 40, "kernel": (1, 1), "strides": (2, 2), "padding": ((0, 0),) * 2},
        {"channels": 130, "features": 20, "kernel": (3, 5), "dilations": (2, 1), "padding": ((2, 2), (2, 2))},
        {"channels": 1, "features": 1, "kernel": (2, 9), "input": (3, 200), "padding": ((0, 1), (-3, 4))},
        {"channels": 8, "features": 8, "input": (2, 500), "strides": (1, 3), "kernel": (2, 4), "batch": 3},
        {"channels": 16, "features": 16, "strides": (3, 5), "kernel": (2, 3), "input": (20, 23)},  # gaps unseen
        {"channels": 2, "features": 130, "kernel": (5, 5), "input": (4, 4), "padding": ((4, 4), (4, 4))},
        {"groups": 8, "channels": 1, "features": 1, "input": (12, 12)},
        {"groups": 4, "channels": 16, "features": 33, "input": (10, 11), "strides": (2, 1)},
    ],
)
def test_sizes_that_take_a_path_of_their_own(wanted: str, order: tuple[int, ...], sizes: dict) -> None:
    case = case_of(wanted, order=order, **sizes)
    operands = case.operands()
    for actual in by_each_variant(case.computed, *operands):
        case.assert_close(actual, *operands)


@pytest.mark.parametrize("wanted", ["output", "input", "kernel"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"kernel": (3,), "input": (300,), "channels": 80, "features": 48, "strides": (2,), "dilations": (1,)},
        {"kernel": (10,), "input": (1000,), "channels": 1, "features": 40, "strides": (5,), "dilations": (1,)},
        {"kernel": (3,), "input": (50,), "channels": 24, "features": 24, "strides": (1,), "dilations": (4,)},
    ],
)
def test_one_spatial_dimension(wanted: str, sizes: dict) -> None:
    case = case_of(wanted, padding=((4, 3),), **sizes)
    operands = case.operands()
    for actual in by_each_variant(case.computed, *operands):
        case.assert_close(actual, *operands)


@pytest.mark.parametrize(
    "padding", [((-1, -1), (-2, 0)), ((0, -3), (5, -4)), ((20, 0), (0, 20)), ((-8, 9), (0, 0)), ((12, -9), (-8, 12))]
)
@pytest.mark.parametrize("wanted", ["output", "input", "kernel"])
def test_positions_that_see_little_or_nothing_of_the_input(wanted: str, padding: tuple) -> None:
    """What nothing sees has a gradient of zero."""
    case = case_of(wanted, channels=16, features=17, padding=padding)
    operands = case.operands()
    for actual in by_each_variant(case.computed, *operands):
        case.assert_close(actual, *operands)


@pytest.mark.parametrize("channels", [5, 24])
@pytest.mark.parametrize(("strides", "dilations"), [((1, 1), (1, 1)), ((2, 1), (1, 1)), ((1, 1), (1, 2))])
def test_gradients_are_those_of_jax(channels: int, strides: tuple[int, int], dilations: tuple[int, int]) -> None:
    cases = {
        wanted: case_of(wanted, channels=channels, features=20, strides=strides, dilations=dilations)
        for wanted in ("output", "input", "kernel")
    }
    input, kernel = cases["output"].operands()
    slopes, _ = cases["input"].operands()

    def by_jax(input: jax.Array, kernel: jax.Array, slopes: jax.Array) -> tuple[jax.Array, ...]:
        numbers = ("NHWC", "HWIO", "NHWC")
        call = partial(lax.conv_general_dilated, window_strides=strides, padding=((1, 1), (1, 1)))
        call = partial(call, rhs_dilation=dilations, dimension_numbers=numbers)
        output, pull = jax.vjp(call, input, kernel)
        return output, *pull(slopes)

    expected = map(np.asarray, jax.jit(by_jax)(input, kernel, slopes))
    operands = {"output": (input, kernel), "input": (slopes, kernel), "kernel": (input, slopes)}
    for (wanted, case), wide in zip(cases.items(), expected, strict=True):
        for actual in by_each_variant(case.computed, *operands[wanted]):
            np.testing.assert_allclose(actual, wide, rtol=1e-4, atol=1e-4 * abs(wide).max())


@pytest.mark.parametrize("wanted", ["output", "input", "kernel"])
@pytest.mark.parametrize(("channels", "features"), [(3, 20), (33, 17)])
def test_what_an_earlier_call_left_in_memory_is_not_seen(wanted: str, channels: int, features: int) -> None:
    case = case_of(wanted, channels=channels, features=features, input=(13, 13), batch=1)
    spoil = case_of(wanted, channels=40, features=70, input=(20, 20), batch=4)
    operands, spoiling = case.operands(), [np.full_like(x, np.nan) for x in spoil.operands()]

    def both(first: jax.Array, second: jax.Array, *spoiling: jax.Array) -> jax.Array:
        first, _ = lax.optimization_barrier((first, spoil.computed(*spoiling)))
        return case.computed(first, second)

    for actual in by_each_variant(both, *operands, *spoiling):
        case.assert_close(actual, *operands)


@pytest.mark.parametrize("wanted", ["output", "input"])
@pytest.mark.parametrize("channels", [3, 24])
def test_what_is_not_finite_reaches_only_what_sees_it(wanted: str, channels: int) -> None:
    case = case_of(wanted, channels=channels, features=channels, input=(15, 15))
    first, second = case.operands()
    first[1, 7, 6, channels - 1] = np.nan
    reached = set(itertools.product([1], [6, 7, 8], [5, 6, 7]))
    assert {place[:3] for place in map(tuple, np.argwhere(np.isnan(case.expected(first, second))).tolist())} == reached
    for actual in by_each_variant(case.computed, first, second):
        found = np.argwhere(np.isnan(actual))[:, :3]
        assert set(map(tuple, found.tolist())) == reached
