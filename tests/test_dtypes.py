"""Dtypes with `jax_enable_x64` off and on: exact results, no wrapping, gradients through 64-bit floats."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from building import info, model_of
from onnx import TensorProto, helper, numpy_helper

import transmuter

X = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)


def constants(**arrays: object) -> list[onnx.TensorProto]:
    return [numpy_helper.from_array(np.asarray(a), name) for name, a in arrays.items()]


@pytest.fixture(params=[False, True], ids=["x64 off", "x64 on"])
def x64(request: pytest.FixtureRequest) -> object:
    with jax.enable_x64(request.param):
        yield request.param
        assert jax.config.jax_enable_x64 is request.param


def wide() -> transmuter.Model:
    """Integers and floats of 64 bits, made, kept and returned."""
    nodes = [
        helper.make_node("Shape", ["i"], ["shape"]),
        helper.make_node("Add", ["i", "large"], ["sum"]),
        helper.make_node("Cast", ["d"], ["i_of_d"], to=TensorProto.INT64),
        helper.make_node("Mul", ["d", "d"], ["square"]),
        helper.make_node("ArgMax", ["d"], ["argmax"], axis=0),
    ]
    outputs = ["shape", "sum", "i_of_d", "argmax"]
    return transmuter.load(
        model_of(
            nodes,
            [info("i", ("n",), TensorProto.INT64), info("d", ("n",), TensorProto.DOUBLE)],
            [*(info(name, None, TensorProto.INT64) for name in outputs), info("square", None, TensorProto.DOUBLE)],
            constants(large=np.int64(2**40)),
        )
    )


def test_results_have_the_models_dtypes(x64: bool) -> None:
    model = wide()
    i, d = np.array([1, 2**50], np.int64), np.array([1 + 1e-12, 2.0**33])
    compiled = transmuter.compile(model)
    for call in (lambda x: transmuter.run(model, x), compiled):
        outputs = {name: np.asarray(y) for name, y in call({"i": i, "d": d}).items()}
        np.testing.assert_array_equal(outputs["sum"], i + 2**40)
        np.testing.assert_array_equal(outputs["i_of_d"], d.astype(np.int64))
        np.testing.assert_array_equal(outputs["square"], d * d)
        assert [y.dtype.name for y in outputs.values()] == ["int64"] * 4 + ["float64"]


def test_jax_arrays_that_x64_makes_narrow_are_accepted(x64: bool) -> None:
    model = wide()
    inputs = {"i": jnp.arange(3), "d": jnp.ones(3)}
    if x64:
        inputs = {"i": inputs["i"].astype(np.int64), "d": inputs["d"].astype(np.float64)}
    for call in (lambda x: transmuter.run(model, x), transmuter.compile(model)):
        assert call(inputs)["sum"].dtype == np.int64
    if x64:
        with pytest.raises(transmuter.InputError, match="int32"):
            transmuter.run(model, {**inputs, "i": inputs["i"].astype(np.int32)})


def bounds() -> transmuter.Model:
    """What exporters write for "to the end" and "no limit": the extremes of int64."""
    nodes = [
        helper.make_node("Slice", ["i", "one", "most", "zero"], ["tail"]),
        helper.make_node("Slice", ["tail", "minus", "least", "zero", "minus"], ["reversed"]),
        helper.make_node("Min", ["reversed", "most_scalar"], ["kept"]),
        helper.make_node("Clip", ["kept", "least_scalar", "most_scalar"], ["y"]),
    ]
    limits = np.iinfo(np.int64)
    return transmuter.load(
        model_of(
            nodes,
            [info("i", ("n",), TensorProto.INT64)],
            [info("y", None, TensorProto.INT64)],
            constants(
                one=[1], zero=[0], minus=[-1], most=[limits.max], least=[limits.min],
                most_scalar=np.int64(limits.max), least_scalar=np.int64(limits.min),
            ),
        )
    )  # fmt: skip


def test_extreme_bounds_inside_a_callers_jit(x64: bool) -> None:
    model = bounds()
    i = np.arange(5)
    for call in (
        jax.jit(lambda i: model.apply(model.params, {"i": i})["y"]),
        lambda i: transmuter.run(model, {"i": i})["y"],
        lambda i: transmuter.compile(model)({"i": i})["y"],
    ):
        np.testing.assert_array_equal(call(i), [4, 3, 2, 1])


def test_a_constant_that_does_not_fit_raises_and_never_wraps() -> None:
    nodes = [helper.make_node("Add", ["i", "large"], ["y"], name="offset")]
    model = transmuter.load(
        model_of(
            nodes,
            [info("i", ("n",), TensorProto.INT64)],
            [info("y", None, TensorProto.INT64)],
            constants(large=np.int64(2**40)),
        )
    )
    call = jax.jit(lambda i: model.apply(model.params, {"i": i})["y"])
    with pytest.raises(transmuter.LoweringError, match=r"'offset' \(Add\)(.|\n)*1099511627776"):
        call(np.arange(3))
    with jax.enable_x64(True):
        np.testing.assert_array_equal(call(np.arange(3)), np.arange(3) + 2**40)


def in_double(op: str) -> transmuter.Model:
    middle = {
        "TopK": helper.make_node("TopK", ["d", "two"], ["v", "places"]),
        "Gather": helper.make_node("Gather", ["d", "places"], ["v"], axis=1),
        "GatherElements": helper.make_node("GatherElements", ["d", "elements"], ["v"], axis=1),
        "ScatterElements": helper.make_node("ScatterElements", ["d", "elements", "ones"], ["v"], axis=1),
        "CumSum": helper.make_node("CumSum", ["d", "axis"], ["v"]),
        "Softmax": helper.make_node("Softmax", ["d"], ["v"]),
        "ReduceMax": helper.make_node("ReduceMax", ["d"], ["v"]),
    }[op]
    nodes = [
        helper.make_node("Cast", ["x"], ["d"], to=TensorProto.DOUBLE),
        middle,
        helper.make_node("Mul", ["v", "v"], ["squares"]),
        helper.make_node("ReduceSum", ["squares"], ["sum"], keepdims=0),
        helper.make_node("Cast", ["sum"], ["y"], to=TensorProto.FLOAT),
    ]
    given = constants(two=[2], places=[0, 2, 1, -1], elements=[[0, 2], [1, 1]], ones=np.ones((2, 2)), axis=1)
    if op == "TopK":
        given = [t for t in given if t.name != "places"]
    return transmuter.load(model_of(nodes, [info("x", (2, 8))], [info("y", ())], given))


@pytest.mark.parametrize(
    "op", ["TopK", "Gather", "GatherElements", "ScatterElements", "CumSum", "Softmax", "ReduceMax"]
)
def test_gradients_through_doubles(op: str, x64: bool) -> None:
    model = in_double(op)
    compiled = transmuter.compile(model)
    x = jnp.asarray(X)
    with jax.enable_x64(True):
        wanted = jax.grad(lambda x: model.apply(model.params, {"x": x})["y"])(x)
    for call in (
        lambda x: compiled({"x": x})["y"],
        lambda x: compiled({"x": x}, params=model.params)["y"],
        lambda x: transmuter.run(model, {"x": x})["y"],
        lambda x: model.apply(model.params, {"x": x})["y"],
        jax.jit(lambda x: model.apply(model.params, {"x": x})["y"]),
    ):
        grad = jax.grad(call)(x)
        assert grad.dtype == np.float32
        np.testing.assert_allclose(grad, wanted, rtol=1e-4, atol=1e-5)
    batched = jax.grad(lambda xs: jnp.sum(jax.vmap(lambda x: compiled({"x": x})["y"])(xs)))(jnp.stack([x, x]))
    np.testing.assert_allclose(batched, jnp.stack([wanted, wanted]), rtol=1e-4, atol=1e-5)


def half_precision(element: int) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Mul", ["x", "thousand"], ["large"]),
        helper.make_node("Mul", ["large", "large"], ["square"]),
        helper.make_node("Div", ["square", "large"], ["y"]),
    ]
    dtype = helper.tensor_dtype_to_np_dtype(element)
    weights = [numpy_helper.from_array(np.full(20, 1000).astype(dtype), "thousand")]
    return model_of(nodes, [info("x", (20,), element)], [info("y", None, element)], weights, opset=22)


@pytest.mark.parametrize("element", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_half_precision_graphs_compute_in_float32_unless_told_otherwise(element: int) -> None:
    dtype = helper.tensor_dtype_to_np_dtype(element)
    x = np.ones(20).astype(dtype)
    for compute_type, finite in (("float32", True), (None, element == TensorProto.BFLOAT16)):
        model = transmuter.load(half_precision(element), compute_type=compute_type)
        assert model.params["thousand"].dtype == dtype
        for call in (lambda x: transmuter.run(model, x), transmuter.compile(model)):  # noqa: B023
            y = np.asarray(call({"x": x})["y"])
            assert y.dtype == dtype
            assert np.isfinite(y.astype(np.float32)).all() == finite, "1000 * 1000 overflows float16"
    with pytest.raises(ValueError, match="compute_type"):
        transmuter.load(half_precision(element), compute_type="float64")


@pytest.mark.parametrize("element", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_each_half_precision_result_is_rounded_when_compiled_too(element: int) -> None:
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["squares"]),
        helper.make_node("Add", ["squares", "x"], ["sums"]),
        helper.make_node("Mul", ["sums", "sums"], ["more"]),
        helper.make_node("Sub", ["more", "squares"], ["y"]),
    ]
    source = model_of(nodes, [info("x", (500,), element)], [info("y", None, element)], opset=22)
    x = np.linspace(0.1, 3, 500).astype(helper.tensor_dtype_to_np_dtype(element))
    squares = x * x
    wanted = (squares + x) * (squares + x) - squares
    model = transmuter.load(source, compute_type=None)
    for call in (lambda x: transmuter.run(model, x), transmuter.compile(model)):
        np.testing.assert_array_equal(np.asarray(call({"x": x})["y"]), wanted)
    gradient = jax.grad(lambda x: jnp.sum(transmuter.compile(model)({"x": x})["y"]))(jnp.asarray(x))
    exact = x.astype(np.float64)
    np.testing.assert_allclose(gradient.astype(np.float32), 2 * (exact**2 + exact) * (2 * exact + 1) - 2 * exact, 0.05)


def test_a_graph_without_bfloat16_weights_keeps_the_type() -> None:
    element, third = TensorProto.BFLOAT16, np.float32(1 / 3)
    nodes = [
        helper.make_node("Cast", ["x"], ["half"], to=element),
        helper.make_node("Cast", ["half"], ["y"], to=TensorProto.FLOAT),
    ]
    model = transmuter.load(model_of(nodes, [info("x", (1,))], [info("y", (1,))]))
    for call in (lambda x: transmuter.run(model, x), transmuter.compile(model)):
        y = np.asarray(call({"x": np.array([third])})["y"])
        assert y == third.astype(helper.tensor_dtype_to_np_dtype(element)).astype(np.float32) != third


def test_tables_of_64_bit_integers_inside_a_callers_jit() -> None:
    """A table above 1024 elements is a buffer; with x64 off it is narrowed where it fits."""
    table = np.arange(2000, dtype=np.int64)
    nodes = [helper.make_node("Gather", ["table", "i"], ["g"]), helper.make_node("Add", ["g", "i"], ["y"])]
    small, large = (
        transmuter.load(
            model_of(
                nodes,
                [info("i", ("n",), TensorProto.INT64)],
                [info("y", None, TensorProto.INT64)],
                constants(table=table + offset),
            )
        )
        for offset in (0, 2**40)
    )
    i = np.array([3, 1999])
    np.testing.assert_array_equal(jax.jit(lambda i: small.apply({}, {"i": i})["y"])(i), 2 * i)
    np.testing.assert_array_equal(small.apply({}, {"i": i})["y"], 2 * i)
    for call in (jax.jit(lambda i: large.apply({}, {"i": i})), lambda i: large.apply({}, {"i": i})):
        with pytest.raises(transmuter.InputError, match=r"'table'.*1099511627776.*jax_enable_x64"):
            call(i)
    with pytest.raises(transmuter.InputError, match=r"'i'.*1099511627776"):
        small.apply({}, {"i": np.array([2**40])})
    np.testing.assert_array_equal(transmuter.compile(large)({"i": i})["y"], 2 * i + 2**40)


def test_products_are_of_full_precision_unless_the_caller_relaxes_it() -> None:
    weights = constants(w=np.ones((8, 8), np.float32))
    model = transmuter.load(
        model_of([helper.make_node("MatMul", ["x", "w"], ["y"])], [info("x", (2, 8))], [info("y", None)], weights)
    )
    traced = lambda: str(jax.make_jaxpr(lambda x: model.apply(model.params, {"x": x}))(X))
    assert "HIGHEST" in traced()
    with jax.default_matmul_precision("bfloat16"):
        assert "HIGHEST" not in traced()
