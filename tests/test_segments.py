"""Compiled models: signatures, breaks, prepared weights, transforms around them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from building import info, model_of
from onnx import TensorProto, helper, numpy_helper

import transmuter
from transmuter import GraphBreakError

RNG = np.random.default_rng(0)
W = RNG.standard_normal((8, 8)).astype(np.float32)
X = RNG.standard_normal((4, 8)).astype(np.float32)


def plain() -> transmuter.Model:
    """Two products with a Tanh between them: no break."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Tanh", ["h"], ["t"]),
        helper.make_node("Gemm", ["t", "w2"], ["y"], transB=1),
    ]
    weights = [numpy_helper.from_array(W, "w"), numpy_helper.from_array(W * 0.5, "w2")]
    return transmuter.load(model_of(nodes, [info("x", ("n", 8))], [info("y", None)], weights))


def breaking() -> transmuter.Model:
    """`nonzero(x @ w > 0)` decides a shape in the middle; the rest reverses those elements and takes a product."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Tanh", ["h"], ["t"]),
        helper.make_node("Greater", ["t", "zero"], ["positive"]),
        helper.make_node("NonZero", ["positive"], ["places"], name="places"),
        helper.make_node("Transpose", ["places"], ["indices"], perm=[1, 0]),
        helper.make_node("GatherND", ["t", "indices"], ["picked"]),
        # only this needs to know how many there are
        helper.make_node("Slice", ["picked", "minus", "least", "axis", "minus"], ["reversed"], name="reverse"),
        helper.make_node("Mul", ["reversed", "reversed"], ["squares"]),
        helper.make_node("ReduceSum", ["squares"], ["s"], keepdims=0),
        helper.make_node("MatMul", ["t", "w2"], ["u"]),
        helper.make_node("Mul", ["u", "s"], ["y"]),
    ]
    weights = [
        numpy_helper.from_array(W, "w"),
        numpy_helper.from_array(W * 0.5, "w2"),
        numpy_helper.from_array(np.float32(0), "zero"),
        numpy_helper.from_array(np.array([-1]), "minus"),
        numpy_helper.from_array(np.array([-1000]), "least"),
        numpy_helper.from_array(np.array([0]), "axis"),
    ]
    return transmuter.load(model_of(nodes, [info("x", ("n", 8))], [info("y", None)], weights))


def reference(params: dict, x: jax.Array) -> jax.Array:
    t = jnp.tanh(jnp.matmul(x, params["w"], precision="highest"))
    s = jnp.sum(jnp.where(t > 0, t, 0) ** 2)
    return jnp.matmul(t, params["w2"], precision="highest") * s


# ---- signatures ----------------------------------------------------------------------------------------------------


def test_new_shapes_compile_and_known_ones_do_not() -> None:
    compiled = transmuter.compile(plain(), {"x": X})
    for rows, misses in ((4, 1), (4, 1), (2, 2), (4, 2), (2, 2)):
        assert compiled(X[:rows])["y"].shape == (rows, 8)
        assert compiled.cache_info().misses == misses
    assert compiled.cache_info().hits == 4
    info = compiled.cache_info().segments[0]
    assert info.signature == "x float32[4, 8]"
    assert info.trace_seconds > 0
    assert info.compile_seconds > 0


def test_the_cache_forgets_what_was_used_least_recently() -> None:
    compiled = transmuter.compile(plain(), cache_size=2)
    for rows in (1, 2, 1, 3, 1, 2):
        compiled(X[:rows])
    assert (compiled.cache_info().misses, compiled.cache_info().evictions) == (4, 2)
    compiled.cache_clear()
    assert compiled.cache_info().segments == ()
    assert compiled(X)["y"].shape == (4, 8)
    with pytest.raises(ValueError, match="cache_size"):
        transmuter.compile(plain(), cache_size=0)


def test_an_input_that_decides_a_shape_enters_the_signature_by_itself() -> None:
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["y"])]
    model = transmuter.load(
        model_of(nodes, [info("x", (4, 8)), info("shape", (None,), TensorProto.INT64)], [info("y", None)])
    )
    compiled = transmuter.compile(model)
    for shape in ([8, 4], [2, -1], [8, 4]):
        wanted = X.reshape(shape)
        assert compiled({"x": X, "shape": np.array(shape)})["y"].shape == wanted.shape
    assert compiled.cache_info().misses == 2
    assert len({s.stage.depth for s in compiled.segments}) == 1
    assert "shape = [8, 4]" in str(compiled.explain())


def branching() -> onnx.ModelProto:
    branches = {
        "then_branch": helper.make_graph([helper.make_node("Relu", ["x"], ["r"])], "t", [], [info("r", None)]),
        "else_branch": helper.make_graph(
            [helper.make_node("Concat", ["x", "x"], ["r"], axis=0)], "e", [], [info("r", None)]
        ),
    }
    return model_of(
        [helper.make_node("If", ["flag"], ["y"], name="choice", **branches)],
        [info("x", ("n", 8)), info("flag", (), TensorProto.BOOL)],
        [info("y", None)],
    )


def test_a_flag_that_decides_a_branch_enters_the_signature() -> None:
    compiled = transmuter.compile(transmuter.load(branching()))
    for flag in (True, False, True, False):
        y = compiled({"x": X, "flag": np.array(flag)})["y"]
        np.testing.assert_array_equal(y, np.maximum(X, 0) if flag else np.concatenate([X, X]))
    assert compiled.cache_info().misses == 2
    assert all(not s.breaks for s in compiled.segments)


def test_a_branch_that_data_decides_is_compiled_after_the_break() -> None:
    proto = branching()
    proto.graph.node.insert(0, helper.make_node("Greater", ["m", "zero"], ["flag"]))
    proto.graph.node.insert(0, helper.make_node("ReduceMax", ["x"], ["m"], keepdims=0))
    del proto.graph.input[1]
    proto.graph.initializer.append(numpy_helper.from_array(np.float32(0), "zero"))
    compiled = transmuter.compile(transmuter.load(proto))
    for x in (X, -abs(X), X):
        y = compiled({"x": x})["y"]
        np.testing.assert_array_equal(y, np.maximum(x, 0) if x.max() > 0 else np.concatenate([x, x]))
    assert [s.stage.depth for s in compiled.segments] == [0, 1, 1]
    assert compiled.explain().breaks[0].operator == "If"


# ---- breaks --------------------------------------------------------------------------------------------------------


def test_a_break_in_the_middle() -> None:
    model = breaking()
    compiled = transmuter.compile(model, {"x": X})
    np.testing.assert_allclose(compiled(X)["y"], reference(model.params, X), rtol=1e-4, atol=1e-5)
    first = compiled.segments[0]
    assert [b.operator for b in compiled.explain().breaks] == ["Slice"]
    assert first.nodes == 7, "what does not depend on the break runs before it"
    assert compiled.explain().breaks[0].node == "reverse"
    np.testing.assert_allclose(transmuter.run(model, {"x": X})["y"], reference(model.params, X), rtol=1e-4, atol=1e-5)


def test_as_many_elements_at_other_places_do_not_recompile() -> None:
    compiled = transmuter.compile(breaking(), {"x": X})
    misses = compiled.cache_info().misses
    flipped = np.ascontiguousarray(X[::-1])  # the same rows, so as many positive elements
    np.testing.assert_allclose(compiled(flipped)["y"], reference(compiled.model.params, flipped), rtol=1e-4, atol=1e-5)
    assert compiled.cache_info().misses == misses


@pytest.mark.parametrize("x64", [False, True])
def test_gradients_flow_through_a_break(x64: bool) -> None:
    with jax.enable_x64(x64):
        model = breaking()
        compiled = transmuter.compile(model)
        params = model.params

        def loss(params: dict, x: jax.Array) -> jax.Array:
            return jnp.sum(compiled({"x": x}, params=params)["y"] ** 2)

        def expected(params: dict, x: jax.Array) -> jax.Array:
            return jnp.sum(reference(params, x) ** 2)

        grads = jax.grad(loss, argnums=(0, 1))(params, jnp.asarray(X))
        wanted = jax.grad(expected, argnums=(0, 1))(params, jnp.asarray(X))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4), grads, wanted)
        through_own = jax.grad(lambda x: jnp.sum(compiled({"x": x})["y"] ** 2))(jnp.asarray(X))
        np.testing.assert_allclose(through_own, wanted[1], rtol=2e-3, atol=2e-4)
        value, _ = jax.value_and_grad(loss)(params, jnp.asarray(X))
        np.testing.assert_allclose(value, expected(params, jnp.asarray(X)), rtol=1e-4)


def test_a_break_that_a_transform_hides_is_named() -> None:
    model = breaking()
    compiled = transmuter.compile(model)
    for call in (
        jax.jit(lambda x: model.apply(model.params, {"x": x})),
        jax.jit(lambda x: compiled({"x": x})),
        lambda x: jax.vmap(lambda row: model.apply(model.params, {"x": row})["y"])(x[None]),
    ):
        with pytest.raises(
            GraphBreakError, match=r"'reverse' \(Slice\) needs to know how long its operand 'data' is"
        ) as caught:
            call(jnp.asarray(X))
        assert caught.value.operator == "Slice"
        assert any("GatherND" in step for step in caught.value.origin)
    with pytest.raises(GraphBreakError, match=r"How long 'picked' is"):
        jax.vmap(lambda row: compiled({"x": row})["y"])(jnp.asarray(X)[None])


def test_strings_run_between_segments() -> None:
    nodes = [
        helper.make_node(
            "LabelEncoder",
            ["s"],
            ["i"],
            domain="ai.onnx.ml",
            keys_strings=["a", "b"],
            values_int64s=[1, 0],
            default_int64=2,
        ),
        helper.make_node("Gather", ["w", "i"], ["e"]),
        helper.make_node("MatMul", ["e", "w"], ["y"]),
    ]
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", 4)]
    model = transmuter.load(
        model_of(
            nodes,
            [info("s", (None,), TensorProto.STRING)],
            [info("y", None)],
            [numpy_helper.from_array(W, "w")],
            opset_imports=imports,
        )
    )
    compiled = transmuter.compile(model)
    for words, rows in ((["a", "b"], [1, 0]), (["b", "z"], [0, 2]), (["a"], [1])):
        for call in (compiled, lambda x: transmuter.run(model, x)):
            np.testing.assert_allclose(call({"s": np.array(words)})["y"], W[rows] @ W, rtol=1e-4, atol=1e-5)
    assert max(s.stage.depth for s in compiled.segments) == 1


# ---- weights -------------------------------------------------------------------------------------------------------


def test_no_weight_is_a_constant_of_an_executable() -> None:
    model = plain()
    compiled = transmuter.compile(model, {"x": X})
    [segment] = compiled.segments
    for own in (True, False):
        executable = segment.executable(own_params=own)
        values = [jax.ShapeDtypeStruct(np.shape(v), np.float32) for v in (W, W)]
        assert len(executable.weights) == 2
        text = executable.function.lower(values, [jax.ShapeDtypeStruct((4, 8), np.float32)]).as_text()
        assert "dense<" not in text or max(len(line) for line in text.splitlines() if "dense<" in line) < 200


def convolution() -> transmuter.Model:
    kernel = RNG.standard_normal((16, 4, 3, 3)).astype(np.float32)
    nodes = [helper.make_node("Conv", ["x", "k", "b"], ["y"], pads=[1, 1, 1, 1])]
    weights = [
        numpy_helper.from_array(kernel, "k"),
        numpy_helper.from_array(np.arange(20, dtype=np.float32)[:16] + kernel[:, 0, 0, 0], "b"),
    ]
    return transmuter.load(model_of(nodes, [info("x", ("n", 4, None, None))], [info("y", None)], weights))


def test_prepared_weights_replace_the_originals_until_somebody_asks() -> None:
    model = convolution()
    before = {name: np.array(p) for name, p in convolution_params(model).items()}
    compiled = transmuter.compile(model)
    x = RNG.standard_normal((2, 4, 6, 6)).astype(np.float32)
    first = compiled(x)["y"]
    np.testing.assert_allclose(first, transmuter.run(model, {"x": x})["y"], rtol=1e-4, atol=1e-5)
    for name, array in model.params.items():
        np.testing.assert_array_equal(array, before[name])
    np.testing.assert_allclose(compiled({"x": x}, params=model.params)["y"], first, rtol=1e-4, atol=1e-5)
    shorter = compiled(x[:1])["y"]
    np.testing.assert_allclose(shorter, first[:1], rtol=1e-4, atol=1e-5)


def convolution_params(model: transmuter.Model) -> dict[str, jax.Array]:
    return model.params


def test_given_params_are_used() -> None:
    model = plain()
    compiled = transmuter.compile(model, {"x": X})
    doubled = {name: p * 2 for name, p in model.params.items()}
    expected = model.apply(doubled, {"x": X})["y"]
    np.testing.assert_allclose(compiled({"x": X}, params=doubled)["y"], expected, rtol=1e-5)
    assert not np.allclose(compiled({"x": X})["y"], expected)


# ---- transforms around it ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("x64", [False, True])
def test_jit_grad_checkpoint_and_vmap_around_a_compiled_model(x64: bool) -> None:
    with jax.enable_x64(x64):
        model = plain()
        compiled = transmuter.compile(model)
        x, params = jnp.asarray(X), model.params
        expected = np.asarray(compiled({"x": x})["y"])
        call = lambda x, params: compiled({"x": x}, params=params)["y"]
        np.testing.assert_allclose(jax.jit(lambda x: compiled({"x": x})["y"])(x), expected, rtol=1e-5)
        np.testing.assert_allclose(jax.jit(call)(x, params), expected, rtol=1e-5)
        loss = lambda params: jnp.sum(call(x, params) ** 2)
        wanted = jax.grad(lambda params: jnp.sum(model.apply(params, {"x": x})["y"] ** 2))(params)
        for grad in (jax.grad(loss), jax.jit(jax.grad(loss)), jax.grad(jax.checkpoint(loss))):
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), grad(params), wanted)
        rows = jax.vmap(lambda row: call(row[None], params)[0])(x)
        np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=1e-6)


def test_the_x64_flag_is_left_alone() -> None:
    for flag in (False, True):
        with jax.enable_x64(flag):
            model = plain()
            transmuter.run(model, {"x": X})
            transmuter.compile(model, {"x": X})(X)
            assert jax.config.jax_enable_x64 is flag


# ---- randomness, threads -------------------------------------------------------------------------------------------


def test_random_operators_draw_anew_with_each_call_and_repeat_with_a_seed() -> None:
    nodes = [helper.make_node("RandomUniformLike", ["x"], ["y"])]
    proto = model_of(nodes, [info("x", ("n", 8))], [info("y", None)])
    compiled, again = transmuter.compile(transmuter.load(proto)), transmuter.compile(transmuter.load(proto))
    other = transmuter.compile(transmuter.load(proto, seed=1))
    draws = [np.asarray(compiled(X)["y"]) for _ in range(3)]
    assert not np.allclose(draws[0], draws[1])
    for draw in draws:
        np.testing.assert_array_equal(again(X)["y"], draw)
    assert not np.allclose(other(X)["y"], draws[0])
    key = jax.random.key(3)
    np.testing.assert_array_equal(compiled({"x": X}, key=key)["y"], compiled({"x": X}, key=key)["y"])
    assert compiled.cache_info().misses == 1
    assert not np.allclose(*(transmuter.run(compiled.model, {"x": X}, key=jax.random.key(k))["y"] for k in (0, 1)))


def test_many_threads_compile_each_signature_once() -> None:
    model = plain()
    compiled = transmuter.compile(model)
    wanted = {rows: np.asarray(transmuter.run(model, {"x": X[:rows]})["y"]) for rows in (1, 2, 3, 4)}
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for rows in np.random.default_rng(seed).integers(1, 5, 10):
                np.testing.assert_allclose(compiled(X[:rows])["y"], wanted[rows], rtol=1e-4, atol=1e-5)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert compiled.cache_info().misses == 4


def test_two_calls_of_a_random_function_draw_different_numbers() -> None:
    """The function imports another opset than the model, so it is not inlined."""
    body = [helper.make_node("RandomUniformLike", ["a"], ["b"])]
    function = helper.make_function("local", "R", ["a"], ["b"], body, [helper.make_opsetid("", 17)])
    proto = model_of(
        [helper.make_node("R", ["x"], ["y"], domain="local"), helper.make_node("R", ["x"], ["z"], domain="local")],
        [info("x", ("n", 8))],
        [info("y", None), info("z", None)],
        opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("local", 1)],
        functions=[function],
    )
    model = transmuter.load(proto)
    for outputs in (transmuter.run(model, {"x": X}), transmuter.compile(model)(X)):
        assert not np.allclose(outputs["y"], outputs["z"])


# ---- awkward combinations ------------------------------------------------------------------------------------------


def test_a_data_dependent_branch_that_captures_strings() -> None:
    branches = {
        f"{b}_branch": helper.make_graph(
            [helper.make_node("StringConcat", ["s", "s"] if b == "then" else ["s", "t"], ["r"])],
            b,
            [],
            [info("r", None, TensorProto.STRING)],
        )
        for b in ("then", "else")
    }
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["m"], keepdims=0),
        helper.make_node("Greater", ["m", "zero"], ["flag"]),
        helper.make_node("If", ["flag"], ["y"], **branches),
    ]
    inputs = [info("x", ("n", 8)), info("s", (None,), TensorProto.STRING), info("t", (None,), TensorProto.STRING)]
    outputs = [info("y", None, TensorProto.STRING), info("s", (None,), TensorProto.STRING)]
    zero = numpy_helper.from_array(np.float32(0), "zero")
    model = transmuter.load(model_of(nodes, inputs, outputs, [zero], opset=20))
    compiled = transmuter.compile(model)
    for x, y in ((X, "aa"), (-abs(X), "ab")):
        for call in (compiled, lambda inputs: transmuter.run(model, inputs)):
            results = call({"x": x, "s": ["a"], "t": ["b"]})
            assert results["y"].tolist() == [y]
            assert results["s"].tolist() == ["a"]


def test_vmap_over_what_decides_a_shape_is_named() -> None:
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["y"])]
    model = transmuter.load(
        model_of(nodes, [info("x", (4, 8)), info("shape", (None,), TensorProto.INT64)], [info("y", None)])
    )
    compiled = transmuter.compile(model)
    compiled({"x": X, "shape": np.array([8, 4])})
    with pytest.raises(GraphBreakError, match="'shape' decides a shape"):
        jax.vmap(lambda shape: compiled({"x": X, "shape": shape})["y"])(jnp.array([[8, 4], [4, 8]]))


def test_what_a_jit_around_bakes_in_is_warned_of_once() -> None:
    weight = numpy_helper.from_array(np.zeros((2048, 2100), np.float32), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    compiled = transmuter.compile(transmuter.load(model_of(nodes, [info("x", (1, 2048))], [info("y", None)], [weight])))
    call = jax.jit(lambda x: compiled({"x": x})["y"])
    with pytest.warns(UserWarning, match="16 MiB of the model's weights become constants"):
        call(jnp.ones((1, 2048)))
    call(jnp.zeros((1, 2048)))


@pytest.mark.parametrize("size", [3, 17])
def test_small_float_inputs_keep_their_gradient_through_a_break(size: int) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("NonZero", ["r"], ["places"]),
        helper.make_node("Transpose", ["places"], ["indices"], perm=[1, 0]),
        helper.make_node("GatherND", ["r", "indices"], ["y"]),
    ]
    model = transmuter.load(model_of(nodes, [info("x", (None,))], [info("y", None)]))
    compiled = transmuter.compile(model)
    x = jnp.asarray(RNG.standard_normal(size).astype(np.float32))
    grad = jax.grad(lambda x: jnp.sum(compiled({"x": x})["y"] ** 2))(x)
    np.testing.assert_allclose(grad, 2 * np.maximum(x, 0), rtol=1e-5)
    misses = compiled.cache_info().misses
    compiled({"x": x * 2})
    assert compiled.cache_info().misses == misses


def test_a_table_of_integers_decides_shapes() -> None:
    """Up to 1024 integers are known values, however they were stored."""
    table = numpy_helper.from_array(np.arange(20, dtype=np.int64), "table")
    bounds = [numpy_helper.from_array(np.array([n]), name) for n, name in ((4, "four"), (5, "five"), (8, "eight"))]
    nodes = [
        helper.make_node("Slice", ["table", "four", "five"], ["rows"]),
        helper.make_node("Concat", ["rows", "eight"], ["shape"], axis=0),
        helper.make_node("Reshape", ["x", "shape"], ["y"]),
    ]
    model = transmuter.load(
        model_of(nodes, [info("x", (None,))], [info("y", None)], [table, *bounds]).SerializeToString()
    )
    assert model.buffers == {}
    y = jax.jit(lambda x: model.apply({}, {"x": x})["y"])(jnp.zeros(32))
    assert y.shape == (4, 8)


def test_a_lowering_that_is_registered_late_is_found() -> None:
    nodes = [helper.make_node("Swirl", ["x"], ["y"], domain="com.late")]
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.late", 1)]
    proto = model_of(nodes, [info("x", ("n", 8))], [info("y", None)], opset_imports=imports)
    model = transmuter.load(proto)
    with pytest.raises(transmuter.UnsupportedOperatorError):
        transmuter.run(model, {"x": X})
    for factor in (2.0, 3.0):  # as a notebook's cell does that runs twice

        @transmuter.lowering.operator(domain="com.late")
        def Swirl(x, *, factor=factor):
            return x * factor

        np.testing.assert_allclose(transmuter.run(transmuter.load(proto), {"x": X})["y"], X * factor)
    np.testing.assert_allclose(transmuter.run(model, {"x": X})["y"], X * 3)
    with pytest.raises(ValueError, match=r"ai\.onnx::Tile from version 6 already has a lowering"):
        transmuter.lowering.operator("Tile_6")(Swirl)


def test_models_say_that_they_cannot_be_pickled() -> None:
    model = plain()
    for thing in (model, transmuter.compile(model)):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copy.deepcopy(thing)


def test_inputs_in_order() -> None:
    compiled = transmuter.compile(plain(), [X])
    expected = np.asarray(compiled({"x": X})["y"])
    for result in (compiled(X), compiled([X]), compiled((X,))):
        np.testing.assert_array_equal(result["y"], expected)


def test_a_static_input_that_is_differentiated_is_refused() -> None:
    nodes = [helper.make_node("Mul", ["x", "s"], ["y"])]
    model = transmuter.load(model_of(nodes, [info("x", (3,)), info("s", ())], [info("y", None)]))
    compiled = transmuter.compile(model, static_inputs=["s"])
    x, s = jnp.ones(3), jnp.float32(3)
    np.testing.assert_allclose(jax.grad(lambda x: compiled({"x": x, "s": s})["y"].sum())(x), [3, 3, 3])
    with pytest.raises(transmuter.InputError, match="'s' is static and is being differentiated"):
        jax.grad(lambda s: compiled({"x": x, "s": s})["y"].sum())(s)
    with pytest.raises(transmuter.InputError, match="list of names"):
        transmuter.compile(model, static_inputs="s")


def test_a_sequence_of_strings_may_become_empty() -> None:
    nodes = [helper.make_node("SequenceErase", ["s", "zero"], ["t"]), helper.make_node("SequenceLength", ["t"], ["l"])]
    sequence = helper.make_tensor_sequence_value_info("s", TensorProto.STRING, None)
    zero = numpy_helper.from_array(np.int64(0), "zero")
    model = transmuter.load(model_of(nodes, [sequence], [info("l", (), TensorProto.INT64)], [zero]))
    compiled = transmuter.compile(model)
    for count in (1, 3, 1, 2):
        assert int(compiled({"s": [np.array(["a"])] * count})["l"]) == count - 1


def test_an_optional_input_may_be_absent_later() -> None:
    branches = {
        "then_branch": helper.make_graph(
            [
                helper.make_node("OptionalGetElement", ["o"], ["q"]),
                helper.make_node("NonZero", ["q"], ["places"]),
                helper.make_node("Squeeze", ["places"], ["flat"]),
                helper.make_node("Gather", ["q", "flat"], ["u"]),
            ],
            "present",
            [],
            [info("u", None, TensorProto.INT64)],
        ),
        "else_branch": helper.make_graph(
            [helper.make_node("Constant", [], ["v"], value_ints=[3])],
            "absent",
            [],
            [info("v", None, TensorProto.INT64)],
        ),
    }
    nodes = [helper.make_node("OptionalHasElement", ["o"], ["has"]), helper.make_node("If", ["has"], ["y"], **branches)]
    kind = helper.make_optional_type_proto(helper.make_tensor_type_proto(TensorProto.INT64, ["n"]))
    model = transmuter.load(model_of(nodes, [helper.make_value_info("o", kind)], [info("y", None, TensorProto.INT64)]))
    compiled = transmuter.compile(model)
    for given, expected in (
        (np.arange(4), [1, 2, 3]),
        (None, [3]),
        (np.arange(40), list(range(1, 40))),
        (np.arange(2), [1]),
    ):
        np.testing.assert_array_equal(compiled({"o": given})["y"], expected)


def test_a_small_input_does_not_make_large_ones_static() -> None:
    nodes = [
        helper.make_node("NonZero", ["x"], ["places"]),
        helper.make_node("Squeeze", ["places"], ["flat"]),
        helper.make_node("Gather", ["x", "flat"], ["y"]),
    ]
    model = transmuter.load(
        model_of(nodes, [info("x", (None,), TensorProto.INT64)], [info("y", None, TensorProto.INT64)])
    )
    compiled = transmuter.compile(model, {"x": np.arange(4)})
    compiled({"x": np.arange(1000)})
    misses = compiled.cache_info().misses
    for shift in (1000, 2000, 3000):
        compiled({"x": np.roll(np.arange(1000), shift // 10)})
    assert compiled.cache_info().misses == misses


def test_shard_map_around_a_compiled_model() -> None:
    model = plain()
    compiled = transmuter.compile(model)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), "a")
    spec = jax.sharding.PartitionSpec("a")
    expected = np.asarray(compiled(X)["y"])
    for call in (lambda x: compiled({"x": x})["y"], lambda x: compiled({"x": x}, params=model.params)["y"]):
        sharded = jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec)
        np.testing.assert_allclose(sharded(jnp.asarray(X)), expected, rtol=1e-5)
        np.testing.assert_allclose(jax.jit(sharded)(jnp.asarray(X)), expected, rtol=1e-5)


def test_keys() -> None:
    proto = model_of([helper.make_node("RandomNormalLike", ["x"], ["y"])], [info("x", ("n", 8))], [info("y", None)])
    model = transmuter.load(proto)
    compiled = transmuter.compile(model)
    np.testing.assert_array_equal(compiled(X)["y"], transmuter.run(model, {"x": X})["y"])
    typed, raw = jax.random.key(1), jax.random.PRNGKey(1)
    expected = np.asarray(model.apply({}, {"x": X}, key=typed)["y"])
    for key in (typed, raw):
        for call in (
            lambda key: compiled({"x": X}, key=key)["y"],
            jax.jit(lambda key: compiled({"x": X}, key=key)["y"]),
            lambda key: model.apply({}, {"x": X}, key=key)["y"],
            lambda key: transmuter.run(model, {"x": X}, key=key)["y"],
        ):
            np.testing.assert_allclose(call(key), expected, rtol=1e-6)
    for wrong in (3, "key", np.ones(2, np.float32)):
        with pytest.raises(transmuter.InputError, match="random key"):
            compiled({"x": X}, key=wrong)


def test_results_are_jax_arrays_on_every_way() -> None:
    nodes = [helper.make_node("Shape", ["x"], ["shape"]), helper.make_node("NonZero", ["x"], ["places"])]
    outputs = [info(name, None, TensorProto.INT64) for name in ("shape", "places")]
    model = transmuter.load(model_of(nodes, [info("x", ("n", 8))], outputs))
    for results, dtype in (
        (transmuter.run(model, {"x": X}), np.int64),
        (transmuter.compile(model)(X), np.int64),
        (model.apply({}, {"x": X}), np.int32),
    ):
        assert all(isinstance(y, jax.Array) and y.dtype == dtype for y in results.values())


@pytest.mark.parametrize(
    "params", [{"w": W.tolist(), "w2": W}, {"w": W.astype(complex), "w2": W}, {"w": W.astype(int), "w2": W}, [W, W]]
)
def test_params_that_are_no_float_arrays_are_refused(params: object) -> None:
    model = plain()
    for call in (lambda: transmuter.compile(model)({"x": X}, params=params), lambda: model.apply(params, {"x": X})):
        with pytest.raises(transmuter.InputError, match="param"):
            call()


@pytest.mark.parametrize("op", ["Compress", "Unique"])
def test_gradients_through_a_break_raise_no_warning_with_x64_off(op: str) -> None:
    nodes = [helper.make_node("Greater", ["x", "zero"], ["g"]), helper.make_node("Compress", ["x", "g"], ["y"])]
    if op == "Unique":
        nodes = [helper.make_node("Unique", ["x"], ["y"])]
    zero = numpy_helper.from_array(np.float32(0), "zero")
    model = transmuter.load(model_of(nodes, [info("x", (None,))], [info("y", None)], [zero]))
    compiled = transmuter.compile(model)
    x = jnp.asarray(RNG.standard_normal(19).astype(np.float32))
    wanted = 2 * x * (x > 0) if op == "Compress" else 2 * x
    np.testing.assert_allclose(jax.grad(lambda x: jnp.sum(compiled({"x": x})["y"] ** 2))(x), wanted, rtol=1e-5)


# ---- bodies of loops that run between segments ----------------------------------------------------------------------

BODY = """<ir_version: 8, opset_import: ["" : 18]>
    main (int64 n, ELEMENT[k] x, ELEMENT[j] grown) => (ELEMENT[k] y, ELEMENT[m] h)
    <bool true = {1}, ELEMENT[4] w = {1, 2, 3, 4}> {
  y, last, h = Loop (n, true, x, grown) <body = b (int64 i, bool c, ELEMENT[k] v, ELEMENT[l] g)
      => (bool d, ELEMENT[k] u, ELEMENT[o] f, ELEMENT r) {
    d = Identity (c)
    places = NonZero (v)
    indices = Transpose (places)
    picked = GatherND (v, indices)
    shares = Softmax<axis = 0> (picked)
    r = ReduceMax<keepdims = 0> (shares)
    scaled = Mul (v, w)
    f = GROWTH
    total = ReduceSum<keepdims = 0> (f)
    sum = Add (total, r)
    moved = Add (scaled, sum)
    u = Sin (moved)
  }>
}"""


def looping(growth: str = "Identity (g)", element: str = "float") -> transmuter.Model:
    text = BODY.replace("ELEMENT", element).replace("GROWTH", growth)
    return transmuter.load(onnx.parser.parse_model(text), trainable=True)


def loop_inputs(n: int, dtype: str = "float32") -> dict[str, np.ndarray]:
    return {"n": np.array(n), "x": np.array([0, 1, 0, 2], dtype), "grown": np.ones(2, dtype)}


@pytest.mark.parametrize(("element", "dtype"), [("float", "float32"), ("float16", "float16")])
def test_the_body_of_a_loop_that_breaks_is_compiled(element: str, dtype: str) -> None:
    model = looping(element=element)
    compiled = transmuter.compile(model)
    for n in (1, 20, 20):
        outputs, wanted = compiled(loop_inputs(n, dtype)), transmuter.run(model, loop_inputs(n, dtype))
        for name in wanted:
            np.testing.assert_allclose(
                outputs[name], wanted[name], rtol=1e-3 if dtype == "float16" else 1e-5, atol=1e-6
            )
    assert {b.operator for b in compiled.explain().breaks} == {"Loop"}
    [body] = compiled._bodies.values()
    assert body.compiled.cache_info().hits > 2 * body.compiled.cache_info().misses


def test_the_body_of_a_loop_that_grows_is_not_compiled_for_each_size() -> None:
    model = looping("Concat<axis = 0> (g, g)")
    compiled = transmuter.compile(model)
    outputs, wanted = compiled(loop_inputs(4)), transmuter.run(model, loop_inputs(4))
    for name in wanted:
        np.testing.assert_allclose(outputs[name], wanted[name], rtol=1e-5, atol=1e-6)
    [body] = compiled._bodies.values()
    assert not body.compiled.segments


def test_gradients_flow_through_a_compiled_body() -> None:
    model = looping()
    compiled, inputs = transmuter.compile(model), loop_inputs(6)

    def loss(call: Callable[..., Any]) -> Callable[..., jax.Array]:
        return lambda params, x: jnp.sum(call(params, {**inputs, "x": x})["h"])

    ours = jax.grad(loss(lambda params, x: compiled(x, params=params)), (0, 1))(model.params, inputs["x"])
    eager = jax.grad(loss(model.apply), (0, 1))(model.params, inputs["x"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), ours, eager)


def test_contents_in_a_signature_are_the_compiled_models_own() -> None:
    """The caller's array may change later, and JAX may meet it with other settings of x64."""
    nodes = [helper.make_node("Expand", ["x", "shape"], ["e"]), helper.make_node("Cast", ["shape"], ["f"], to=1)]
    nodes += [helper.make_node("ReduceSum", ["f"], ["s"], keepdims=0), helper.make_node("Mul", ["e", "s"], ["y"])]
    inputs = [info("x", (1,)), info("shape", (1,), TensorProto.INT64)]
    compiled = transmuter.compile(transmuter.load(model_of(nodes, inputs, [info("y", None)])))
    x, shape = np.ones(1, np.float32), np.array([3])
    compiled({"x": x, "shape": shape})
    shape[:] = 2
    for size in (2, 3):
        np.testing.assert_array_equal(compiled({"x": x, "shape": np.array([size])})["y"], np.full(size, size))
    shape[:] = 3
    compiled({"x": x, "shape": shape})
    assert jax.jit(lambda n: n + 1)(shape).dtype == np.int32
