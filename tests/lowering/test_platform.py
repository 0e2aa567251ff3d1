"""How XLA is to compile, by what there is to compute."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from transmuter import native
from transmuter.lowering import platform
from transmuter.segments.kernels import calling_kernels


def options(function, *shapes: tuple[int, ...]) -> dict:
    avals = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    return dict(platform.compiler_options(jax.make_jaxpr(function)(*avals).eqns))


def convolution(x, w):
    return lax.conv(x, w, (1, 1), "SAME")


def with_channels_last(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def repeated(x, w):
    return lax.scan(lambda carry, _: (jnp.tanh(carry @ w), None), x, None, length=3)


NO_YNNPACK, REDUCES = (
    o["xla_cpu_experimental_ynn_fusion_type"] for o in (platform._NO_YNNPACK, platform._YNNPACK_REDUCES)
)
ALWAYS = {**platform._FEW_PARTS, **platform._IN_PIECES}


@pytest.mark.parametrize(
    ("function", "shapes", "ynnpack"),
    [
        (jnp.matmul, [(128, 64), (64, 64)], REDUCES),
        (jnp.matmul, [(8, 64), (64, 64)], None),
        (jnp.matmul, [(12, 8, 32), (12, 32, 8)], None),
        (repeated, [(1, 64), (64, 64)], REDUCES),
        (repeated, [(8, 64), (64, 64)], None),
        (convolution, [(1, 3, 8, 8), (4, 3, 3, 3)], NO_YNNPACK),
        (lambda x, w, a: (convolution(x, w), a @ a), [(1, 3, 8, 8), (4, 3, 3, 3), (4, 4)], NO_YNNPACK),
        (lambda x, w, a: (convolution(x, w), a @ a), [(1, 3, 8, 8), (4, 3, 3, 3), (64, 64)], REDUCES),
        (jnp.tanh, [(8, 64)], None),
    ],
)
def test_what_ynnpack_computes(function, shapes, ynnpack, monkeypatch):
    assert options(function, *shapes).get("xla_cpu_experimental_ynn_fusion_type") == ynnpack
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert options(function, *shapes) == {}


def test_products_of_loops_use_wide_registers(monkeypatch):
    def until(x, w):
        return lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ w, x)

    for function, is_wide in ((repeated, True), (until, True), (jnp.matmul, False)):
        assert ("xla_cpu_prefer_vector_width" in options(function, (1, 64), (64, 64))) == is_wide
    assert options(lambda x: lax.scan(lambda c, _: (c + 1, None), x, None, length=3), (64,)) == ALWAYS
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert options(repeated, (1, 64), (64, 64)) == {}


def test_products_of_integers_are_ynnpacks():
    def product(x, w, a, b):
        return lax.dot(x, w, preferred_element_type=np.int32), a @ b

    avals = [jax.ShapeDtypeStruct((128, 128), kind) for kind in (np.int8, np.int8, np.float32, np.float32)]
    assert platform.compiler_options(jax.make_jaxpr(product)(*avals).eqns) == ALWAYS


def test_kernels_of_our_own_count_as_the_products_that_they_are():
    if not native.available():
        pytest.skip("there are no kernels for this machine")
    alone = lambda x, w: calling_kernels(with_channels_last)(x, w)
    beside = lambda x, w, a: (calling_kernels(with_channels_last)(x, w), calling_kernels(jnp.matmul)(a, a))
    few = [(1, 12, 12, 8), (3, 3, 8, 8)]
    for function, shapes, ynnpack in ((alone, few, NO_YNNPACK), (beside, [*few, (128, 128)], REDUCES)):
        assert "cpu_convolution" in str(jax.make_jaxpr(function)(*(jnp.zeros(shape) for shape in shapes)))
        assert options(function, *shapes)["xla_cpu_experimental_ynn_fusion_type"] == ynnpack


def test_the_versions_that_are_not_asked_have_the_options(monkeypatch):
    monkeypatch.setattr(platform, "_KNOWING", set())
    platform._are_known.cache_clear()
    assert platform._are_known()


def test_options_that_xla_does_not_know_are_not_asked_for(monkeypatch):
    monkeypatch.setattr(platform, "_KNOWING", set())
    monkeypatch.setattr(platform, "_YNNPACK_REDUCES", {"xla_cpu_no_such_option": "1"})
    platform._are_known.cache_clear()
    try:
        assert options(jnp.matmul, (128, 64), (64, 64)) == {}
    finally:
        platform._are_known.cache_clear()


@pytest.mark.parametrize(("kind", "in_order"), [(np.float16, True), (jnp.bfloat16, True), (np.float32, False)])
def test_products_in_half_precision_widen_one_weight_at_a_time(kind, in_order, monkeypatch):
    avals = [jax.ShapeDtypeStruct((64, 64), kind)] * 2
    equations = jax.make_jaxpr(jnp.matmul)(*avals).eqns
    assert ("xla_cpu_scheduler_type" in platform.compiler_options(equations)) == in_order
    assert ("xla_multiheap_size_constraint_per_heap" in platform.compiler_options(equations)) != in_order
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert platform.compiler_options(equations) == {}
