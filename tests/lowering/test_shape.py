"""Operators of shape.py and creation.py: both paths, ONNX Runtime, old versions, gradients, symbolic dimensions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import onnx
import pytest
from comparison import assert_equal
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from onenode import ort_node, run_node
from onnx import numpy_helper, parser

import transmuter
from lowering import drawn
from transmuter.lowering import arrays, creation, shape

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
TEXT = np.array([["a", "b", "c"], ["d", "e", "f"]], object)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


CASES = {
    "shape": ("Shape", [X], {"start": -2, "end": 7}, {"output_types": [7]}),
    "size": ("Size", [X], {}, {"output_types": [7]}),
    "reshape": ("Reshape", [X, ints(0, -1, 2)], {}, {}),
    "reshape allowzero": ("Reshape", [X[:0], ints(3, 0)], {"allowzero": 1}, {}),
    "reshape to scalar": ("Reshape", [X[0, 0, :1], ints()], {}, {}),
    "flatten": ("Flatten", [X], {"axis": -1}, {}),
    "flatten before all": ("Flatten", [X], {"axis": 0}, {}),
    "squeeze": ("Squeeze", [X[None, :, :1], ints(-2, 0)], {}, {}),
    "squeeze all": ("Squeeze", [X[None, :, :1]], {}, {}),
    "squeeze 11": ("Squeeze", [X[None]], {"axes": [0]}, {"opset": 11}),
    "unsqueeze": ("Unsqueeze", [X, ints(-1, 0)], {}, {}),
    "unsqueeze 11": ("Unsqueeze", [X], {"axes": [2]}, {"opset": 11}),
    "expand": ("Expand", [X[:, :1], ints(5, 1, 3, 1)], {}, {}),
    "expand to less": ("Expand", [X, ints(1)], {}, {}),
    "tile": ("Tile", [X, ints(1, 2, 0)], {}, {}),
    "transpose": ("Transpose", [X], {"perm": [1, 2, 0]}, {}),
    "transpose default": ("Transpose", [X], {}, {}),
    "concat": ("Concat", [X, X[:, :0], X[:, :2]], {"axis": -2}, {}),
    "split": ("Split", [X, ints(1, 0, 3)], {"axis": 2}, {"outputs": 3, "opset": 13}),
    "split evenly": ("Split", [X], {"axis": -1}, {"outputs": 2, "opset": 13}),
    "split attribute": ("Split", [X], {"axis": 1, "split": [1, 2]}, {"outputs": 2, "opset": 11}),
    "split unevenly": ("Split", [X], {"axis": 2, "num_outputs": 3}, {"outputs": 3, "opset": 18}),
    "slice": ("Slice", [X, ints(-1, 0), ints(-(2**63), 2**63 - 1), ints(1, 2), ints(-2, 3)], {}, {}),
    "slice of nothing": ("Slice", [X, ints(-9), ints(-8), ints(2), ints(-1)], {}, {}),
    "slice 9": ("Slice", [X], {"starts": [1], "ends": [9], "axes": [2]}, {"opset": 9}),
    "pad": ("Pad", [X, ints(1, 0, -1, 0, 2, -1), np.array(7, np.float32)], {}, {}),
    "pad some axes": ("Pad", [X, ints(1, 2), None, ints(-1)], {"mode": "edge"}, {}),
    "pad by wrapping": ("Pad", [X, ints(0, 1, 3, 0, 2, 4)], {"mode": "wrap"}, {}),
    "pad by reflection, after a cut": ("Pad", [X, ints(0, 0, -1, 0, 0, 2)], {"mode": "reflect"}, {}),
    "pad 2": ("Pad", [X], {"pads": [0, 1, 0, 0, 0, 2], "value": 0.5}, {"opset": 10}),
    "identity": ("Identity", [X], {}, {}),
    "depth to space": ("DepthToSpace", [X.reshape(1, 12, 1, 2)], {"blocksize": 2, "mode": "CRD"}, {}),
    "space to depth": ("SpaceToDepth", [X.reshape(1, 3, 2, 4)], {"blocksize": 2}, {}),
    "center crop pad": ("CenterCropPad", [X, ints(5, 1, 1)], {}, {}),
    "center crop pad some axes": ("CenterCropPad", [X, ints(7)], {"axes": [-1]}, {}),
    "upper": ("Trilu", [X, np.array(1)], {}, {}),
    "lower": ("Trilu", [X, np.array(-1)], {"upper": 0}, {}),
    "reverse": ("ReverseSequence", [X, ints(1, 3)], {"batch_axis": 0, "time_axis": 1}, {}),
    "reverse first axis": ("ReverseSequence", [X, ints(1, 2, 0)], {}, {}),
    "constant of shape": ("ConstantOfShape", [ints(2, 0, 3)], {}, {"output_types": [1]}),
    "range": ("Range", [np.array(10), np.array(-3), np.array(-4)], {}, {}),
    "range of floats": ("Range", [np.array(v, np.float32) for v in (1, 2, 0.25)], {}, {}),
    "range of nothing": ("Range", [np.array(2), np.array(2), np.array(1)], {}, {}),
    "eye like": ("EyeLike", [X[0]], {"k": -1, "dtype": 7}, {"output_types": [7]}),
    "one hot": ("OneHot", [ints(0, -1, 3, 2, -4), np.array(3), np.float32([5, 7])], {"axis": 0}, {"output_types": [1]}),
    "hann": ("HannWindow", [np.array(5)], {}, {"opset": 17, "output_types": [1]}),
    "hamming": ("HammingWindow", [np.array(5)], {"periodic": 0}, {"opset": 17, "output_types": [1]}),
    "blackman": ("BlackmanWindow", [np.array(5)], {}, {"opset": 17, "output_types": [1]}),
}
ON_JAX_ONLY = {"reverse", "reverse first axis"}


@pytest.mark.parametrize("name", CASES)
def test_known_traced_and_onnx_runtime_agree(name: str) -> None:
    op, inputs, attributes, more = CASES[name]
    expected = ort_node(op, inputs, attributes, **more)
    everything = [i for i, x in enumerate(inputs) if x is not None]
    for known in ((), everything[1:], everything):
        results = run_node(op, inputs, attributes, known=known, **more)
        for actual, wanted in zip(results, expected, strict=True):
            assert_equal(actual, wanted, where=f"known={known}")


@pytest.mark.parametrize("name", sorted(CASES.keys() - ON_JAX_ONLY))
def test_known_operands_give_known_results(name: str) -> None:
    op, inputs, attributes, more = CASES[name]
    version = more.get("opset", 23)
    lowering = transmuter.lowering.registry.find("", op, version)
    defaults = dict.fromkeys(lowering.attributes) | lowering.defaults(version)
    filled = {"output_count": more.get("outputs", 1)} if "output_count" in lowering.fills else {}
    results = lowering.function(*inputs, **{**defaults, **attributes, **filled})
    assert arrays.is_known(results)


@pytest.mark.parametrize(
    ("op", "inputs", "attributes", "opset", "expected"),
    [
        ("Reshape", [X], {"shape": [4, -1]}, 1, X.reshape(4, 6)),
        ("Tile", [X, np.float32(2), np.float32(1)], {}, 1, np.tile(X, (1, 2, 1))),
        ("Concat", [X, X], {}, 1, np.concatenate([X, X], 1)),
        ("Split", [X, np.float32([1, 2])], {"axis": 1}, 1, X[:, :1]),
        ("Split", [X], {"axis": 1, "split": [2, 1]}, 1, X[:, :2]),
        ("Pad", [X[0]], {"paddings": [0, 1, 1, 0], "mode": "edge"}, 1, np.pad(X[0], ((0, 1), (1, 0)), "edge")),
        ("SpaceToDepth", [X[:1, :, :2, None]], {"blocksize": 1, "mode": "CRD"}, 28, X[:1, :, :2, None]),
        ("OneHot", [ints(0, -1), np.array(2), np.float32([0, 1])], {}, 9, np.float32([[1, 0], [0, 0]])),
        ("HannWindow", [np.array(1)], {"periodic": 0}, 17, np.float32([1])),
    ],
)
def test_versions_that_onnx_runtime_lacks(
    op: str, inputs: list, attributes: dict, opset: int, expected: np.ndarray
) -> None:
    outputs = 2 if op == "Split" else 1
    types = [onnx.helper.np_dtype_to_tensor_dtype(expected.dtype)] * outputs
    result = run_node(op, inputs, attributes, opset=opset, outputs=outputs, output_types=types)[0]
    assert_equal(result, expected)


@pytest.mark.parametrize(
    ("op", "inputs", "attributes", "expected"),
    [
        ("Identity", [TEXT], {}, TEXT),
        ("Reshape", [TEXT, ints(-1)], {}, TEXT.reshape(-1)),
        ("Concat", [TEXT, TEXT], {"axis": 0}, np.concatenate([TEXT, TEXT])),
        ("Slice", [TEXT, ints(2), ints(-9), ints(1), ints(-1)], {}, TEXT[:, ::-1]),
        ("Transpose", [TEXT], {}, TEXT.T),
        ("Expand", [TEXT, ints(2, 2, 3)], {}, np.broadcast_to(TEXT, (2, 2, 3))),
        ("Tile", [TEXT, ints(2, 1)], {}, np.tile(TEXT, (2, 1))),
        ("Unsqueeze", [TEXT, ints(0)], {}, TEXT[None]),
        ("Squeeze", [TEXT[None]], {}, TEXT),
        ("Split", [TEXT], {"num_outputs": 1}, TEXT),
        ("Pad", [TEXT, ints(0, 1, 0, 0)], {}, np.concatenate([np.array([[""], [""]], object), TEXT], 1)),
        ("Gather", [TEXT, ints(-1)], {"axis": 1}, TEXT[:, -1:]),
    ],
)
def test_strings_pass(op: str, inputs: list, attributes: dict, expected: np.ndarray) -> None:
    assert_equal(run_node(op, inputs, attributes)[0], expected)


@pytest.mark.parametrize(
    ("op", "inputs", "attributes", "outputs", "message"),
    [
        ("Split", [X, ints(1, 1)], {"axis": 1}, 2, "do not make up"),
        ("Split", [X], {"axis": 1, "num_outputs": 5}, 5, "do not make up"),
        ("Tile", [X, ints(2)], {}, 1, "1 repeats for 3 dimensions"),
        ("Pad", [X, ints(2)], {}, 1, "1 pads for 3 axes"),
        ("Range", [np.array(0), np.array(3), np.array(0)], {}, 1, "delta is 0"),
        ("ConstantOfShape", [ints(-2)], {}, 1, "negative"),
        ("Reshape", [X, ints(5, 5)], {}, 1, "reshape"),
        ("Expand", [X, ints(2, 2, 4)], {}, 1, "broadcast"),
    ],
)
def test_operands_that_do_not_fit(op: str, inputs: list, attributes: dict, outputs: int, message: str) -> None:
    with pytest.raises(transmuter.TransmuterError, match=message):
        run_node(op, inputs, attributes, outputs=outputs)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_slices_are_those_of_onnx_runtime(data: st.DataObject) -> None:
    bound = st.one_of(st.integers(-6, 6), st.just(-(2**63)))
    axes = data.draw(st.lists(st.sampled_from([0, 1, 2]), min_size=1, unique=True))
    starts, ends = (data.draw(st.tuples(*[bound] * len(axes))) for _ in range(2))
    steps = data.draw(st.tuples(*[st.sampled_from([1, 2, -1, -2, 5])] * len(axes)))
    operands = [X, *(ints(*v) for v in (starts, ends, axes, steps))]
    expected = ort_node("Slice", operands)
    for known in ((1, 2, 3, 4), (0, 1, 2, 3, 4)):
        assert_equal(run_node("Slice", operands, known=known), expected)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_pads_are_those_of_onnx_runtime(data: st.DataObject) -> None:
    mode = data.draw(st.sampled_from(["constant", "reflect", "edge", "wrap"]))
    pads = ints(*data.draw(st.tuples(*[st.integers(-1, 2)] * 6)))
    x = data.draw(st.sampled_from([X, X.astype(np.int64), X > 3] if mode == "constant" else [X]))
    x = np.tile(x, (2, 2, 1))
    assert_equal(run_node("Pad", [x, pads], {"mode": mode}), ort_node("Pad", [x, pads], {"mode": mode}))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4, np.bool_])
def test_other_dtypes_keep_theirs(dtype: np.dtype) -> None:
    x = np.array([[1, 0, 2], [3, 4, 5]], dtype)
    for op, operands in (
        ("Transpose", []),
        ("Pad", [ints(0, 1, 0, 1)]),
        ("Expand", [ints(2, 1, 1)]),
        ("Slice", [ints(0), ints(-1), ints(1), ints(2)]),
    ):
        traced, known = (run_node(op, [x, *operands], known=known)[0] for known in ((), range(1 + len(operands))))
        assert traced.dtype == known.dtype == dtype
        np.testing.assert_array_equal(traced.astype(np.float32), known.astype(np.float32))


@pytest.mark.parametrize("mode", ["constant", "reflect", "edge", "wrap"])
def test_gradients_of_pad(mode: str) -> None:
    x = X.reshape(4, 6)
    value = np.float32(2)
    check_grads(lambda x, v: shape.Pad_11(x, ints(2, -1, 1, 3), v, mode=mode), (x, value), 1, ["rev"], eps=1)


def test_gradients() -> None:
    x = X / 7
    for f in (
        lambda x: shape.Slice_10(x, ints(-1), ints(-9), ints(2), ints(-2)),
        lambda x: shape.Trilu(x, np.array(1), upper=1),
        lambda x: shape.Tile_6(x, ints(1, 2, 1)),
        lambda x: shape.Expand(x, ints(2, 1, 1, 4)),
        lambda x: shape.ReverseSequence(x, ints(1, 3), batch_axis=0, time_axis=1),
        lambda x: shape.CenterCropPad(x, ints(3, 1, 5), axes=None),
        lambda x: shape.DepthToSpace(x.reshape(1, 12, 2, 1), blocksize=2, mode="DCR"),
        lambda x: creation.OneHot_11(ints(1, 5, -1), ints(3), x[0, 0, :2], axis=-1),
    ):
        check_grads(f, (jnp.asarray(x),), 1, ["rev"])


def test_masked_elements_have_no_gradient() -> None:
    gradient = jax.grad(lambda x: shape.Trilu(1 / x, upper=0).sum())(jnp.eye(3))
    assert np.isfinite(jax.grad(lambda x: shape.Trilu(x, upper=0).sum())(jnp.full((3, 3), jnp.nan))).all()
    assert gradient.shape == (3, 3)


def test_large_results_are_no_constants() -> None:
    for make in (
        lambda: creation.ConstantOfShape(ints(2000, 2000), value=None),
        lambda: shape.Expand(np.zeros((1, 1), np.float32), ints(2000, 2000)),
        lambda: shape.Tile_6(np.zeros((1, 1), np.float32), ints(2000, 2000)),
    ):
        assert isinstance(make(), jax.Array)
        assert not any(np.size(c) > 1 for c in jax.make_jaxpr(make)().consts)


# ---- symbolic dimensions -------------------------------------------------------------------------------------------

BATCH = "s = Shape(x) d = Gather(s, zero) "
FIRST = "s = Shape(x) d = Slice(s, z, o) "
SYMBOLIC = {
    "reshape": BATCH + "u = Unsqueeze(d, z) t = Concat<axis=0>(u, z3) y = Reshape(x, t)",
    "reshape by zero and -1": "y = Reshape(x, merge)",
    "heads": "r = Reshape(x, heads) y = Transpose<perm=[0, 2, 1, 3]>(r)",
    "arithmetic": BATCH
    + "m = Mul(d, two) q = Div(m, two) u = Unsqueeze(q, z) t = Concat<axis=0>(u, rest) y = Reshape(x, t)",
    "product": BATCH + "p = ReduceProd(s) y = Reshape(x, p)",
    "size": "n = Size(x) u = Unsqueeze(n, z) y = Reshape(x, u)",
    "static dimension": "s = Shape(x) d = Gather(s, one) f = Cast<to=1>(d) y = Div(x, f)",
    "static beside traced": "s = Shape(x) d = Gather(s, one) i = Cast<to=7>(x) a = Add(i, d) y = Cast<to=1>(a)",
    "dynamic dimension": "s = Shape(x) d = Gather(s, zero) f = Cast<to=1>(d) y = Div(x, f)",
    "expand": FIRST + "e = Concat<axis=0>(d, z5) y = Expand(weight, e)",
    "expand where": "s = Shape(x) n = Equal(s, minus) t = Where(n, z3d, s) y = Expand(w1, t)",
    "tile": "s = Shape<end=1>(x) y = Tile(weight, s)",
    "constant of shape": "s = Shape(x) y = ConstantOfShape(s)",
    "causal mask": FIRST + "e = Concat<axis=0>(d, d) c = ConstantOfShape(e) y = Trilu<upper=0>(c)",
    "range": BATCH + "r = Range(zero, d, one) y = Gather(x, r)",
    "range further": BATCH + "e = Add(d, one) r = Range(one, e, one) y = Cast<to=1>(r)",
    "slice": "y = Slice(x, minus, most, z)",
    "slice backwards": "y = Slice(x, minus, least, z, minus)",
    "slice of all": "y = Slice(x, z, most, z)",
    "slice to symbolic end": FIRST + "y = Slice(x, z, d, z)",
    "slice of a table": FIRST + "y = Slice(weight, z, d, z)",
    "split of the shape": "s = Shape(x) a, b = Split(s, parts) t = Concat<axis=0>(b, a) y = Reshape(x, t)",
    "split": "a, y = Split<axis=2, num_outputs=2>(x)",
    "flatten": "y = Flatten(x)",
    "squeeze": "u = Unsqueeze(x, o) y = Squeeze(u)",
    "pad": "y = Pad(x, pads)",
    "pad by edge": "y = Pad<mode='edge'>(x, inner)",
    "eye": "t = Flatten(x) y = EyeLike(t)",
    "one hot": "y = OneHot(x, two, onoff)",
    "center": "s = Shape(x) y = CenterCropPad(x, s)",
    "reverse": "y = ReverseSequence(x, lengths)",
}
GIVEN = {
    "zero": np.array(0),
    "one": np.array(1),
    "two": np.array(2),
    "z": ints(0),
    "o": ints(1),
    "parts": ints(1, 2),
    "z3d": ints(1, 1, 1),
    "z3": ints(4, 3),
    "z5": ints(5),
    "minus": ints(-1),
    "merge": ints(0, -1),
    "heads": ints(0, 0, 2, -1),
    "rest": ints(2, 6),
    "most": ints(2**63 - 1),
    "least": ints(-(2**63)),
    "pads": ints(1, 0, 0, 0, -1, 2),
    "inner": ints(0, 1, 0, 0, 0, 2),
    "lengths": ints(1, 2, 0),
    "weight": np.arange(5, dtype=np.float32),
    "w1": np.ones((1, 1, 1), np.float32),
    "onoff": np.array([0, 1], np.float32),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_export_with_a_symbolic_batch(name: str) -> None:
    text = f'<ir_version: 10, opset_import: ["" : 23]> g (float[b, 3, 4] x) => (float y) {{ {SYMBOLIC[name]} }}'
    proto = parser.parse_model(text.replace("'", '"'))
    read = {name for node in proto.graph.node for name in node.input}
    proto.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in GIVEN.items() if k in read)
    model = transmuter.load(proto)
    symbolic = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 3, 4"), np.float32)
    exported = jax.export.export(jax.jit(lambda x: model.apply(model.params, {"x": x})))(symbolic)
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    assert_equal(np.asarray(exported.call(x)["y"]), np.asarray(transmuter.run(model, {"x": x})["y"]))


# ---- drawn operands, against ONNX Runtime --------------------------------------------------------------------------

DRAWN = settings(max_examples=20, deadline=None)
KINDS = st.sampled_from([np.float32, np.int64, np.bool_, np.uint8])
NEARBY = st.sampled_from([(2, 3), (1, 3), (0, 3), (2, 0, 3), (2, 1, 2), ()])
EXTREME = st.sampled_from([-(2**63), -(2**31), -7, -3, -1, 0, 1, 2, 4, 7])


@DRAWN
@given(draw=st.data(), dtype=KINDS, shape=NEARBY)
def test_shapes_of_any_rank(draw: st.DataObject, dtype: np.dtype, shape: tuple) -> None:
    x, kind = draw.draw(drawn.arrays(dtype, shape)), [drawn.element_type(np.int64)]
    bounds = draw.draw(st.fixed_dictionaries({}, optional={"start": st.integers(-4, 4), "end": st.integers(-4, 4)}))
    drawn.check("Shape", [x], bounds, output_types=kind)
    drawn.check("Size", [x], output_types=kind)
    drawn.check("Identity", [x])
    drawn.check("Flatten", [x], {"axis": draw.draw(st.integers(-len(shape), len(shape)))})
    drawn.check("Transpose", [x], {"perm": draw.draw(st.permutations(range(len(shape))))} if shape else {})


@DRAWN
@given(draw=st.data(), shape=NEARBY)
def test_reshapes(draw: st.DataObject, shape: tuple) -> None:
    x = draw.draw(drawn.arrays(np.float32, shape))
    ways = [shape, shape[::-1], (1, *shape), (x.size,), (-1,), (*shape, 1, -1) if x.size else shape]
    if x.size:
        ways += [tuple(0 if i == 0 else d for i, d in enumerate(shape)), (0, -1) if shape else ()]
    target = draw.draw(st.sampled_from(ways))
    allowzero = int(0 in shape)  # else a 0 is the dimension of x at that place
    drawn.check("Reshape", [x, ints(*target)], {"allowzero": allowzero}, known=(1,))


@DRAWN
@given(draw=st.data(), shape=st.sampled_from([(1, 2, 1), (1,), (1, 0, 1), ()]))
def test_dimensions_of_size_one(draw: st.DataObject, shape: tuple) -> None:
    x = draw.draw(drawn.arrays(np.float32, shape))
    ones = [i for i, d in enumerate(shape) if d == 1]
    axes = [i - len(shape) * draw.draw(st.booleans()) for i in ones[: draw.draw(st.integers(1, 2))]]
    drawn.check("Squeeze", [x, ints(*axes)] if axes else [x], known=(1,) if axes else ())
    more = draw.draw(st.lists(st.integers(0, len(shape) + 1), min_size=2, max_size=2, unique=True))
    drawn.check(
        "Unsqueeze", [x, ints(*[i - draw.draw(st.sampled_from([0, len(shape) + 2])) for i in more])], known=(1,)
    )


@DRAWN
@given(
    draw=st.data(),
    shapes=st.sampled_from(
        [
            ((2, 3), (1,)),
            ((2, 1), (5, 1, 3)),
            ((), (2, 3)),
            ((1, 3), (0, 3)),
            ((0, 1), (1, 2)),
            ((3,), ()),
            ((2, 3), (2, 1)),
        ]
    ),
)
def test_expansions(draw: st.DataObject, shapes: tuple) -> None:
    drawn.check("Expand", [draw.draw(drawn.arrays(np.float32, shapes[0])), ints(*shapes[1])], known=(1,))


@DRAWN
@given(draw=st.data(), shape=st.sampled_from([(2, 3), (0, 3), ()]))
def test_tiles(draw: st.DataObject, shape: tuple) -> None:
    repeats = ints(*draw.draw(st.tuples(*[st.integers(0, 2)] * len(shape))))
    drawn.check("Tile", [draw.draw(drawn.arrays(np.float32, shape)), repeats], known=(1,))


@DRAWN
@given(draw=st.data(), axis=st.integers(-2, 1))
def test_concatenations_and_splits(draw: st.DataObject, axis: int) -> None:
    sizes = draw.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    shapes = [tuple(size if i == axis % 2 else 2 for i in range(2)) for size in sizes]
    parts = [draw.draw(drawn.arrays(np.float32, shape)) for shape in shapes]
    drawn.check("Concat", parts, {"axis": axis})
    whole = np.concatenate(parts, axis)
    drawn.check("Split", [whole, ints(*sizes)], {"axis": axis}, outputs=len(sizes), opset=18, known=(1,))
    if (count := whole.shape[axis]) in (3, 5, 6):
        drawn.check("Split", [whole], {"axis": axis, "num_outputs": 3}, outputs=3, opset=18)
        drawn.check("Split", [whole], {"axis": axis, "num_outputs": count}, outputs=count, opset=18)


@settings(max_examples=40, deadline=None)
@given(
    start=EXTREME | st.just(2**63 - 1),
    end=EXTREME | st.just(2**63 - 1),
    step=st.sampled_from([1, -1, 2, -2, 3, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63)]),
    axis=st.integers(-2, 1),
    index=st.sampled_from([np.int32, np.int64]),
)
def test_slices_by_extreme_bounds_and_steps(start: int, end: int, step: int, axis: int, index: np.dtype) -> None:
    limits = np.iinfo(index)
    start, end, step = (int(np.clip(v, limits.min, limits.max)) for v in (start, end, step))
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    operands = [x, *(np.array([v], index) for v in (start, end, axis, step))]
    before = end == limits.max and step < 0  # ONNX Runtime: no end
    results = [np.take(x, [], axis)] if before else None
    drawn.check("Slice", operands, known=(1, 2, 3, 4), results=results)


@DRAWN
@given(
    draw=st.data(),
    mode=st.sampled_from(["constant", "reflect", "edge", "wrap"]),
    dtype=st.sampled_from([np.float32, np.int64]),
)
def test_pads_of_some_axes(draw: st.DataObject, mode: str, dtype: np.dtype) -> None:
    x = draw.draw(drawn.arrays(dtype, (4, 5)))
    axes = draw.draw(drawn.subsets(2))
    pads = ints(*draw.draw(st.tuples(*[st.integers(-1, 1)] * (2 * len(axes)))))
    value = draw.draw(drawn.arrays(dtype, ())) if mode == "constant" else None
    drawn.check("Pad", [x, pads, value, ints(*axes)], {"mode": mode}, known=(1, 3))


@DRAWN
@given(draw=st.data(), shape=st.sampled_from([(2, 3), (3, 2), (0, 2), (2, 0), (2, 2, 3)]), upper=st.integers(0, 1))
def test_triangles(draw: st.DataObject, shape: tuple, upper: int) -> None:
    x = draw.draw(drawn.arrays(draw.draw(st.sampled_from([np.float32, np.int64, np.bool_])), shape))
    k = draw.draw(st.none() | st.sampled_from([-(2**63), -9, -1, 0, 1, 2, 9, 2**63 - 1]))
    drawn.check("Trilu", [x] if k is None else [x, np.array(k)], {"upper": upper})


@DRAWN
@given(
    draw=st.data(),
    mode=st.sampled_from(["DCR", "CRD"]),
    shape=st.sampled_from([(1, 8, 1, 2), (2, 4, 0, 1), (0, 4, 1, 1)]),
)
def test_depth_and_space(draw: st.DataObject, mode: str, shape: tuple) -> None:
    x = draw.draw(drawn.arrays(np.float32, shape))
    drawn.check("DepthToSpace", [x], {"blocksize": 2, "mode": mode})
    n, c, h, w = shape
    drawn.check("SpaceToDepth", [x.reshape(n, c // 4, 2 * h, 2 * w)], {"blocksize": 2})


@DRAWN
@given(draw=st.data(), time=st.integers(0, 1), shape=st.sampled_from([(3, 2), (2, 3, 2), (1, 1), (2, 3, 0)]))
def test_reversed_sequences(draw: st.DataObject, time: int, shape: tuple) -> None:
    x = draw.draw(drawn.arrays(np.float32, shape))
    lengths = draw.draw(drawn.arrays(np.int64, (shape[1 - time],), st.integers(1, shape[time])))
    drawn.check("ReverseSequence", [x, lengths], {"time_axis": time, "batch_axis": 1 - time})


@DRAWN
@given(draw=st.data())
def test_centers(draw: st.DataObject) -> None:
    x = draw.draw(drawn.arrays(np.float32, (3, 4)))
    axes = draw.draw(drawn.subsets(2, least=1))
    target = ints(*draw.draw(st.tuples(*[st.integers(0, 7)] * len(axes))))
    drawn.check("CenterCropPad", [x, target], {"axes": axes}, known=(1,))


def test_more_is_taken_away_than_there_is() -> None:
    with pytest.raises(transmuter.LoweringError, match="more elements are taken away than the axis has"):
        run_node("Pad", [np.zeros(4, np.float32), ints(-3, -2)], known=(1,))


def test_more_gradients() -> None:
    x = jnp.asarray(X / 7)
    for f in (
        lambda x: shape.Reshape_5(x, ints(0, -1)),
        lambda x: shape.Flatten(x, axis=1),
        lambda x: shape.Squeeze(x[None], axes=(0,)),
        lambda x: shape.Unsqueeze(x, axes=(0, 2)),
        lambda x: shape.Transpose(x, perm=(2, 0, 1)),
        lambda x: shape.Concat_4(x, 2 * x, axis=-1),
        lambda x: shape.Split_18(x, axis=2, num_outputs=3, output_count=3),
        lambda x: shape.SpaceToDepth(x.reshape(1, 3, 2, 4), blocksize=2),
        lambda x: shape.Identity(x),
    ):
        check_grads(f, (x,), 1, ["rev"])
