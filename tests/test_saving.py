"""`Model.save`: what it writes runs in ONNX Runtime with equal results."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import transmuter


def affine(dtype: type = np.float32) -> onnx.ModelProto:
    """tanh(x @ w + b) * s, with s in a Constant node."""
    random = np.random.default_rng(0)
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    weights = {"w": random.normal(size=(8, 5)), "b": random.normal(size=5)}
    tensors = [numpy_helper.from_array(a.astype(dtype), n) for n, a in weights.items()]
    scale = numpy_helper.from_array(np.full(20, 0.5, dtype).reshape(4, 5), "scale")
    nodes = [
        helper.make_node("Constant", [], ["s"], value=scale),
        helper.make_node("MatMul", ["x", "w"], ["xw"]),
        helper.make_node("Add", ["xw", "b"], ["h"]),
        helper.make_node("Tanh", ["h"], ["t"]),
        helper.make_node("Mul", ["t", "s"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", element, ["n", 8])
    y = helper.make_tensor_value_info("y", element, ["n", 5])
    graph = helper.make_graph(nodes, "affine", [x], [y], tensors, doc_string="kept")
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name="p")
    helper.set_model_props(model, {"task": "test"})
    return model


def run_in_onnxruntime(path: Path, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, inputs)


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(4, 8)).astype(np.float32)


@pytest.mark.parametrize("external", [None, True, False])
def test_new_params_are_in_the_file(tmp_path, x, external):
    model = transmuter.load(affine())
    params = {name: array * 2 - 0.1 for name, array in model.params.items()}
    model.save(tmp_path / "new.onnx", params=params, external_data=external)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new.onnx"] + ["new.onnx.data"] * bool(external)
    (actual,) = run_in_onnxruntime(tmp_path / "new.onnx", {"x": x})
    np.testing.assert_allclose(actual, transmuter.compile(model)({"x": x}, params=params)["y"], atol=1e-6)
    again = transmuter.load(tmp_path / "new.onnx")
    assert again.params.keys() == params.keys()
    for name, array in again.params.items():
        np.testing.assert_array_equal(array, params[name])


def test_the_models_own_weights_survive_preparation(tmp_path, x):
    model = transmuter.load(affine())
    expected = transmuter.compile(model, {"x": x})({"x": x})["y"]  # which replaces weights by prepared ones
    model.save(tmp_path / "same.onnx")
    np.testing.assert_allclose(run_in_onnxruntime(tmp_path / "same.onnx", {"x": x})[0], expected, atol=1e-6)


def test_what_is_no_weight_stays(tmp_path):
    transmuter.load(affine()).save(tmp_path / "m.onnx")
    saved = onnx.load(tmp_path / "m.onnx")
    onnx.checker.check_model(saved, full_check=True)
    assert saved.producer_name == "p"
    assert {p.key: p.value for p in saved.metadata_props} == {"task": "test"}
    assert saved.graph.doc_string == "kept"
    assert [i.name for i in saved.graph.input] == ["x"]
    assert saved.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "n"


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_halves_stay_halves(tmp_path, x, dtype):
    model = transmuter.load(affine(dtype))
    masters = {name: array.astype(np.float32) * 1.5 for name, array in model.params.items()}
    model.save(tmp_path / "half.onnx", params=masters)
    again = transmuter.load(tmp_path / "half.onnx").params
    for name, array in masters.items():
        assert again[name].dtype == dtype
        np.testing.assert_array_equal(again[name], array.astype(dtype))


def test_a_param_too_large_for_float16_is_refused(tmp_path):
    model = transmuter.load(affine(np.dtype(np.float16)))
    masters = {name: array.astype(np.float32) for name, array in model.params.items()}
    masters["w"] = masters["w"].at[0, 0].set(1e6)
    with pytest.raises(transmuter.InputError, match=r"'w' holds 1e\+06, which the float16"):
        model.save(tmp_path / "half.onnx", params=masters)
    assert not list(tmp_path.iterdir())


def test_params_that_do_not_fit_are_refused(tmp_path):
    model = transmuter.load(affine(), trainable=True)
    with pytest.raises(transmuter.InputError, match="'w' is missing"):
        model.save(tmp_path / "m.onnx", params={n: a for n, a in model.params.items() if n != "w"})
    with pytest.raises(transmuter.InputError, match="shape"):
        model.save(tmp_path / "m.onnx", params={**model.params, "b": jnp.zeros(6)})
    with pytest.raises(transmuter.InputError, match="being traced"):
        jax.jit(lambda p: model.save(tmp_path / "m.onnx", params=p))(model.params)
    assert not list(tmp_path.iterdir())


def test_the_file_that_it_came_from_can_be_replaced(tmp_path, x):
    path = tmp_path / "m.onnx"
    onnx.save(affine(), path, save_as_external_data=True, location="m.onnx.data", size_threshold=0)
    model = transmuter.load(path)
    doubled = {name: array * 2 for name, array in model.params.items()}
    model.save(path, params=doubled, external_data=True)
    np.testing.assert_array_equal(transmuter.load(path).params["w"], model.params["w"] * 2)


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        transmuter.load(affine()).save(tmp_path / "none" / "m.onnx")


def test_subgraphs_have_their_weights(tmp_path, x):
    """Both branches have an initializer of one name."""
    branch = {}
    for name, factor in (("then", 2.0), ("else", 3.0)):
        table = numpy_helper.from_array(np.full((4, 8), factor, np.float32), "table")
        node = helper.make_node("Mul", ["x", "table"], [f"{name}_y"])
        info = helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, [4, 8])
        branch[f"{name}_branch"] = helper.make_graph([node], name, [], [info], [table])
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 8])]
    inputs.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 8])
    graph = helper.make_graph([helper.make_node("If", ["c"], ["y"], **branch)], "g", inputs, [output])
    model = transmuter.load(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), trainable=True
    )
    assert sorted(model.params) == ["table", "table#1"]
    factors = {"table": 5.0, "table#1": 7.0}
    model.save(tmp_path / "m.onnx", params={n: jnp.full((4, 8), f) for n, f in factors.items()})
    results = [run_in_onnxruntime(tmp_path / "m.onnx", {"x": x, "c": np.array(c)})[0] for c in (True, False)]
    np.testing.assert_allclose(sorted(float(y[0, 0] / x[0, 0]) for y in results), [5.0, 7.0], rtol=1e-6)
