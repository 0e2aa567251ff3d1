"""Products in float16 are rounded by themselves, exactly as NumPy rounds them."""

from __future__ import annotations

import jax
import numpy as np

from transmuter.segments.preparation import evaluate, flatten
from transmuter.segments.rewriting import rewritten
from transmuter.segments.rounding import rounded_products


def test_all_kinds_of_products_are_numpys():
    random = np.random.default_rng(0)
    special = np.array([0, -0.0, np.inf, np.nan, 65504, 6e-8, 6.1e-5, 3e-4, 300], np.float16)
    a, b = (random.integers(0, 65536, 50_000).astype(np.uint16).view(np.float16) for _ in range(2))
    a, b = (np.concatenate([x, y.reshape(-1)]) for x, y in zip((a, b), np.meshgrid(special, special), strict=True))
    trace = flatten(jax.make_jaxpr(lambda a, b: a * b)(a, b))
    trace = rewritten(trace, (), [rounded_products])
    run = jax.jit(lambda a, b: evaluate(trace.operations, dict(zip(trace.inputs, (a, b), strict=True)), trace.outputs))
    with np.errstate(all="ignore"):
        wanted = a * b
    (actual,) = run(a, b)
    np.testing.assert_array_equal(actual, wanted)
    numbers = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(actual)[numbers], np.signbit(wanted)[numbers])


def test_other_products_stay():
    trace = flatten(jax.make_jaxpr(lambda a: a * a + a)(np.ones(3, np.float32)))
    assert rewritten(trace, (), [rounded_products]) is trace
