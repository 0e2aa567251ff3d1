"""Reading models: sources, external data, element types, functions, and everything that can be wrong with a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from building import info, model_of
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import transmuter
from transmuter import InputError, ModelError, UnsupportedOperatorError

WEIGHT = np.arange(64 * 32, dtype=np.float32).reshape(64, 32) / 100


def linear() -> onnx.ModelProto:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")]
    return model_of(nodes, [info("x")], [info("y", (None, 32))], [numpy_helper.from_array(WEIGHT, "w")])


X = np.ones((2, 64), np.float32)
EXPECTED = X @ WEIGHT


def check(model: transmuter.Model) -> None:
    np.testing.assert_allclose(transmuter.run(model, {"x": X})["y"], EXPECTED, rtol=1e-5)


# ---- sources -------------------------------------------------------------------------------------------------------


def test_every_source_gives_the_same_model(tmp_path: Path) -> None:
    proto = linear()
    path = tmp_path / "model.onnx"
    onnx.save(proto, path)
    before = proto.SerializeToString()
    for source in (path, str(path), path.read_bytes(), proto, ir.from_proto(proto)):
        check(transmuter.load(source))
    assert proto.SerializeToString() == before


@pytest.mark.parametrize("external", [False, True])
def test_changing_the_file_after_load_changes_nothing(tmp_path: Path, external: bool) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(linear(), path, save_as_external_data=external, location="weights.bin", size_threshold=0)
    model = transmuter.load(path)
    for file in tmp_path.iterdir():
        file.write_bytes(b"\xff" * file.stat().st_size)
        file.write_bytes(b"")
    check(model)


def test_an_onnx_ir_model_with_external_data(tmp_path: Path) -> None:
    onnx.save(linear(), tmp_path / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    check(transmuter.load(ir.load(tmp_path / "model.onnx")))


def test_external_data_beside_a_symlinked_model(tmp_path: Path) -> None:
    """How the Hub's cache lays repositories out: every file is a link into a folder of blobs."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    onnx.save(linear(), blobs / "m", save_as_external_data=True, location="weights.bin", size_threshold=0)
    (blobs / "weights.bin").rename(blobs / "w")
    (snapshot / "model.onnx").symlink_to("../blobs/m")
    (snapshot / "weights.bin").symlink_to("../blobs/w")
    check(transmuter.load(snapshot / "model.onnx"))


@pytest.mark.parametrize(
    "dtype",
    [
        np.float16, np.float32, np.float64, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32,
        np.uint64, np.bool_, np.complex64, np.complex128, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2, ml_dtypes.float8_e5m2fnuz, ml_dtypes.int4, ml_dtypes.uint4,
        ml_dtypes.int2, ml_dtypes.uint2, ml_dtypes.float4_e2m1fn,
    ],
)  # fmt: skip
@pytest.mark.parametrize("count", [3, 9001])
def test_element_types(tmp_path: Path, dtype: type, count: int) -> None:
    """As inline, external and small initializers; the odd count leaves a packed type's last byte half empty."""
    array = (np.arange(count) % 2).astype(dtype)
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    proto = model_of(
        [helper.make_node("Identity", ["w"], ["y"])],
        [],
        [info("y", (count,), element)],
        [numpy_helper.from_array(array, "w")],
        25,
    )
    onnx.save(proto, tmp_path / "inline.onnx")
    onnx.save(proto, tmp_path / "external.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    for name in ("inline.onnx", "external.onnx"):
        model = transmuter.load(tmp_path / name)
        for result in (transmuter.run(model, {})["y"], transmuter.compile(model)({})["y"]):
            assert result.dtype == array.dtype
            np.testing.assert_array_equal(np.asarray(result), array)


def test_strings() -> None:
    words = np.array([["a", "βγ"], ["", "d"]], object)
    proto = model_of(
        [helper.make_node("Identity", ["w"], ["y"]), helper.make_node("Identity", ["x"], ["z"])],
        [info("x", (None,), TensorProto.STRING)],
        [info("y", (2, 2), TensorProto.STRING), info("z", (None,), TensorProto.STRING)],
        [helper.make_tensor("w", TensorProto.STRING, (2, 2), [w.encode() for w in words.flat])],
    )
    model = transmuter.load(proto)
    for call in (lambda x: transmuter.run(model, x), transmuter.compile(model)):
        result = call({"x": np.array(["x", "yz"])})
        np.testing.assert_array_equal(result["y"], words)
        np.testing.assert_array_equal(result["z"], np.array(["x", "yz"], object))


def test_sparse_initializers_and_constants() -> None:
    values = numpy_helper.from_array(np.array([5, 7], np.float32), "w")
    for indices in (np.array([1, 5]), np.array([[0, 1], [1, 2]])):
        sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(indices.astype(np.int64), "i"), [2, 3])
        proto = model_of(
            [
                helper.make_node("Constant", [], ["c"], sparse_value=sparse),
                helper.make_node("Add", ["w", "c"], ["y"]),
            ],
            [],
            [info("y", (2, 3))],
        )
        proto.graph.sparse_initializer.append(sparse)
        expected = np.array([[0, 10, 0], [0, 0, 14]], np.float32)
        np.testing.assert_array_equal(transmuter.run(transmuter.load(proto), {})["y"], expected)


def test_initializers_that_are_inputs_are_defaults() -> None:
    proto = linear()
    proto.graph.input.append(info("w", (64, 32)))
    model = transmuter.load(proto)
    assert list(model.inputs) == ["x"]
    assert list(model.overridable_inputs) == ["w"]
    check(model)
    compiled = transmuter.compile(model)
    for weight in (WEIGHT * 2, WEIGHT * 3):
        for call in (lambda x: transmuter.run(model, x), compiled):
            np.testing.assert_allclose(call({"x": X, "w": weight})["y"], X @ weight, rtol=1e-5)
    np.testing.assert_allclose(compiled({"x": X})["y"], EXPECTED, rtol=1e-5)


# ---- functions -----------------------------------------------------------------------------------------------------


def function(
    name: str,
    nodes: list[onnx.NodeProto],
    opset: int,
    attributes: Sequence[str] = (),
    imports: Mapping[str, int] = MappingProxyType({}),
) -> onnx.FunctionProto:
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, v) for d, v in imports.items())]
    return helper.make_function("local", name, ["a"], ["b"], nodes, opsets, list(attributes))


def calling(functions: list[onnx.FunctionProto], **attributes: object) -> onnx.ModelProto:
    return model_of(
        [helper.make_node("F", ["x"], ["y"], domain="local", **attributes)],
        [info("x", (None, 4))],
        [info("y", None)],
        opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("local", 1)],
        functions=functions,
    )


@pytest.mark.parametrize("opset", [18, 11])
def test_a_function_keeps_its_own_opset(opset: int) -> None:
    """Softmax flattens before opset 13: a function that imports opset 11 means that one."""
    x = np.arange(8, dtype=np.float32).reshape(2, 1, 4)
    proto = calling([function("F", [helper.make_node("Softmax", ["a"], ["b"], axis=0)], opset)])
    proto.graph.input[0].CopyFrom(info("x", (2, 1, 4)))
    result = np.asarray(transmuter.run(transmuter.load(proto), {"x": x})["y"])
    e = np.exp(x - x.max())
    np.testing.assert_allclose(result, e / (e.sum(0) if opset == 18 else e.sum()), rtol=1e-5)


def test_functions_with_attribute_references_and_if() -> None:
    branch = {
        f"{b}_branch": helper.make_graph([helper.make_node(op, ["a"], ["r"])], b, [], [info("r", None)])
        for b, op in (("then", "Neg"), ("else", "Abs"))
    }
    inner = function(
        "G",
        [
            _constant_flag(),
            helper.make_node("Cast", ["flag"], ["condition"], to=TensorProto.BOOL),
            helper.make_node("If", ["condition"], ["b"], **branch),
        ],
        17,
        ["flip"],
    )
    outer = function("F", [_call_g()], 18, ["flip"], {"local": 1})
    x = np.array([[1, -2, 3, -4]], np.float32)
    for flip, expected in ((1, -x), (0, abs(x))):
        model = transmuter.load(calling([outer, inner], flip=flip))
        np.testing.assert_array_equal(transmuter.run(model, {"x": x})["y"], expected)
        np.testing.assert_array_equal(transmuter.compile(model)({"x": x})["y"], expected)


def _constant_flag() -> onnx.NodeProto:
    node = helper.make_node("Constant", [], ["flag"])
    node.attribute.append(onnx.AttributeProto(name="value_int", ref_attr_name="flip", type=onnx.AttributeProto.INT))
    return node


def _call_g() -> onnx.NodeProto:
    node = helper.make_node("G", ["a"], ["b"], domain="local")
    node.attribute.append(onnx.AttributeProto(name="flip", ref_attr_name="flip", type=onnx.AttributeProto.INT))
    return node


def test_recursive_functions_are_refused() -> None:
    call = helper.make_node("F", ["a"], ["b"], domain="local")
    for opset in (18, 11):
        with pytest.raises(ModelError, match=r"[Cc]ycl|recurs"):
            transmuter.load(calling([function("F", [call], opset, imports={"local": 1})]))


# ---- bad files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"not a model at all", b"\x00" * 100, b"\x08\x07", b"PK\x03\x04" + b"x" * 50])
def test_bytes_that_are_no_model(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(data)
    for source in (data, tmp_path / "bad.onnx"):
        with pytest.raises(ModelError):
            transmuter.load(source)


def test_truncated_at_any_byte() -> None:
    data = linear().SerializeToString()
    for length in [*range(200), *range(200, len(data), 97)]:
        with pytest.raises(ModelError):
            transmuter.load(data[:length])


@example([(27, 128)])
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=8))
def test_corrupted_bytes_never_raise_anything_else(changes: list[tuple[int, int]]) -> None:
    data = bytearray(linear().SerializeToString())
    for place, byte in changes:
        data[place % len(data)] = byte
    try:
        model = transmuter.load(bytes(data))
        repr(model)
    except transmuter.TransmuterError:
        return


def test_missing_paths_and_wrong_sources(tmp_path: Path) -> None:
    for source in (tmp_path / "none.onnx", tmp_path, 7, None):
        with pytest.raises(ModelError):
            transmuter.load(source)


def test_an_undefined_input_is_named() -> None:
    proto = model_of([helper.make_node("Relu", ["nowhere"], ["y"], name="lost")], [info("x")], [info("y")])
    with pytest.raises(ModelError, match=r"lost.*nowhere"):
        transmuter.load(proto)
    with pytest.raises(ModelError, match="'z'"):
        transmuter.load(model_of([helper.make_node("Relu", ["x"], ["y"])], [info("x")], [info("z")]))


def test_a_cycle_is_refused() -> None:
    nodes = [helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Relu", ["a"], ["b"])]
    with pytest.raises(ModelError, match=r"cycl|Cycl"):
        transmuter.load(model_of(nodes, [info("x")], [info("a")]))


def test_a_value_defined_twice_is_refused() -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Neg", ["x"], ["y"])]
    with pytest.raises(ModelError, match="y"):
        transmuter.load(model_of(nodes, [info("x")], [info("y")]))


def test_unsorted_nodes_are_sorted() -> None:
    nodes = [helper.make_node("Relu", ["a"], ["y"]), helper.make_node("Neg", ["x"], ["a"])]
    model = transmuter.load(model_of(nodes, [info("x")], [info("y")]))
    np.testing.assert_array_equal(transmuter.run(model, {"x": -X})["y"], X)


def test_opsets_and_ir_versions() -> None:
    with pytest.raises(ModelError, match="opset 99"):
        transmuter.load(model_of([helper.make_node("Relu", ["x"], ["y"])], [info("x")], [info("y")], opset=99))
    with pytest.raises(ModelError, match="IR version 1"):
        transmuter.load(model_of([helper.make_node("Relu", ["x"], ["y"])], [info("x")], [info("y")], ir_version=1))
    check(transmuter.load(_in_ir_version_3()))


def _in_ir_version_3() -> onnx.ModelProto:
    proto = linear()
    proto.ir_version = 3
    proto.graph.input.append(info("w", (64, 32)))
    return proto


def test_unknown_operators_are_listed_before_anything_runs() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Frobnicate", ["a"], ["b"], name="first"),
        helper.make_node("Frobnicate", ["b"], ["c"], name="second"),
        helper.make_node("Gizmo", ["c"], ["y"], name="third", domain="com.acme"),
    ]
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.acme", 1)]
    model = transmuter.load(model_of(nodes, [info("x")], [info("y")], opset_imports=imports))
    assert model.unsupported_operators == {"Frobnicate": ("first", "second"), "com.acme::Gizmo": ("third",)}
    assert "Gizmo" in repr(model)
    for call in (lambda x: transmuter.run(model, x), transmuter.compile(model)):
        with pytest.raises(UnsupportedOperatorError, match=r"Frobnicate x2(.|\n)*Gizmo x1") as caught:
            call({"x": X})
        assert caught.value.operators == {"Frobnicate": ("first", "second"), "com.acme::Gizmo": ("third",)}
    np.testing.assert_array_equal(transmuter.run(model, {"x": X}, outputs=["a"])["a"], X)


def test_an_unknown_operator_in_a_branch_not_taken_does_no_harm() -> None:
    branches = {
        "then_branch": helper.make_graph([helper.make_node("Relu", ["x"], ["r"])], "t", [], [info("r")]),
        "else_branch": helper.make_graph([helper.make_node("Frobnicate", ["x"], ["r"])], "e", [], [info("r")]),
    }
    nodes = [helper.make_node("If", ["flag"], ["y"], **branches)]
    model = transmuter.load(model_of(nodes, [info("x"), info("flag", (), TensorProto.BOOL)], [info("y")]))
    for call in (lambda x: transmuter.run(model, x), transmuter.compile(model)):
        np.testing.assert_array_equal(call({"x": X, "flag": np.array(True)})["y"], X)
        with pytest.raises(UnsupportedOperatorError):
            call({"x": X, "flag": np.array(False)})


# ---- external data -------------------------------------------------------------------------------------------------


def external_model(location: str, offset: int = 0, length: int | None = None) -> onnx.ModelProto:
    proto = linear()
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (
        ("location", location),
        ("offset", offset),
        ("length", WEIGHT.nbytes if length is None else length),
    ):
        tensor.external_data.add(key=key, value=str(value))
    return proto


def test_external_paths_must_stay_in_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    secret = tmp_path / "secret.bin"
    secret.write_bytes(WEIGHT.tobytes())
    (folder / "link.bin").symlink_to(secret)
    (folder / "out").symlink_to(tmp_path)
    for location in ("../secret.bin", str(secret), "link.bin", "out/secret.bin", "a/../../secret.bin", "", "x\0y"):
        (folder / "model.onnx").write_bytes(external_model(location).SerializeToString())
        with pytest.raises(ModelError, match=r"outside of the model's folder|cannot be read"):
            transmuter.load(folder / "model.onnx")


def test_missing_short_and_misplaced_external_data(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(external_model("w.bin").SerializeToString())
    with pytest.raises(ModelError, match=r"w\.bin.*missing"):
        transmuter.load(path)
    (tmp_path / "w.bin").write_bytes(WEIGHT.tobytes()[:-1])
    with pytest.raises(ModelError, match="past the end"):
        transmuter.load(path)
    (tmp_path / "w.bin").write_bytes(WEIGHT.tobytes())
    check(transmuter.load(path))
    for offset, length in ((-4, WEIGHT.nbytes), (0, 17), (1 << 62, WEIGHT.nbytes)):
        path.write_bytes(external_model("w.bin", offset, length).SerializeToString())
        with pytest.raises(ModelError, match="'w'"):
            transmuter.load(path)
    with pytest.raises(ModelError, match="not loaded from a path"):
        transmuter.load(external_model("w.bin").SerializeToString())


def test_an_initializer_of_the_wrong_size_is_refused() -> None:
    proto = linear()
    proto.graph.initializer[0].dims[:] = [64, 33]
    with pytest.raises(ModelError, match="'w'"):
        transmuter.load(proto.SerializeToString())
    with pytest.raises(ModelError, match="'w'"):
        transmuter.load(proto)


# ---- bad inputs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "'x' is missing"),
        ({"x": X, "z": X}, "no input 'z'"),
        ({"x": X.astype(np.float64)}, "float64"),
        ({"x": X.astype(np.int32)}, "int32"),
        ({"x": np.array(["a"])}, "'x'"),
        ({"x": None}, "'x'"),
        ({"x": {}}, "'x'"),
        ({"x": [[1.0], [2.0, 3.0]]}, "'x'"),
        ({"x": X[0]}, r"\[64\]"),
        ({"x": X[:, :3]}, r"\[2, 3\]"),
        ([], "0 inputs"),
        ([X, X], "2 inputs"),
        ("x", "str"),
    ],
)
def test_wrong_inputs_are_named_before_tracing(inputs: object, message: str) -> None:
    model = transmuter.load(linear())
    compiled = transmuter.compile(model)
    for call in (lambda x: transmuter.run(model, x), lambda x: model.apply(model.params, x)):
        with pytest.raises(InputError, match=message):
            call(inputs)
    with pytest.raises(InputError):
        compiled(inputs) if not isinstance(inputs, list) else compiled(*inputs)
    assert compiled.cache_info().misses == 0


def test_python_numbers_and_lists_take_the_inputs_dtype() -> None:
    model = transmuter.load(linear())
    np.testing.assert_allclose(transmuter.run(model, {"x": X.tolist()})["y"], EXPECTED, rtol=1e-5)
    np.testing.assert_allclose(transmuter.run(model, [X])["y"], EXPECTED, rtol=1e-5)
    integers = transmuter.load(
        model_of(
            [helper.make_node("Neg", ["x"], ["y"])],
            [info("x", (None,), TensorProto.INT8)],
            [info("y", None, TensorProto.INT8)],
        )
    )
    assert transmuter.run(integers, {"x": [1, 2]})["y"].dtype == np.int8
    for wrong in ([1, 300], [1.5], [True]):
        with pytest.raises(InputError):
            transmuter.run(integers, {"x": wrong})


def test_wrong_weights_are_named() -> None:
    model = transmuter.load(linear())
    compiled = transmuter.compile(model)
    for params, message in (
        ({}, "'w' is missing"),
        ({"w": WEIGHT, "v": WEIGHT}, "'v' is unknown"),
        ({"w": WEIGHT.T}, r"\[32, 64\]"),
    ):
        for call in (lambda p: model.apply(p, {"x": X}), lambda p: compiled({"x": X}, params=p)):
            with pytest.raises(InputError, match=message):
                call(params)


def test_inputs_that_disagree_on_a_symbol_are_accepted_where_they_fit() -> None:
    nodes = [helper.make_node("Add", ["a", "b"], ["y"], name="sum")]
    model = transmuter.load(model_of(nodes, [info("a", ("n",)), info("b", ("n",))], [info("y", None)]))
    a, one, three = np.ones(4, np.float32), np.ones(1, np.float32), np.ones(3, np.float32)
    for call in (lambda x: transmuter.run(model, x), transmuter.compile(model)):
        assert call({"a": a, "b": one})["y"].shape == (4,)
        with pytest.raises(
            transmuter.LoweringError,
            match=r"'sum' \(Add\)(.|\n)*float32\[4\](.|\n)*float32\[3\](.|\n)*'n' is 4 in 'a' and 3 in 'b'",
        ):
            call({"a": a, "b": three})


def test_unknown_outputs_are_named() -> None:
    model = transmuter.load(linear())
    with pytest.raises(InputError, match="'nope'"):
        transmuter.run(model, {"x": X}, outputs=["nope"])
    with pytest.raises(InputError, match="'nope'"):
        transmuter.compile(model, outputs=["nope"])
    with pytest.raises(InputError, match="'nope'"):
        transmuter.compile(model, static_inputs=["nope"])


@pytest.mark.parametrize("dtype", [ml_dtypes.float6_e2m3fn, ml_dtypes.float6_e3m2fn])
def test_six_bit_floats_stay_outside_of_jax(dtype: type) -> None:
    """XLA has none, and aborts the process when it meets one."""
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes = [
        helper.make_node("Cast", ["x"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Neg", ["f"], ["n"]),
        helper.make_node("Cast", ["n"], ["y"], to=element),
        helper.make_node("Cast", ["y"], ["z"], to=TensorProto.FLOAT),
    ]
    model = transmuter.load(
        model_of(nodes, [info("x", (None,), element)], [info("y", None, element), info("z", None)], opset=28)
    )
    x = np.array([1, 1.5, -2, 0]).astype(dtype)
    for call in (lambda x: transmuter.run(model, x), transmuter.compile(model)):
        outputs = call({"x": x})
        assert outputs["y"].dtype == dtype
        np.testing.assert_array_equal(outputs["y"].astype(np.float32), -x.astype(np.float32))
        np.testing.assert_array_equal(outputs["z"], -x.astype(np.float32))
