"""`diverge`: planted faults, accumulation, bounded memory, values that are no tensors, and the one-node model."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from building import info, model_of
from conftest import MATERIAL
from onnx import TensorProto, helper, numpy_helper

from transmuter.coverage import divergence, onenode
from transmuter.coverage.divergence import diverge
from transmuter.coverage.onenode import reproduce
from transmuter.errors import CoverageError, InputError, LoweringError
from transmuter.lowering import registry

random = np.random.default_rng(0)

FAULT = """
import dataclasses, inspect
from transmuter.lowering import registry

def plant(name, is_wrong, factor=1.01):
    '''Multiplies the results of an operator where `is_wrong` says so of its operands and attributes.'''
    versions = registry._LOWERINGS["", name]
    def wrapped(right):
        def lowering(*operands, **attributes):
            result = right.function(*operands, **attributes)
            return result * factor if is_wrong(operands, attributes) else result
        lowering.__signature__ = inspect.signature(right.function)
        return lowering
    faulty = [dataclasses.replace(right, function=wrapped(right)) for right in versions]
    registry._LOWERINGS["", name] = faulty
    registry.find.cache_clear()
"""
"""As text, so that a fresh process can plant the same fault."""


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`plant` of `FAULT`, undone after the test."""
    held: dict[str, Any] = {}
    exec(FAULT, held)
    monkeypatch.setattr(registry, "_LOWERINGS", dict(registry._LOWERINGS))
    yield held["plant"]
    registry.find.cache_clear()


def saved(proto: onnx.ModelProto, folder: Path) -> Path:
    onnx.save(proto, folder / "model.onnx")
    return folder / "model.onnx"


def long_graph(folder: Path, count: int = 600) -> Path:
    """`count` nodes of nine operators in a row, on (4, 16), whose values stay of the order of one; one of the Softmax
    nodes, deep inside, has another axis."""
    weight = random.normal(size=(16, 16)).astype(np.float32) / 4
    scale, bias = np.ones(16, np.float32), np.zeros(16, np.float32)
    weights = {"w": weight, "scale": scale, "bias": bias, "rows": np.array([4, 16]), "halves": np.array([8, 8])}
    nodes: list[onnx.NodeProto] = []
    x = "x"

    def add(op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> list[str]:
        names = [f"v{len(nodes)}{'_' * i}" for i in range(outputs)]
        nodes.append(helper.make_node(op, inputs, names, name=f"{op.lower()}{len(nodes)}", **attributes))
        return names

    while len(nodes) < count - 8:
        is_deep = len(nodes) == 396
        [h] = add("MatMul", x, "w")
        [g] = add("Softmax", h, axis=0 if is_deep else 1)
        [h] = add("Add", h, g)
        first, second = add("Split", h, "halves", outputs=2, axis=1)
        [h] = add("Concat", second, first, axis=1)
        [h] = add("Reshape", h, "rows")
        [h] = add("Tanh", h)
        [h] = add("Sub", h, x)
        [x] = add("LayerNormalization", h, "scale", "bias", axis=1)
    while len(nodes) < count:
        [x] = add("Sigmoid", x)
    initializers = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    return saved(model_of(nodes, [info("x", (4, 16))], [info(x, None)], initializers), folder)


@pytest.fixture
def x() -> dict[str, np.ndarray]:
    return {"x": random.normal(size=(4, 16)).astype(np.float32)}


def test_right_graph(tmp_path: Path, x: dict[str, np.ndarray]) -> None:
    found = diverge(long_graph(tmp_path), x)
    assert (found.node, found.found, found.outputs, found.case) == (None, None, (), None)
    assert (found.compared, found.nodes, len(found.passes)) == (600, 600, 1)
    assert str(found).startswith("model.onnx: no node and no output differs from ONNX Runtime.")
    with pytest.raises(CoverageError, match="no node differs by itself"):
        found.write(tmp_path / "node")


def test_planted_fault_is_named(tmp_path: Path, x: dict[str, np.ndarray], plant: Callable) -> None:
    path = long_graph(tmp_path)
    plant("Softmax", lambda operands, attributes: attributes["axis"] == 0)
    found = diverge(path, x)
    node = found.node
    assert node is not None
    assert (node.name, node.operator, node.version, node.opset, node.position) == ("softmax397", "Softmax", 13, 18, 397)
    assert node.attributes == {"axis": "0"}
    assert [(given.name, given.kind) for given in node.inputs] == [("v396", "float32[4, 16]")]
    [output] = node.outputs
    assert (output.name, output.size, output.odd) == ("v397", 64, "")
    right = found.case.outputs["v397"]
    assert output.count == np.sum(0.01 * right > 1e-4 + 1e-3 * right) > 60
    largest = output.absolute
    assert largest.difference == pytest.approx(0.01 * output.reference.maximum, rel=1e-3)
    assert largest.reference == pytest.approx(output.reference.maximum)
    assert largest.actual == pytest.approx(1.01 * largest.reference, rel=1e-5)
    assert output.relative.difference == pytest.approx(0.01, rel=1e-3)
    assert found.accumulated is None
    for part in (
        "node 398 of 600, softmax397 (Softmax version 13, opset 18)",
        "axis = 0",
        "input v396",
        "of 64 elements",
    ):
        assert part in str(found)
    told = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert told["node"]["outputs"][0]["absolute"]["index"] == list(largest.index)
    assert told["node"]["inputs"][0]["mean"] == pytest.approx(node.inputs[0].mean)


def test_one_node_model_reproduces_it_in_a_fresh_process(
    tmp_path: Path, x: dict[str, np.ndarray], plant: Callable
) -> None:
    path = long_graph(tmp_path)
    plant("Softmax", lambda operands, attributes: attributes["axis"] == 0)
    found = diverge(path, x)
    folder = tmp_path / "node"
    found.write(folder)
    expected = found.node.outputs[0].absolute.difference
    program = f"""
from pathlib import Path
{FAULT}
from transmuter.coverage.onenode import reproduce
folder = Path({str(folder)!r})
assert reproduce(folder) == []
plant("Softmax", lambda operands, attributes: attributes["axis"] == 0)
[output] = reproduce(folder)
print(output.absolute.difference)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == expected
    onnx.checker.check_model(folder / "model.onnx", full_check=True)
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    given, wanted = (
        numpy_helper.to_array(onnx.load_tensor(folder / "test_data_set_0" / file))
        for file in ("input_0.pb", "output_0.pb")
    )
    np.testing.assert_allclose(session.run(None, {"v396": given})[0], wanted, rtol=1e-5)


def test_weights_and_known_operands_are_initializers_of_the_one_node_model(
    tmp_path: Path, x: dict[str, np.ndarray], plant: Callable
) -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Tanh", ["x"], ["h"]),
        helper.make_node("Expand", ["row", "shape"], ["rows"], name="expand"),
        helper.make_node("Add", ["h", "rows"], ["y"]),
    ]
    row = numpy_helper.from_array(random.normal(size=(1, 16)).astype(np.float32), "row")
    path = saved(model_of(nodes, [info("x", ("n", 16))], [info("y", None)], [row]), tmp_path)
    plant("Expand", lambda operands, attributes: True)
    found = diverge(path, x)
    assert found.node.name == "expand"
    assert {t.name for t in found.case.model.graph.initializer} == {"row", "shape"}
    assert not found.case.inputs
    found.write(tmp_path / "node")
    assert [output.name for output in reproduce(tmp_path / "node")] == ["rows"]


def test_failing_node(tmp_path: Path, x: dict[str, np.ndarray], plant: Callable) -> None:
    path = long_graph(tmp_path, 40)

    def fails(operands: Any, attributes: Any) -> bool:
        raise ValueError("no such luck")

    plant("Tanh", fails)
    found = diverge(path, x)
    assert (found.node.name, found.node.outputs) == ("tanh6", ())
    assert "no such luck" in found.node.error
    assert "node 7 of 40, tanh6 (Tanh version 13, opset 18), fails on ONNX Runtime's own values" in str(found)
    found.write(tmp_path / "node")
    with pytest.raises(LoweringError, match="no such luck"):
        reproduce(tmp_path / "node")


def test_accumulation(tmp_path: Path, x: dict[str, np.ndarray], plant: Callable) -> None:
    """Each product is wrong by 3e-5 of itself, which is within the tolerance: 64 of them are not."""
    nodes = [helper.make_node("Mul", [f"h{i}", "one"], [f"h{i + 1}"], name=f"mul{i}") for i in range(64)]
    nodes = [helper.make_node("Exp", ["x"], ["h0"]), *nodes]
    one = numpy_helper.from_array(np.ones(1, np.float32), "one")
    path = saved(model_of(nodes, [info("x", (4, 16))], [info("h64", None)], [one]), tmp_path)
    plant("Mul", lambda operands, attributes: True, factor=1.00003)
    found = diverge(path, x)
    assert found.node is None
    assert found.outputs == ("h64",)
    assert found.found is found.accumulated
    largest = math.exp(x["x"].max())  # where 1e-4 + 1e-3 |reference| is passed first
    steps = next(n for n in range(1, 65) if largest * (1.00003**n - 1) > 1e-4 + 1e-3 * largest)
    assert abs(found.accumulated.position - steps) <= 1
    assert "no node differs by itself, but the whole graph does: h64" in str(found)
    assert found.growth[0][0] == "mul0"
    assert found.growth[0][1] == pytest.approx(3e-5, rel=0.1)
    assert len(found.growth) == 2


def test_chunks_bound_what_is_asked_for(
    tmp_path: Path, x: dict[str, np.ndarray], plant: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = long_graph(tmp_path, 90)
    asked: list[int] = []
    session = onnxruntime.InferenceSession

    class Counting(session):
        def run(self, names: list[str], inputs: Mapping[str, Any], options: Any = None) -> list[Any]:
            values = super().run(names, inputs, options)
            assert len(self.get_outputs()) == len(names)
            asked.append(sum(value.nbytes for value in values))
            return values

    monkeypatch.setattr(onnxruntime, "InferenceSession", Counting)
    limit = 8 * 256  # eight values of (4, 16)
    found = diverge(path, x, chunk_bytes=limit)
    assert found.compared == 90
    assert tuple(asked) == found.passes
    assert len(asked) >= 90 * 256 / limit
    assert max(asked) <= limit
    asked.clear()
    assert diverge(path, x, chunk_bytes=1).compared == 90  # a node's own values are the least
    assert len(asked) == 90
    assert max(asked) <= 4 * 256
    plant("Tanh", lambda operands, attributes: True)
    assert diverge(path, x, chunk_bytes=limit).node.name == "tanh6"


def test_our_values_are_let_go_of(tmp_path: Path, x: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    compare = divergence._Search._compare

    def counting(self: Any, *args: Any) -> Any:
        found = compare(self, *args)
        held.append(len(self._own.values))
        return found

    monkeypatch.setattr(divergence._Search, "_compare", counting)
    diverge(long_graph(tmp_path, 90), x, chunk_bytes=2048)
    assert max(held) <= 4


def test_sequences_optionals_strings_and_maps(tmp_path: Path, plant: Callable) -> None:
    nodes = [
        helper.make_node("SplitToSequence", ["x", "two"], ["parts"], axis=0),
        helper.make_node("SequenceInsert", ["parts", "x"], ["more"], name="insert"),
        helper.make_node("Optional", ["more"], ["some"]),
        helper.make_node("OptionalHasElement", ["some"], ["has"]),
        helper.make_node("OptionalGetElement", ["some"], ["got"]),
        helper.make_node("ConcatFromSequence", ["got"], ["whole"], axis=0),
        helper.make_node("Dropout", ["whole"], ["dropped"]),
        helper.make_node("MaxPool", ["image"], ["pooled", ""], kernel_shape=[2, 2]),
        helper.make_node("StringConcat", ["s", "s"], ["t"]),
        helper.make_node("ZipMap", ["dropped"], ["map"], domain="ai.onnx.ml", classlabels_int64s=[3, 4]),
    ]
    floats = {"x": (4, 2), "image": (1, 1, 4, 4)}
    inputs = [*(info(name, shape) for name, shape in floats.items()), info("s", (2,), TensorProto.STRING)]
    kind = helper.make_sequence_type_proto(
        helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, ()))
    )
    outputs = [
        info("has", (), TensorProto.BOOL),
        info("pooled", None),
        info("t", None, TensorProto.STRING),
        helper.make_value_info("map", kind),
    ]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnx.ml", 1)]
    two = numpy_helper.from_array(np.array(2), "two")
    path = saved(model_of(nodes, inputs, outputs, [two], opset_imports=opsets), tmp_path)
    given = {name: random.normal(size=shape).astype(np.float32) for name, shape in floats.items()}
    given["s"] = np.array(["a", "ü"], object)
    found = diverge(path, given)
    assert (found.node, found.outputs, found.skipped) == (None, (), ())
    assert found.compared == len(nodes)

    plant("ConcatFromSequence", lambda operands, attributes: True)
    found = diverge(path, given)
    assert found.node.operator == "ConcatFromSequence"
    assert found.node.inputs[0].kind == "sequence of 3: float32[2, 2], float32[2, 2], float32[4, 2]"
    found.write(tmp_path / "node")
    assert [output.name for output in reproduce(tmp_path / "node")] == ["whole"]


def test_sequence_of_another_length(tmp_path: Path) -> None:
    found, rms = divergence.deviation("q", [np.ones(2)], [np.ones(2), np.ones(3)], 0, 0, False)
    assert found.odd == "Its structure is another."
    assert rms == math.inf
    found, _ = divergence.deviation("q", [np.ones(2), np.ones(3)], [np.ones(2), np.zeros(3)], 0, 0, False)
    assert (found.name, found.count, found.absolute.index) == ("q[1]", 3, (0,))


def test_subgraph_counts_as_its_outer_node(tmp_path: Path, x: dict[str, np.ndarray], plant: Callable) -> None:
    """With a captured value, a weight of the branch's own, and inside of it the wrong node."""
    weight = random.normal(size=(16, 16)).astype(np.float32)
    branch = helper.make_graph(
        [helper.make_node("MatMul", ["h", "inner"], ["m"]), helper.make_node("Elu", ["m"], ["b"])],
        "then",
        [],
        [info("b", None)],
        [numpy_helper.from_array(weight, "inner")],
    )
    other = helper.make_graph([helper.make_node("Neg", ["h"], ["c"])], "else", [], [info("c", None)])
    nodes = [
        helper.make_node("Tanh", ["x"], ["h"]),
        helper.make_node("ReduceMax", ["x"], ["top"], keepdims=0),
        helper.make_node("Greater", ["top", "zero"], ["positive"]),
        helper.make_node("If", ["positive"], ["y"], name="choice", then_branch=branch, else_branch=other),
    ]
    zero = numpy_helper.from_array(np.float32(0), "zero")
    path = saved(model_of(nodes, [info("x", (4, 16))], [info("y", None)], [zero]), tmp_path)
    assert diverge(path, x).node is None
    plant("Elu", lambda operands, attributes: True)
    found = diverge(path, x)
    assert (found.node.name, found.node.operator) == ("choice", "If")
    assert found.node.attributes == {"then_branch": "a graph of 2 nodes", "else_branch": "a graph of 1 nodes"}
    assert {"h", "positive"} <= {given.name for given in found.node.inputs}
    found.write(tmp_path / "node")
    assert [output.name for output in reproduce(tmp_path / "node")] == ["y"]


def test_nodes_of_functions_are_seen(tmp_path: Path, x: dict[str, np.ndarray], plant: Callable) -> None:
    body = [helper.make_node("Tanh", ["a"], ["t"], name="inside"), helper.make_node("Neg", ["t"], ["b"])]
    function = helper.make_function("local", "twist", ["a"], ["b"], body, [helper.make_opsetid("", 18)])
    nodes = [
        helper.make_node("twist", ["x"], ["h"], domain="local"),
        helper.make_node("twist", ["h"], ["y"], domain="local"),
    ]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("local", 1)]
    proto = model_of(nodes, [info("x", (4, 16))], [info("y", None)], opset_imports=opsets, functions=[function])
    path = saved(proto, tmp_path)
    found = diverge(path, x)
    assert (found.compared, found.nodes, found.skipped) == (4, 4, ())
    plant("Tanh", lambda operands, attributes: abs(operands[0]).max() < 1)  # the second call alone
    found = diverge(path, x)
    assert (found.node.operator, found.node.position) == ("Tanh", 2)


def test_random_nodes_are_not_compared(tmp_path: Path, x: dict[str, np.ndarray], plant: Callable) -> None:
    nodes = [
        helper.make_node("RandomNormalLike", ["x"], ["noise"], name="noise"),
        helper.make_node("Add", ["x", "noise"], ["h"]),
        helper.make_node("Tanh", ["h"], ["y"]),
    ]
    path = saved(model_of(nodes, [info("x", (4, 16))], [info("y", None)]), tmp_path)
    found = diverge(path, x)
    assert (found.node, found.accumulated, found.compared) == (None, None, 2)
    assert found.skipped == ("noise draws random numbers; the nodes behind it run on ONNX Runtime's",)
    plant("Tanh", lambda operands, attributes: True)
    assert diverge(path, x).node.operator == "Tanh"


def test_values_that_onnxruntime_does_not_return(tmp_path: Path, x: dict[str, np.ndarray]) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["small"], to=TensorProto.BFLOAT16),
        helper.make_node("Cast", ["small"], ["y"], to=TensorProto.FLOAT),
    ]
    path = saved(model_of(nodes, [info("x", (4, 16))], [info("y", None)]), tmp_path)
    found = diverge(path, x)
    assert (found.node, found.outputs) == (None, ())
    assert found.skipped == ("ONNX Runtime does not return 'small', tensor(bfloat16)",)


def test_sums_that_cancel_are_rounding(tmp_path: Path, plant: Callable) -> None:
    """Sums of 2000 numbers of the size of 1e4 that nearly vanish differ by more than the tolerance, and by rounding
    alone; a larger fault of the same node is found."""
    half = random.normal(size=(8, 1000)).astype(np.float32) * 1e4
    given = {"x": np.concatenate([half, -half * (1 + 1e-6)], 1)[:, random.permutation(2000)]}
    nodes = [helper.make_node("Add", ["x", "one"], ["h"]), helper.make_node("ReduceSum", ["h"], ["y"])]
    one = numpy_helper.from_array(np.zeros(2000, np.float32), "one")
    path = saved(model_of(nodes, [info("x", (8, 2000))], [info("y", None)], [one]), tmp_path)
    found = diverge(path, given)
    assert found.node is None
    assert found.amplified == ("y",)
    assert "1 of them differ no more than rounding explains: y" in str(found)
    plant("ReduceSum", lambda operands, attributes: True, factor=1000)
    assert diverge(path, given).node.name == "y"


def test_external_data(tmp_path: Path, x: dict[str, np.ndarray]) -> None:
    path = long_graph(tmp_path, 20)
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights.bin", size_threshold=128)
    assert diverge(path, x).compared == 20


def test_errors(tmp_path: Path, x: dict[str, np.ndarray]) -> None:
    unknown = model_of([helper.make_node("Frobnicate", ["x"], ["y"])], [info("x", (4, 16))], [info("y", None)])
    with pytest.raises(CoverageError, match=r"ONNX Runtime fails on model\.onnx.*Frobnicate"):
        diverge(saved(unknown, tmp_path), x)
    path = long_graph(tmp_path, 20)
    with pytest.raises(InputError, match="'x' is missing"):
        diverge(path, {})


def test_statistics() -> None:
    value = np.array([[1, np.nan, -np.inf], [3, 2, np.inf]], np.float32)
    found = divergence.Statistics.of("v", value)
    assert dataclasses.astuple(found) == ("v", "float32[2, 3]", 1.0, 3.0, 2.0, 1, 2)
    assert str(found) == "float32[2, 3]  1 to 3, mean 2, 1 NaN, 2 infinite"
    assert str(divergence.Statistics.of("v", np.zeros((0, 2), np.int64))) == "int64[0, 2]"
    assert divergence.Statistics.of("v", None).kind == "absent"
    assert divergence.Statistics.of("v", [{3: 1.0}]).kind == "sequence of 1: map of 1: float64[]"


def test_types_as_onnxruntime_spells_them() -> None:
    for text in ("tensor(int64)", "seq(tensor(string))", "optional(seq(tensor(float)))"):
        assert onnx.helper.printable_type(onenode.type_proto(text))
    kind = onenode.type_proto("seq(map(int64,tensor(float)))").sequence_type.elem_type.map_type
    assert (kind.key_type, kind.value_type.tensor_type.elem_type) == (TensorProto.INT64, TensorProto.FLOAT)


@pytest.mark.skipif(not (MATERIAL / "models").exists(), reason=f"no recorded models at {MATERIAL}")
def test_recorded_model() -> None:
    """A quantised one, whose noise becomes whole steps: no node is wrong."""
    folder = MATERIAL / "models" / "text2tashkeel--bilstm_int8"
    with np.load(folder / "case0.npz") as arrays:
        inputs = {name[3:]: arrays[name] for name in arrays if name.startswith("in:")}
    found = diverge(folder / "model.onnx", inputs, chunk_bytes=1 << 20)
    assert found.node is None, str(found)
    assert found.compared == found.nodes == 80
    assert len(found.passes) > 1
