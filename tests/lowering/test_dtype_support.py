"""Every element type that a standard operator's schema allows is computed: what docs/operators.md says about dtypes.

For each type parameter of an operator, one small node runs with each of its types in turn. The result is compared with
that of ONNX Runtime, of ONNX Runtime in wider types (float32, int64), or of the `onnx` package's reference evaluator,
whichever has it first. All compute in the graph's own dtypes (`compute_type=None`).
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from comparison import assert_equal
from conformance.nodes import Node, nodes, operators
from generate_operators import NOT_COMPUTED
from onenode import run_node
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import transmuter

TOLERANCES = {  # of 8-bit floats, one step
    "float64": (1e-7, 1e-7),
    "float32": (1e-4, 1e-5),
    "float16": (1e-2, 1e-2),
    "bfloat16": (4e-2, 4e-2),
    "float8_e4m3fn": (2**-3, 2**-9),
    "float8_e4m3fnuz": (2**-3, 2**-10),
    "float8_e5m2": (2**-2, 2**-16),
    "float8_e5m2fnuz": (2**-2, 2**-17),
    "complex64": (1e-4, 1e-5),
    "complex128": (1e-7, 1e-7),
}
"""By dtype: rtol, and atol in units of the result's largest magnitude, if that is above 1. Others are exact."""

OUTPUT_TYPES = {
    "Bernoulli": ("T2", "dtype"),
    "BitCast": ("T2", "to"),
    "BlackmanWindow": ("T2", "output_datatype"),
    "Cast": ("T2", "to"),
    "Constant": ("T", "value"),
    "ConstantOfShape": ("T2", "value"),
    "EyeLike": ("T2", "dtype"),
    "HammingWindow": ("T2", "output_datatype"),
    "HannWindow": ("T2", "output_datatype"),
    "MelWeightMatrix": ("T3", "output_datatype"),
    "Multinomial": ("T2", "dtype"),
    "RandomNormal": ("T", "dtype"),
    "RandomNormalLike": ("T2", "dtype"),
    "RandomUniform": ("T", "dtype"),
    "RandomUniformLike": ("T2", "dtype"),
}
"""Operators of which an attribute sets a type parameter."""

EXACT = {
    "BitCast",
    "Cast",
    "CastLike",
    "Constant",
    "ConstantOfShape",
    "DequantizeLinear",
    "Imputer",
    "QuantizeLinear",
    "TreeEnsemble",
}
"""Operators that mean something else in wider types."""

IN_FLOATS = {"GridSample", "Resize", "Upsample"}
"""Operators that compute integers in float32, as those of ai.onnx.ml do: what is wider than an integer is float32."""

EVALUATOR = "the reference evaluator"
WRONG = {
    ("CenterCropPad", EVALUATOR): "pads strings with numbers",
    ("Trilu", EVALUATOR): "fills up strings with numbers",
    ("GridSample", EVALUATOR): "rounds coordinates to the dtype of the image",
    ("Imputer", EVALUATOR): "takes the float for missing integers, too",
    ("TreeEnsembleClassifier", "ONNX Runtime"): "labels two classes by whether the second has a positive score",
    ("Resize", EVALUATOR): "drops imaginary parts",
    ("MaxUnpool", "ONNX Runtime"): "counts places in the output with the zeros that output_shape adds",
}
"""References that are not to be asked, and why."""

RANDOM = {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}

Binding = dict[str, np.dtype]
"""The dtype of each type parameter."""

_found: Counter[str] = Counter()


@pytest.fixture(scope="module", autouse=True)
def _counted() -> Iterator[None]:
    yield
    print("\ncompared with:", ", ".join(f"{reference} {count}" for reference, count in _found.most_common()))


@pytest.mark.parametrize("operator", operators(), ids="::".join)
def test_every_dtype_of_the_schema_is_computed(operator: tuple[str, str]) -> None:
    node = nodes()[operator][0]
    failures = []
    for binding in bindings(node):
        try:
            _check(node, binding)
        except Exception as error:
            label = ", ".join(f"{name}={kind}" for name, kind in binding.items())
            failures.append(f"{label}: {type(error).__name__}: {str(error).strip()}")
    assert not failures, f"{node.name} {node.attributes}\n" + "\n".join(failures)


@pytest.mark.parametrize(
    ("op", "operands", "attributes"),
    [
        ("Resize", [np.array([1, 1, 1.5, 0.7], np.float32)], {"mode": "linear"}),
        ("GridSample", [np.array([[[[-1, -1], [0.3, 0.5]]]], np.float32)], {"align_corners": 1}),
    ],
)
def test_complex_images_are_interpolated_part_by_part(op: str, operands: list[np.ndarray], attributes: dict) -> None:
    real, imaginary = np.random.default_rng(0).normal(size=(2, 1, 1, 4, 4))
    operands = [None, *operands] if op == "Resize" else operands
    of = lambda image: run_node(op, [image, *operands], attributes, opset=22)[0]
    np.testing.assert_allclose(of(real + 1j * imaginary), of(real) + 1j * of(imaginary), rtol=1e-12)


@pytest.mark.parametrize(("op", "types"), [(op, types) for op, types in NOT_COMPUTED.items()])
def test_the_other_types_are_refused(op: str, types: list[str]) -> None:
    node = nodes()["", op][0]
    for name in types:
        parameter = node.schema.inputs[0].type_str
        with pytest.raises(transmuter.LoweringError, match="strings cannot"):
            _check(node, _own_binding(node) | {parameter: _dtype(name)})


def bindings(node: Node) -> list[Binding]:
    """The node's own dtypes, and for each type parameter each other dtype that it may have, the rest kept."""
    own = _own_binding(node)
    found = [own]
    if node.proto.op_type == "BitCast":  # its two types are as wide as each other
        kinds = [_dtype(t) for t in node.schema.type_constraints[0].allowed_type_strs]
        width = {kind: ir.DataType.from_numpy(kind).bitwidth for kind in kinds}
        return [
            {"T1": kind, "T2": next(other for other in [*kinds[i + 1 :], *kinds] if width[other] == width[kind])}
            for i, kind in enumerate(kinds)
        ]
    for constraint in node.schema.type_constraints:
        name = constraint.type_param_str
        types = set(constraint.allowed_type_strs) - {f"tensor({t})" for t in NOT_COMPUTED.get(node.proto.op_type, ())}
        kinds = [_dtype(t) for t in sorted(types) if t.startswith("tensor(")]
        if name in own:
            found += [own | {name: kind} for kind in kinds if kind != own[name]]
    return found


def _own_binding(node: Node) -> Binding:
    binding = {}
    for name, operand in zip(_parameters(node.schema.inputs, len(node.operands)), node.operands):
        if operand is not None and "(" not in name:
            binding[name] = operand.dtype
    if node.proto.op_type in OUTPUT_TYPES:
        name, attribute = OUTPUT_TYPES[node.proto.op_type]
        value = node.attributes.get(attribute, TensorProto.FLOAT)
        binding[name] = _np(value.data_type if isinstance(value, TensorProto) else value)
    return binding


def _check(node: Node, binding: Binding) -> None:
    operands = [
        None if operand is None else converted(operand, binding.get(name, operand.dtype))
        for name, operand in zip(_parameters(node.schema.inputs, len(node.operands)), node.operands)
    ]
    for i, formal in enumerate(node.schema.inputs[: len(operands)]):
        if formal.name.endswith("zero_point") and operands[i] is not None and "float" in operands[i].dtype.name:
            operands[i] = np.zeros_like(operands[i])  # no other is allowed
    model = _model(node, operands, binding)
    feeds = {f"x{i}": x for i, x in enumerate(operands) if x is not None}
    with jax.numpy_dtype_promotion("strict"):
        actual = list(transmuter.run(transmuter.load(model, compute_type=None), feeds).values())
    for name, value in zip(_parameters(node.schema.outputs, len(actual)), actual):
        kind = _dtype(name) if "(" in name else binding.get(name)
        assert kind is None or (value.dtype == kind), f"the result is {value.dtype}, not {kind}"
    reference, expected = _reference(node, operands, binding)
    _found[reference if expected is not None else f"nothing ({node.proto.op_type})"] += 1
    if expected is None:
        return
    for value, wanted in zip(map(np.asarray, actual), expected, strict=True):
        wanted = wanted if value.dtype == object else wanted.astype(value.dtype)
        rtol, atol = TOLERANCES.get(value.dtype.name, (0, 0))
        atol *= _magnitude(wanted)
        values = node.proto.op_type not in RANDOM
        assert_equal(value, wanted, rtol=rtol, atol=atol, where=f"against {reference}", values=values)


def _magnitude(value: np.ndarray) -> float:
    if value.dtype == object or value.size == 0:
        return 1.0
    return max(1.0, float(np.max(np.abs(value.astype(complex)), where=np.isfinite(value), initial=1)))


def _reference(node: Node, operands: list[Any], binding: Binding) -> tuple[str, list[np.ndarray] | None]:
    """The outputs by whichever can compute them, and its name."""
    op = node.proto.op_type
    wide = binding if op in EXACT else {name: _widened(kind, node.schema, name) for name, kind in binding.items()}
    names = _parameters(node.schema.inputs, len(operands))
    widened = [o if o is None else o.astype(wide.get(n, o.dtype)) for n, o in zip(names, operands)]
    for label, run, given, kinds in (
        ("ONNX Runtime", _onnxruntime, operands, binding),
        ("ONNX Runtime in wider types", _onnxruntime, widened, wide),
        ("the reference evaluator", _evaluator, operands, binding),
        ("the reference evaluator in wider types", _evaluator, widened, wide),
    ):
        if (op, label.removesuffix(" in wider types")) in WRONG:
            continue
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                return label, run(
                    _model(node, given, kinds), {f"x{i}": x for i, x in enumerate(given) if x is not None}
                )
        except Exception:
            continue
    return "nothing", None


def _onnxruntime(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    if any(x.dtype.type.__module__ != "numpy" for x in feeds.values()):
        raise NotImplementedError("dtypes of ml_dtypes")
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    if any(re.search(r"float[48]|bfloat|int[24]\b", output.type) for output in session.get_outputs()):
        raise NotImplementedError("it returns these as bytes")
    return session.run(None, feeds)


def _evaluator(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    return [np.asarray(y) for y in ReferenceEvaluator(model).run(None, feeds)]


def _widened(kind: np.dtype, schema: onnx.defs.OpSchema, name: str) -> np.dtype:
    """float32 or int64 for a narrower type, if the parameter allows it."""
    allowed = next(c.allowed_type_strs for c in schema.type_constraints if c.type_param_str == name)
    is_small = kind.type.__module__ != "numpy" or kind == np.float16
    computes_in_floats = schema.domain == "ai.onnx.ml" or schema.name in IN_FLOATS
    if "tensor(float)" in allowed and (
        ("float" in kind.name and is_small) or ("int" in kind.name and computes_in_floats)
    ):
        return np.dtype(np.float32)
    if "tensor(int64)" in allowed and "int" in kind.name and kind != np.uint64:
        return np.dtype(np.int64)
    return kind


def _model(node: Node, operands: list[Any], binding: Binding) -> onnx.ModelProto:
    proto = onnx.NodeProto()
    proto.CopyFrom(node.proto)
    proto.input[:] = ["" if x is None else f"x{i}" for i, x in enumerate(operands)]
    proto.output[:] = [name or f"unused{i}" for i, name in enumerate(proto.output)]
    if node.proto.op_type in OUTPUT_TYPES:
        parameter, attribute = OUTPUT_TYPES[node.proto.op_type]
        value: Any = helper.np_dtype_to_tensor_dtype(binding[parameter])
        if attribute == "value":
            value = numpy_helper.from_array(converted(np.array([2.0]), binding[parameter]))
        kept = [a for a in proto.attribute if a.name != attribute]
        del proto.attribute[:]
        proto.attribute.extend([*kept, helper.make_attribute(attribute, value)])
    for attribute in proto.attribute:
        if proto.op_type == "TreeEnsemble" and attribute.name in ("leaf_weights", "membership_values", "nodes_splits"):
            values = numpy_helper.to_array(attribute.t).astype(binding["T"])
            attribute.t.CopyFrom(numpy_helper.from_array(values))
    outputs = []
    for name, output in zip(_parameters(node.schema.outputs, len(proto.output)), proto.output):
        kind = _dtype(name) if "(" in name else binding.get(name)
        element = TensorProto.UNDEFINED if kind is None else helper.np_dtype_to_tensor_dtype(kind)
        outputs.append(
            helper.make_tensor_value_info(output, element, None) if element else onnx.ValueInfoProto(name=output)
        )
    graph = helper.make_graph(
        [proto],
        "one_node",
        [
            helper.make_tensor_value_info(f"x{i}", helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
            for i, x in enumerate(operands)
            if x is not None
        ],
        outputs,
    )
    imports = [helper.make_opsetid(proto.domain, node.schema.since_version)]
    if proto.domain:
        imports.append(helper.make_opsetid("", 21))
    return helper.make_model(graph, opset_imports=imports, ir_version=13 if node.schema.since_version > 25 else 11)


def converted(value: np.ndarray, kind: np.dtype) -> np.ndarray:
    """An operand's values in another dtype: fractions are stretched to whole numbers, signs dropped where need be."""
    if value.dtype == kind:
        return value
    if value.dtype == object:
        value = np.arange(value.size).reshape(value.shape)
    if kind.kind == "O":
        return np.array([f"{v:g}" for v in value.astype(np.float64).flat], object).reshape(value.shape)
    if kind.kind == "b":
        return value.astype(np.float64) > 0
    if kind.kind == "c":
        return (value + 0.5j * value).astype(kind)
    if "int" not in kind.name:
        return (np.abs(value) if kind == ml_dtypes.float8_e8m0fnu else value).astype(kind)
    wide = value.astype(np.float64)
    wide = wide if (wide == np.rint(wide)).all() else np.rint(3 * wide)
    bounds = ml_dtypes.iinfo(kind)
    return np.clip(wide if bounds.min else np.abs(wide), float(bounds.min), min(float(bounds.max), 2.0**52)).astype(
        kind
    )


def _parameters(formals: Any, count: int) -> list[str]:
    """The type parameters of the first `count` operands or results; the last one's repeats where it is variadic."""
    names = [f.type_str for f in formals]
    return (names + names[-1:] * count)[:count] if names else []


def _dtype(type_string: str) -> np.dtype:
    name = type_string.removeprefix("tensor(").removesuffix(")").upper()
    return _np(TensorProto.DataType.Value(name))


def _np(element: int) -> np.dtype:
    return ir.DataType(element).numpy()
