"""Prepared weights that NumPy makes are those that XLA would make."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from transmuter.segments.moving import moved
from transmuter.segments.preparation import Weight, evaluate, flatten, split


def prepared(function: Callable[..., Any], *arrays: np.ndarray) -> tuple[Weight, dict[int, jax.Array]]:
    """What is prepared for a product with `function(*arrays)`, and its originals."""
    trace = flatten(jax.make_jaxpr(lambda x, *w: (x * function(*w)).sum())(np.ones((), np.float32), *arrays))
    names = dict(zip(trace.inputs[1:], map(str, range(len(arrays)))))
    [weight] = split(trace, names, trace.inputs[:1], prepare=True).weights
    return weight, {ref: jnp.asarray(arrays[int(name)]) for ref, name in weight.sources}


def drawn(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.RandomState(0).standard_normal(shape).astype(dtype)


MOVES = {
    "transposed": (lambda w: w.T, [drawn(300, 130)]),
    "kernel": (lambda w: jnp.transpose(w, (2, 3, 1, 0)), [drawn(140, 5, 3, 3)]),
    "pointwise": (lambda w: jnp.transpose(w, (2, 3, 1, 0)).reshape(5, 40), [drawn(40, 5, 1, 1)]),
    "squeezed": (lambda w: jnp.squeeze(w, 1), [drawn(7, 1, 3)]),
    "expanded": (lambda w: jnp.expand_dims(w, (0, 2)), [drawn(7, 3)]),
    "row": (lambda w: lax.broadcast_in_dim(w, (1, 7), (1,)), [drawn(7)]),
    "joined": (lambda a, b: jnp.concatenate([a.T, b], axis=1), [drawn(5, 4), drawn(4, 6)]),
    "from float16": (lambda w: w.astype(np.float32), [drawn(300, 4, dtype=np.float16)]),
    "from bfloat16": (lambda w: w.astype(np.float32).T, [drawn(300, 4, dtype=ml_dtypes.bfloat16)]),
    "empty": (lambda w: w.T, [drawn(0, 4)]),
}


@pytest.mark.parametrize("name", MOVES)
def test_moves_are_those_of_xla(name: str) -> None:
    weight, originals = prepared(MOVES[name][0], *MOVES[name][1])
    [expected] = evaluate(weight.operations, dict(originals), [weight.ref])
    actual = moved(weight, originals)
    assert weight.operations
    assert actual is not None
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))


def test_reshaping_takes_no_copy() -> None:
    weight, originals = prepared(lambda w: w.reshape(8, 64), drawn(32, 16))
    [original] = originals.values()
    assert moved(weight, originals).unsafe_buffer_pointer() == original.unsafe_buffer_pointer()


@pytest.mark.parametrize("function", [lambda w: w + 1, lambda w: jnp.tanh(w.T), lambda w: w.astype(np.int32)])
def test_what_computes_is_left_to_xla(function: Callable[..., Any]) -> None:
    assert moved(*prepared(function, drawn(5, 4))) is None


def test_originals_outlive_their_prepared_views() -> None:
    weight, originals = prepared(lambda w: w.reshape(8, 64), drawn(32, 16))
    expected = np.array(next(iter(originals.values()))).reshape(8, 64)
    view = moved(weight, originals)
    originals.clear()
    np.testing.assert_array_equal(np.asarray(view + 0), expected)
