"""The rules that call kernels of our own: where they do and where not, and that results stay those without them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import optax
import pytest
from building import info, model_of
from instruction_sets import needs_kernels
from onnx import TensorProto, helper, numpy_helper

import transmuter
from transmuter import native, train
from transmuter.segments.kernels import calling_kernels
from transmuter.train import losses

pytestmark = needs_kernels
PRODUCT, CONVOLUTION, ATTENTION = "transmuter_product", "transmuter_convolution", "transmuter_attention"


def draw(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) / 4).astype(dtype)


def proto(
    nodes: list[onnx.NodeProto],
    inputs: Mapping[str, Any],
    weights: Mapping[str, np.ndarray] | None = None,
    outputs: tuple[str, ...] = ("y",),
    element: int = TensorProto.FLOAT,
) -> onnx.ModelProto:
    return model_of(
        nodes,
        [info(name, shape, element) for name, shape in inputs.items()],
        [info(name, None, element) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
        opset=20,
    )


def node(op: str, operands: str, results: str = "y", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, operands.split(), results.split(), **attributes)


def calls(text: str) -> Counter[str]:
    return Counter(re.findall(r"custom_call @(transmuter_\w+)\(", text))


def calls_of(compiled: transmuter.CompiledModel, inputs: Mapping[str, Any]) -> Counter[str]:
    """The kernels that the compiled model's only segment calls for such inputs."""
    [segment] = compiled.segments
    [executable] = segment.executables
    with jax.enable_x64(True):
        return calls(executable.main.lower(executable.values, list(map(jnp.asarray, inputs.values()))).as_text())


def without_kernels(function: Callable[[], Any]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "available", lambda: False)
        return jax.tree.map(np.asarray, function())


def assert_same(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Equal up to this share of the largest element."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (np.shape(a), a.dtype) == (np.shape(b), b.dtype)
        scale = float(np.max(np.abs(b), initial=0))
        wide = [np.asarray(x).astype(np.complex128) for x in (a, b)]
        np.testing.assert_allclose(*wide, rtol=tolerance, atol=tolerance * scale)


def checked(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray], **options: Any) -> Counter[str]:
    """The kernels that the compiled model calls, after a check of its results."""
    compiled = transmuter.compile(transmuter.load(model, **options))
    actual = compiled(inputs)
    assert_same(actual, without_kernels(lambda: transmuter.compile(transmuter.load(model, **options))(inputs)))
    return calls_of(compiled, inputs)


# ---- products --------------------------------------------------------------------------------------------------------

ROWS = ("n", 40)
X = {"x": draw(100, 40, seed=1)}


@pytest.mark.parametrize("columns", [32, 65])
def test_a_product_by_a_weight(columns):
    assert checked(proto([node("MatMul", "x w")], {"x": ROWS}, {"w": draw(40, columns)}), X) == {PRODUCT: 1}


def test_a_product_by_a_weight_of_one_column():
    checked(proto([node("MatMul", "x w")], {"x": ROWS}, {"w": draw(40, 1)}), {"x": draw(900, 40)})


@pytest.mark.parametrize("rank", [1, 3, 4])
def test_a_stack_of_rows_by_a_weight(rank):
    shape = (2, 3, 50, 40)[-rank:] if rank > 1 else (40,)
    checked(proto([node("MatMul", "x w")], {"x": shape}, {"w": draw(40, 700)}), {"x": draw(*shape)})


def test_a_stack_of_weights():
    found = checked(proto([node("MatMul", "x w")], {"x": (3, 20, 30)}, {"w": draw(3, 30, 17)}), {"x": draw(3, 20, 30)})
    assert found == {PRODUCT: 1}


@pytest.mark.parametrize("attributes", [{"transB": 1}, {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0}])
def test_gemm(attributes):
    x = draw(*((40, 90) if attributes.get("transA") else (90, 40)))
    w = draw(*((50, 40) if attributes.get("transB") else (40, 50)))
    found = checked(proto([node("Gemm", "x w b", **attributes)], {"x": x.shape}, {"w": w, "b": draw(50)}), {"x": x})
    assert found == {PRODUCT: 1}


@pytest.mark.parametrize(
    ("equation", "weight"),
    [("bij,jk->bik", (20, 33)), ("bij,jk->kbi", (20, 33)), ("bij,kj->ikb", (33, 20)), ("bij,ikl->bkl", (30, 9, 11))],
)
def test_einsum(equation, weight):
    checked(
        proto([node("Einsum", "x w", equation=equation)], {"x": (4, 30, 20)}, {"w": draw(*weight)}),
        {"x": draw(4, 30, 20)},
    )


def attention(heads: int, size: int, **shapes: int) -> onnx.ModelProto:
    """Self-attention of heads that are parts of the features, with one weight for queries, keys and values."""
    width = heads * size
    nodes = [node("MatMul", "x w", "qkv"), node("Split", "qkv", "q k v", axis=2, num_outputs=3)]
    for name, order in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        nodes += [node("Reshape", f"{name} split", f"{name}4"), node("Transpose", f"{name}4", f"{name}h", perm=order)]
    nodes += [
        node("MatMul", "qh kh", "scores"),
        node("Softmax", "scores", "shares", axis=-1),
        node("MatMul", "shares vh", "mixed"),
        node("Transpose", "mixed", "back", perm=[0, 2, 1, 3]),
        node("Reshape", "back joined", "wide"),
        node("MatMul", "wide o", "y"),
    ]
    weights = {
        "w": draw(width, 3 * width),
        "o": draw(width, width, seed=2),
        "split": np.array([0, 0, heads, size]),
        "joined": np.array([0, 0, width]),
    }
    return proto(nodes, {"x": ("n", "tokens", width)}, weights)


@pytest.mark.parametrize(("batch", "tokens"), [(1, 50), (3, 130)])
def test_attention(batch, tokens):
    assert checked(attention(3, 20), {"x": draw(batch, tokens, 60)}) == {PRODUCT: 2, ATTENTION: 1}


SOFTMAX = node("Softmax", "s", "p", axis=-1)
MIXED = node("MatMul", "p v")


def attends(*nodes: onnx.NodeProto, stack: tuple[int, ...] = (2, 3), bias: tuple[int, ...] = (), **more: Any) -> bool:
    """Whether nodes, from q, kt, v, and a bias on, call the kernel for attention; it checks what they compute."""
    shapes = {"q": (*stack, 40, 16), "kt": (*stack, 16, 50), "v": (*stack, 50, 24)} | ({"bias": bias} if bias else {})
    feeds = {name: draw(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    weights = {"c": np.float32(4), "halves": draw(1, 16), "drop": np.float32(0.1)}
    return checked(proto(list(nodes), shapes, weights, **more), feeds)[ATTENTION] == 1


@pytest.mark.parametrize("stack", [(2, 3), (5,)])
@pytest.mark.parametrize(
    "nodes",
    [
        [node("MatMul", "q kt", "s")],
        [node("MatMul", "q kt", "r"), node("Div", "r c", "s")],
        [node("MatMul", "q kt", "r"), node("Mul", "c r", "s")],
        [node("Div", "q c", "r"), node("Mul", "r halves", "t"), node("MatMul", "t kt", "s")],
    ],
)
def test_attention_however_it_is_scaled(nodes, stack):
    assert attends(*nodes, SOFTMAX, MIXED, stack=stack)


@pytest.mark.parametrize(
    "bias", [(2, 1, 1, 50), (1, 3, 40, 50), (2, 3, 40, 50), (2, 1, 40, 1), (40, 50), (50,), (3, 1, 1), (1,)]
)
def test_attention_with_a_bias(bias):
    scaled = [node("MatMul", "q kt", "r"), node("Div", "r c", "t")]
    assert attends(*scaled, node("Add", "t bias", "s"), SOFTMAX, MIXED, bias=bias)
    assert attends(node("MatMul", "q kt", "t"), node("Add", "bias t", "s"), SOFTMAX, MIXED, bias=bias)


@pytest.mark.parametrize("outputs", [("y", "s"), ("y", "p"), ("y", "r")])
def test_scores_that_are_needed_elsewhere_stay(outputs):
    nodes = [node("MatMul", "q kt", "r"), node("Div", "r c", "s"), SOFTMAX, MIXED]
    assert not attends(*nodes, outputs=outputs)


@pytest.mark.parametrize(
    "nodes",
    [
        [node("MatMul", "q kt", "s"), node("Softmax", "s", "p", axis=-2), MIXED],
        [node("MatMul", "q kt", "s"), SOFTMAX, node("Mul", "p c", "t"), node("MatMul", "t v")],
        [node("MatMul", "q kt", "r"), node("Tanh", "r", "s"), SOFTMAX, MIXED],
        [node("MatMul", "q kt", "r"), node("Add", "r r", "s"), SOFTMAX, MIXED],
        [node("MatMul", "q kt", "r"), node("Sub", "c r", "s"), SOFTMAX, MIXED],
        [node("MatMul", "q kt", "r"), node("Div", "c r", "s"), SOFTMAX, MIXED],
    ],
)
def test_what_is_no_attention_stays(nodes):
    assert not attends(*nodes)


@pytest.mark.parametrize("stack", [(), (0, 3), (1, 2, 3)])
def test_stacks_that_the_kernel_does_not_know_stay(stack):
    assert not attends(node("MatMul", "q kt", "s"), SOFTMAX, MIXED, stack=stack)


def test_attention_of_few_queries_and_of_other_types_stays():
    nodes = [node("MatMul", "q kt", "s"), SOFTMAX, MIXED]
    few = {"q": (1, 3, 1, 16), "kt": (1, 3, 16, 300), "v": (1, 3, 300, 16)}
    assert not checked(proto(nodes, few), {name: draw(*shape) for name, shape in few.items()})[ATTENTION]
    wide = {"q": (1, 3, 40, 16), "kt": (1, 3, 16, 300), "v": (1, 3, 300, 16)}
    model = proto(nodes, wide, element=TensorProto.DOUBLE)
    assert not checked(model, {name: draw(*shape, dtype=np.float64) for name, shape in wide.items()})[ATTENTION]


def test_an_array_by_its_transpose():
    nodes = [node("Transpose", "x", "t", perm=[1, 0]), node("MatMul", "x t")]
    assert checked(proto(nodes, {"x": ROWS}), X) == {PRODUCT: 1}


def test_an_array_by_itself():
    assert checked(proto([node("MatMul", "x x")], {"x": (40, 40)}), {"x": draw(40, 40)}) == {PRODUCT: 1}


def test_products_of_products_by_way_of_transposes():
    """Each transpose is the end of one product or the source of another, never both."""
    nodes = [
        node("MatMul", "x w", "a"),
        node("Transpose", "a", "t", perm=[1, 0]),
        node("MatMul", "t x", "b"),
        node("Transpose", "b", "u", perm=[1, 0]),
        node("MatMul", "x u", "c"),
        node("MatMul", "t c", "d"),
        node("Transpose", "d", "y", perm=[1, 0]),
    ]
    model = proto(nodes, {"x": ROWS}, {"w": draw(40, 48)}, outputs=("y", "t", "b"))
    assert checked(model, X) == {PRODUCT: 4}


def test_a_weight_on_the_left():
    nodes = [node("Transpose", "x", "t", perm=[1, 0]), node("MatMul", "w t")]
    checked(proto(nodes, {"x": ROWS}, {"w": draw(60, 40)}), X)


def test_weights_that_are_computed_of_others():
    """A product of weights, a scaled one, and one that is no initializer but a constant."""
    nodes = [
        node("MatMul", "w v", "wv"),
        node("MatMul", "x wv", "a"),
        node("Mul", "v scale", "scaled"),
        node("MatMul", "a scaled", "b"),
        node("Constant", "", "k", value=numpy_helper.from_array(draw(40, 9, seed=6), "")),
        node("MatMul", "b k"),
    ]
    weights = {"w": draw(40, 40), "v": draw(40, 40, seed=3), "scale": draw(40, seed=4)}
    assert checked(proto(nodes, {"x": ROWS}, weights), X) == {PRODUCT: 3}


def test_a_weight_that_two_products_share():
    nodes = [node("MatMul", "x w", "a"), node("Sin", "x", "s"), node("MatMul", "s w", "b"), node("Mul", "a b")]
    assert checked(proto(nodes, {"x": ROWS}, {"w": draw(40, 33)}), X) == {PRODUCT: 2}


def test_a_weight_that_is_an_output_too():
    nodes = [node("MatMul", "x w"), node("Identity", "w", "copy"), node("Transpose", "w", "turned", perm=[1, 0])]
    checked(proto(nodes, {"x": ROWS}, {"w": draw(40, 33)}, outputs=("y", "copy", "turned")), X)


@pytest.mark.parametrize("rows", [1, 60])
def test_a_table_that_is_the_last_weight_too(rows):
    nodes = [
        node("Gather", "w rows", "x"),
        node("Transpose", "w", "t", perm=[1, 0]),
        node("MatMul", "x t"),
    ]
    model = model_of(
        nodes,
        [info("rows", ("n",), TensorProto.INT64)],
        [info("y", None)],
        [numpy_helper.from_array(draw(700, 40), "w")],
    )
    checked(model, {"rows": np.arange(rows)})


def test_a_product_that_is_too_small_for_a_call_stays():
    assert not checked(proto([node("MatMul", "x w")], {"x": ROWS}, {"w": draw(40, 5)}), {"x": draw(3, 40)})


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int32])
def test_other_types_stay(dtype):
    x, w = (np.round(8 * draw(*shape)).astype(dtype) for shape in ((100, 40), (40, 64)))
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    assert not checked(
        proto([node("MatMul", "x w")], {"x": ROWS}, {"w": w}, element=element), {"x": x}, compute_type=None
    )


@pytest.mark.parametrize("shape", [(0, 40), (2, 0, 40), (0, 30, 40)])
def test_no_rows(shape):
    checked(
        proto([node("MatMul", "x w")], {"x": (*map(str, range(len(shape) - 1)), 40)}, {"w": draw(40, 64)}),
        {"x": draw(*shape)},
    )


def test_nothing_to_sum():
    checked(proto([node("MatMul", "a b")], {"a": (300, 0), "b": (0, 300)}), {"a": draw(300, 0), "b": draw(0, 300)})


# ---- loops and branches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "gates"), [("LSTM", 4), ("GRU", 3)])
def test_recurrent_networks(op, gates):
    d, hidden, direction = (2, 40, "bidirectional") if op == "LSTM" else (1, 40, "forward")
    weights = {"w": draw(d, gates * hidden, 20), "r": draw(d, gates * hidden, hidden), "b": draw(d, 2 * gates * hidden)}
    model = proto([node(op, "x w r b", hidden_size=hidden, direction=direction)], {"x": (7, 20, 20)}, weights)
    found = checked(model, {"x": draw(7, 20, 20)})
    assert found[PRODUCT] > 0


def test_a_branch_and_a_loop():
    """Products in a body, of what comes from outside of it and of constants in it."""
    value = lambda name, shape=None, element=TensorProto.FLOAT: info(name, shape, element)
    by_weight = helper.make_graph([node("MatMul", "x w", "b")], "then", [], [value("b")])
    scaled = helper.make_graph([node("MatMul", "v w", "b"), node("Relu", "x", "v")][::-1], "else", [], [value("b")])
    body = helper.make_graph(
        [
            node("MatMul", "h w", "g"),
            node("Tanh", "g", "t"),
            node("Identity", "keep", "go"),
        ],
        "body",
        [value("i", (), TensorProto.INT64), value("keep", (), TensorProto.BOOL), value("h", (100, 40))],
        [value("go", (), TensorProto.BOOL), value("t", (100, 40))],
    )
    nodes = [
        node("ReduceSum", "x", "sum", keepdims=0),
        node("Greater", "sum zero", "is_positive"),
        node("If", "is_positive", "h0", then_branch=by_weight, else_branch=scaled),
        node("Loop", "three true h0", "y", body=body),
    ]
    weights = {"w": draw(40, 40), "zero": np.float32(0), "three": np.int64(3), "true": np.bool_(True)}
    model = proto(nodes, {"x": (100, 40)}, {k: np.asarray(v) for k, v in weights.items()})
    for sign in (1, -1):
        assert checked(model, {"x": sign * abs(draw(100, 40))})[PRODUCT] >= 1


# ---- convolutions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "kernel", "attributes"),
    [
        ((2, 16, 12, 13), (20, 16, 3, 3), {"pads": [1, 1, 1, 1]}),
        ((1, 3, 33, 32), (24, 3, 7, 7), {"strides": [2, 2], "pads": [3, 3, 3, 3]}),
        ((2, 12, 15, 14), (40, 12, 3, 2), {"strides": [2, 1], "pads": [0, 2, 1, 0], "dilations": [1, 3]}),
        ((2, 32, 12, 12), (48, 8, 3, 3), {"group": 4}),
        ((2, 48, 20, 20), (48, 1, 3, 3), {"group": 48, "pads": [1, 1, 1, 1]}),
        ((2, 40, 10, 10), (33, 40, 1, 1), {}),
        ((2, 24, 100), (24, 24, 5), {"pads": [2, 2]}),
        ((3, 16, 99), (32, 4, 3), {"strides": [2], "group": 4, "auto_pad": "SAME_UPPER"}),
        ((1, 64, 14, 14), (64, 64, 3, 3), {"pads": [1, 1, 1, 1]}),  # by Winograd's method
    ],
    ids=["plain", "few channels", "asymmetric", "groups", "depthwise", "1x1", "1-D", "1-D groups", "winograd"],
)
def test_a_convolution(shape, kernel, attributes):
    weights = {"w": draw(*kernel), "b": draw(kernel[0])}
    found = checked(
        proto([node("Conv", "x w b", **attributes)], {"x": ("n", *shape[1:])}, weights), {"x": draw(*shape)}
    )
    assert found.total() >= (0 if attributes.get("group", 1) == shape[1] else 1)


@pytest.mark.parametrize(
    "attributes", [{"strides": [2, 2], "pads": [1, 0, 1, 1]}, {"dilations": [2, 1]}, {"group": 2, "strides": [2, 1]}]
)
def test_a_transposed_convolution(attributes):
    model = proto([node("ConvTranspose", "x w", **attributes)], {"x": (2, 16, 9, 8)}, {"w": draw(16, 10, 3, 3)})
    checked(model, {"x": draw(2, 16, 9, 8)})


@pytest.mark.parametrize("stride", [1, 2])
def test_a_kernel_that_is_an_input(stride):
    model = proto([node("Conv", "x w", strides=[stride] * 2)], {"x": (2, 16, 12, 12), "w": (20, 16, 3, 3)})
    assert checked(model, {"x": draw(2, 16, 12, 12), "w": draw(20, 16, 3, 3)}) == {CONVOLUTION: 1}


def test_a_kernel_that_two_convolutions_share():
    nodes = [node("Conv", "x w", "a", pads=[1] * 4), node("Conv", "a w", "y", strides=[2, 2])]
    checked(proto(nodes, {"x": (2, 20, 12, 12)}, {"w": draw(20, 20, 3, 3)}), {"x": draw(2, 20, 12, 12)})


def test_three_spatial_dimensions_stay():
    found = checked(
        proto([node("Conv", "x w")], {"x": (1, 8, 6, 7, 8)}, {"w": draw(9, 8, 3, 3, 3)}), {"x": draw(1, 8, 6, 7, 8)}
    )
    assert not found[CONVOLUTION]


def test_no_images():
    checked(
        proto([node("Conv", "x w")], {"x": ("n", 16, 12, 12)}, {"w": draw(20, 16, 3, 3)}), {"x": draw(0, 16, 12, 12)}
    )


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [32, 33])
def test_packed_weights_are_given_back(columns):
    weights = {"w": draw(40, columns), "v": draw(columns, 40, seed=3), "k": draw(20, 4, 3, 3, seed=4)}
    nodes = [
        node("MatMul", "x w", "a"),
        node("Gemm", "x v", "b", transB=1),
        node("Add", "a b", "y"),
        node("Conv", "images k", "z", group=2),
    ]
    inputs = {"x": ROWS, "images": ("m", 8, 12, 12)}
    model = transmuter.load(proto(nodes, inputs, weights, outputs=("y", "z")))
    compiled = transmuter.compile(model)
    feeds = [{"x": draw(n, 40, seed=n), "images": draw(n % 3 + 1, 8, 12, 12, seed=n)} for n in (1, 100)]
    found = [jax.tree.map(np.asarray, compiled(feed)) for feed in feeds]
    for name, array in weights.items():
        np.testing.assert_array_equal(model.params[name], array, strict=True)
    for feed, actual in zip(feeds, found, strict=True):
        assert_same(actual, jax.tree.map(np.asarray, transmuter.run(model, feed)))
        assert_same(compiled(feed), actual)


def test_a_packed_weight_is_saved_as_it_was(tmp_path):
    model = transmuter.load(proto([node("MatMul", "x w")], {"x": ROWS}, {"w": draw(40, 33)}))
    transmuter.compile(model)(X)
    model.save(tmp_path / "saved.onnx")
    [saved] = onnx.load(tmp_path / "saved.onnx").graph.initializer
    np.testing.assert_array_equal(numpy_helper.to_array(saved), draw(40, 33))


def test_params_of_a_call_are_multiplied_as_they_are():
    model = transmuter.load(proto([node("MatMul", "x w")], {"x": ROWS}, {"w": draw(40, 33)}))
    compiled = transmuter.compile(model)
    doubled = {"w": 2 * model.params["w"]}
    for _ in range(2):
        assert_same(np.asarray(compiled(X, params=doubled)["y"]), np.asarray(2 * transmuter.run(model, X)["y"]))
        assert_same(np.asarray(compiled(X)["y"]), np.asarray(transmuter.run(model, X)["y"]))
    loss = lambda call: lambda params: jnp.sum(jnp.sin(call(params)["y"]))
    by_compiled = jax.grad(loss(lambda params: compiled(X, params=params)))(model.params)
    assert_same(by_compiled, jax.grad(loss(lambda params: model.apply(params, X)))(model.params), 1e-4)


# ---- what a user traces ----------------------------------------------------------------------------------------------


@pytest.fixture(params=["attention", "convolution"], scope="module")
def traced(request: pytest.FixtureRequest) -> tuple[Callable[..., jax.Array], jax.Array, Callable[..., jax.Array]]:
    """A compiled model as a function, after a first call with kernels; an input, and the graph as written."""
    if request.param == "attention":
        model, x = transmuter.load(attention(2, 24)), draw(2, 40, 48)
    else:
        nodes = [node("Conv", "x w", "a", pads=[1] * 4), node("Relu", "a", "r"), node("Conv", "r v", group=2)]
        weights = {"w": draw(20, 8, 3, 3), "v": draw(20, 10, 3, 3)}
        model, x = transmuter.load(proto(nodes, {"x": ("n", 8, 12, 12)}, weights)), draw(2, 8, 12, 12)
    compiled = transmuter.compile(model)
    compiled({"x": x})
    assert calls_of(compiled, {"x": x})
    function = lambda x: compiled({"x": x})["y"]
    return function, jnp.asarray(x), jax.jit(lambda x: transmuter.run(model, {"x": x})["y"])


def test_jit_computes_the_pure_form(traced):
    function, x, as_written = traced
    assert not calls(jax.jit(function).lower(x).as_text())
    assert "cpu_" not in str(jax.make_jaxpr(function)(x))
    assert_same(jax.jit(function)(x), as_written(x))


def test_gradients_are_those_of_the_pure_form(traced):
    function, x, as_written = traced
    weights = draw(*as_written(x).shape, seed=9)
    gradient = lambda function: jax.grad(lambda x: jnp.sum(function(x) * weights))
    actual = gradient(function)(x)
    assert_same(actual, jax.jit(gradient(as_written))(x), 1e-4)
    assert_same(jax.jit(gradient(function))(x), actual, 1e-4)
    assert not calls(jax.jit(gradient(function)).lower(x).as_text())


def test_vmap_maps_the_pure_form(traced):
    function, x, as_written = traced
    stack = jnp.stack([x, 2 * x, -x])
    expected = jnp.stack([as_written(row) for row in stack])
    assert_same(jax.vmap(function)(stack), expected)
    assert not calls(jax.jit(jax.vmap(function)).lower(stack).as_text())


def test_other_transforms_take_the_pure_form(traced):
    function, x, as_written = traced
    slope = lambda function: lambda x: jax.jvp(function, (x,), (jnp.ones_like(x),))
    assert_same(slope(function)(x), jax.jit(slope(as_written))(x), 1e-4)
    both = lambda function: jax.jit(lambda x: jax.lax.map(function, jnp.stack([x, -x])))
    assert_same(both(function)(x), both(as_written)(x))


def test_an_export_has_the_pure_form(traced):
    function, x, as_written = traced
    exported = jax.export.export(jax.jit(function), platforms=["cpu", "cuda"])(x)
    assert not calls(exported.mlir_module())
    assert_same(exported.call(x), as_written(x))


def test_without_jit_too():
    """Each kernel is then called by itself."""
    nodes = [node("MatMul", "x w"), node("Conv", "images k", "z")]
    weights = {"w": draw(40, 33), "k": draw(20, 8, 3, 3)}
    model = proto(nodes, {"x": ROWS, "images": (1, 8, 12, 12)}, weights, outputs=("y", "z"))
    feeds = {**X, "images": draw(1, 8, 12, 12)}
    compiled = transmuter.compile(transmuter.load(model))
    with jax.disable_jit():
        actual = jax.tree.map(np.asarray, compiled(feeds))
    assert_same(actual, jax.tree.map(np.asarray, compiled(feeds)))


# ---- functions that are differentiated no more -----------------------------------------------------------------------

W = jnp.asarray(draw(40, 40, seed=7))
IMAGES = ("NHWC", "HWIO", "NHWC")


@jax.custom_vjp
def with_own_gradient(x: jax.Array) -> jax.Array:
    return jnp.sin(x @ W)


with_own_gradient.defvjp(lambda x: (with_own_gradient(x), x), lambda x, slope: (slope @ W.T,))


def in_scan(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda sum, _: (jnp.sin(sum @ W), None), x, None, length=2)[0]


def slopes(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    return jax.grad(lambda x: function(function(x)).sum())


def random_steps(x: jax.Array) -> jax.Array:
    def step(key: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        key, used = jax.random.split(key)
        return key, x @ (x * jax.random.bits(used, dtype=np.uint8))

    return jax.lax.scan(step, jax.random.key(0), None, length=2)[1]


def beside_effects(x: jax.Array) -> jax.Array:
    host = jax.pure_callback(lambda y: 2 * np.asarray(y), jax.ShapeDtypeStruct((40, 40), np.float32), x @ W)
    jax.debug.callback(lambda y: None, host, ordered=True)
    return host @ W


FUNCTIONS: dict[str, tuple[Callable[..., Any], int]] = {
    "branches": (lambda x: jax.lax.cond(x.sum() > 0, lambda x: x @ W, lambda x: jnp.zeros_like(x), x), 1),
    "while": (
        lambda x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] @ W, 2 * c[2]), (0, x, 1.0)),
        1,
    ),
    "weak types": (lambda x: jax.lax.scan(lambda c, row: (1.5 * c, row @ W), 1.0, x.reshape(2, 20, 40)), 1),
    "scan": (slopes(in_scan), 2),
    "checkpoint in a scan": (
        jax.grad(lambda x: jax.lax.scan(jax.checkpoint(lambda c, _: (jnp.sin(c @ W), None)), x, length=2)[0].sum()),
        2,
    ),
    "scan in a checkpoint": (slopes(jax.checkpoint(in_scan)), 2),
    "constants in a checkpoint": (slopes(jax.checkpoint(lambda x: jnp.sin(x) @ np.asarray(W) + np.ones(40))), 2),
    "own gradient": (with_own_gradient, 1),
    "gradient of its own": (slopes(with_own_gradient), 2),
    "random": (random_steps, 1),
    "effects": (beside_effects, 2),
    "no result of an operation": (lambda x: (3.0, x, None, {"a": x}, np.float32(2)), 0),
    "transposed operands": (lambda x: (x.T @ W, x @ W.T, (x @ W).T, x @ x.T, x.T @ x), 5),
    "stacks": (lambda x: jnp.einsum("abij,akbj->kabi", x.reshape(2, 2, 20, 20), x.reshape(2, 20, 2, 20)), 1),
    "two sums": (lambda x: jnp.einsum("abij,kabj->ik", x.reshape(2, 2, 20, 20), x.reshape(20, 2, 2, 20)), 0),
    "outer product": (lambda x: jnp.einsum("ij,kl->ijkl", x[:20], x[20:]), 1),
    "precision": (lambda x: jnp.matmul(x, W, precision="highest"), 1),
    "other types": (lambda x: (x.astype(jnp.bfloat16) @ x.astype(jnp.bfloat16), (x + 1j) @ (x - 1j)), 0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_any_operations(name):
    function, least = FUNCTIONS[name]
    fast, x = jax.jit(calling_kernels(function)), draw(40, 40, seed=8)
    assert_same(fast(x), jax.jit(function)(x), 2e-5)
    assert calls(fast.lower(x).as_text()).total() >= least


CONVOLUTIONS = [  # of images of (20, 20, 8): kernels, and what a convolution is given
    ((3, 3, 8, 24), {"padding": ((1, 1), (1, 1))}, 3),
    ((4, 3, 8, 24), {"padding": ((1, 0), (2, -1)), "window_strides": (2, 3)}, 3),
    ((3, 2, 8, 24), {"padding": ((0, 3), (4, 2)), "rhs_dilation": (2, 3), "window_strides": (1, 2)}, 3),
    ((1, 1, 8, 24), {"padding": ((0, 0), (0, 0)), "window_strides": (3, 3)}, 0),
    ((3, 3, 8, 24), {"padding": ((2, 2), (2, 2)), "lhs_dilation": (2, 1)}, 1),
    ((5, 5, 2, 32), {"padding": ((2, 2), (2, 2)), "feature_group_count": 4}, 1),
    ((3, 3, 1, 8), {"padding": ((1, 1), (1, 1)), "feature_group_count": 8}, 0),
]


@pytest.mark.parametrize(("kernel", "options", "least"), CONVOLUTIONS)
def test_gradients_of_convolutions(kernel, options, least):
    """The kernel is stored in another order than it is computed with."""

    def loss(x: jax.Array, stored: jax.Array) -> jax.Array:
        call = partial(jax.lax.conv_general_dilated, dimension_numbers=IMAGES, **{"window_strides": (1, 1), **options})
        return jnp.sum(jnp.sin(call(x, stored.transpose(2, 3, 1, 0))))

    gradients, operands = jax.value_and_grad(loss, (0, 1)), (draw(2, 20, 20, 8), draw(*kernel).transpose(3, 2, 0, 1))
    fast = jax.jit(calling_kernels(gradients))
    assert_same(fast(*operands), jax.jit(gradients)(*operands), 2e-5)
    assert calls(fast.lower(*operands).as_text())[CONVOLUTION] >= least


def test_a_turned_kernel_is_not_always_a_gradient():
    def function(x: jax.Array, kernel: jax.Array) -> list[jax.Array]:
        call = partial(jax.lax.conv_general_dilated, padding=((3, 1), (-1, 6)), dimension_numbers=IMAGES)
        return [
            call(x, jax.lax.rev(kernel, turned), (stride, stride), lhs_dilation=dilation, rhs_dilation=dilation[::-1])
            for turned in [(0, 1), (0,), (0, 1, 2), ()]
            for dilation in [(1, 1), (2, 3)]
            for stride in [1, 2]
        ]

    operands = draw(2, 20, 20, 4), draw(3, 4, 4, 9)
    assert_same(jax.jit(calling_kernels(function))(*operands), jax.jit(function)(*operands))


def test_convolutions_of_another_order():
    """Some of these are what JAX makes of a kernel's gradient."""

    def function(x: jax.Array, kernel: jax.Array) -> list[jax.Array]:
        found = []
        for result in ["NHWC", "HWNC", "HWCN", "NCHW"]:
            call = partial(jax.lax.conv_general_dilated, x, kernel, dimension_numbers=("CHWN", "IHWO", result))
            found += [call((1, 1), "VALID"), call((2, 1), ((1, 2), (0, -1)), rhs_dilation=(1, 2))]
        return [*found, *(y.transpose(1, 2, 3, 0) for y in found)]

    operands = draw(5, 20, 20, 7), draw(5, 10, 9, 8)
    assert_same(jax.jit(calling_kernels(function))(*operands), jax.jit(function)(*operands))


# ---- training --------------------------------------------------------------------------------------------------------


def normalised_network() -> tuple[transmuter.Model, dict[str, str]]:
    """Convolutions, one of them of groups, with normalization by the batch's statistics and a skip connection."""
    nodes = [
        node("Conv", "x w0", "c0", pads=[1] * 4, strides=[2, 2]),
        node("BatchNormalization", "c0 one nil nil1 one1", "n0"),
        node("Relu", "n0", "r0"),
        node("Conv", "r0 w1", "c1", pads=[1] * 4),
        node("Add", "c1 r0", "s"),
        node("Conv", "s w2", "c2", group=4, pads=[1] * 4),
        node("Relu", "c2", "r2"),
        node("GlobalAveragePool", "r2", "p"),
        node("Flatten", "p", "f"),
        node("Gemm", "f v", "y", transB=1),
    ]
    weights = {"w0": draw(16, 8, 3, 3), "w1": draw(16, 16, 3, 3), "w2": draw(64, 4, 3, 3), "v": draw(24, 64)}
    weights |= {name: np.full(16, name.startswith("one"), np.float32) for name in ("one", "nil", "nil1", "one1")}
    model = transmuter.load(proto(nodes, {"x": ("n", 8, 20, 20)}, weights), trainable=True)
    return train.with_batch_statistics(model)


def training(kind: str) -> tuple[transmuter.Model, dict[str, str], dict[str, np.ndarray]]:
    if kind == "convolutions":
        return *normalised_network(), {"x": draw(4, 8, 20, 20), "labels": np.arange(4)}
    model = transmuter.load(attention(2, 24), trainable=True)
    return model, {}, {"x": draw(4, 40, 48), "labels": draw(4, 40, 48, seed=5)}


def trained(kind: str, steps: int = 3, **options: Any) -> tuple[Any, Counter[str]]:
    """Params and losses after some steps, and the kernels that each calls."""
    model, statistics, batch = training(kind)
    loss = losses.cross_entropy() if kind == "convolutions" else losses.regression()
    step = train.Step(model, loss, optax.sgd(0.5, momentum=0.9), statistics=statistics, **options)
    state, found = step.init(), []
    called = calls(step._whole.lower(state, step._frozen, step._checked(batch)).as_text())
    for _ in range(steps):
        state, metrics = step(state, batch)
        found.append(metrics)
    return jax.tree.map(np.asarray, (step.params(state), found)), called


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("convolutions", {}),
        ("convolutions", {"accumulate": 2}),
        ("attention", {}),
        ("attention", {"accumulate": 2}),
        ("attention", {"remat": "nothing_saveable"}),
        ("attention", {"accumulate": 2, "remat": "dots_saveable"}),
    ],
)
def test_steps_are_those_without_kernels(kind, options):
    actual, called = trained(kind, **options)
    if kind == "convolutions":
        assert called[CONVOLUTION] >= 6
    else:  # forwards, again forwards if values are not kept, and backwards
        assert called[PRODUCT] >= 5
        assert called[ATTENTION] == (3 if "remat" in options else 2)
    assert_same(actual, without_kernels(lambda: trained(kind, **options)[0]))


def test_steps_in_bfloat16_leave_products_to_xla():
    actual, called = trained("attention", compute_type="bfloat16")
    assert not called[PRODUCT] + called[ATTENTION]
    assert_same(actual, without_kernels(lambda: trained("attention", compute_type="bfloat16")[0]), 1e-3)


# ---- threads and devices ---------------------------------------------------------------------------------------------


def test_calls_of_many_threads_at_once():
    """Two models share the pool of threads, in which XLA runs them too."""
    convolution = proto([node("Conv", "x w", pads=[1] * 4)], {"x": ("n", 32, 20, 20)}, {"w": draw(96, 32, 3, 3)})
    models = [transmuter.load(attention(4, 32)), transmuter.load(convolution)]
    inputs = [[draw(2, 90 + 7 * (i % 2), 128, seed=i), draw(2 + i % 2, 32, 20, 20, seed=i)] for i in range(4)]
    compiled = [transmuter.compile(model) for model in models]
    expected = [[np.asarray(transmuter.run(m, {"x": x})["y"]) for m, x in zip(models, row)] for row in inputs]

    def many(thread: int) -> list[tuple[Any, np.ndarray]]:
        turns = [((thread + i) % 4, (thread + i // 3) % 2) for i in range(9)]
        return [(compiled[which]({"x": inputs[i][which]})["y"], expected[i][which]) for i, which in turns]

    with ThreadPoolExecutor(16) as pool:
        for pairs in [future.result(timeout=60) for future in [pool.submit(many, i) for i in range(16)]]:
            for actual, wanted in pairs:
                assert_same(np.asarray(actual), wanted)


def test_several_devices():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    flags["PYTHONPATH"] = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, __file__], env={**os.environ, **flags}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def check_several_devices() -> None:
    sharding = jax.sharding.NamedSharding(jax.make_mesh((4,), ("batch",)), jax.sharding.PartitionSpec("batch"))
    compiled, x = transmuter.compile(transmuter.load(attention(2, 24))), draw(4, 40, 48)
    expected = np.asarray(compiled({"x": x})["y"])
    for target in (sharding, jax.devices()[2]):
        assert_same(np.asarray(compiled({"x": jax.device_put(x, target)})["y"]), expected)
    alone, _ = trained("attention")
    shared, called = trained("attention", devices=jax.devices()[:2])
    assert not called
    assert_same(shared, alone)
    on_one, called = trained("attention", devices=jax.devices()[1:2])
    assert called
    assert_same(on_one, alone)


if __name__ == "__main__":
    check_several_devices()
