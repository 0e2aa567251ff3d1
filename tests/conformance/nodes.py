"""One or two small nodes of every standard operator, each with its operands: what generic tests of lowerings run."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from conformance.suite import Case, cases

ELSEWHERE = {
    "test_control_flow.py": "If Loop Scan SequenceMap",
    "test_sequence.py": "ConcatFromSequence Optional OptionalGetElement OptionalHasElement SequenceAt "
    "SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength SplitToSequence",
    "test_text.py": "RegexFullMatch StringConcat StringNormalizer StringSplit TfIdfVectorizer",
    "test_image.py": "ImageDecoder",
    "test_ml.py": "CastMap CategoryMapper DictVectorizer LabelEncoder ZipMap",
}
"""Operators on graphs, sequences, optionals, maps, strings and encoded files, by the file of tests of their own."""


@dataclass(frozen=True)
class Node:
    """A node with its operands by position (None where one is absent) and the opset of its domain."""

    name: str
    proto: onnx.NodeProto
    operands: tuple[Any, ...]
    opset: int
    schema: onnx.defs.OpSchema

    @property
    def attributes(self) -> dict[str, Any]:
        return {a.name: helper.get_attribute_value(a) for a in self.proto.attribute}


@functools.cache
def operators() -> list[tuple[str, str]]:
    """The operators (domain and name) of ai.onnx and ai.onnx.ml that take part."""
    elsewhere = {name for names in ELSEWHERE.values() for name in names.split()}
    found = {(s.domain, s.name) for s in onnx.defs.get_all_schemas() if s.domain in ("", "ai.onnx.ml")}
    return sorted(o for o in found if o[1] not in elsewhere)


@functools.cache
def nodes() -> dict[tuple[str, str], list[Node]]:
    """Nodes by operator, of its newest version that the suite has: our own ones first, then the smallest."""
    found: dict[tuple[str, str], list[Node]] = defaultdict(list)
    for case in cases().values():
        node = _node(case)
        if node is not None:
            found[node.proto.domain, node.proto.op_type].append(node)
    chosen = {operator: _chosen(candidates) for operator, candidates in found.items()}
    for node in reversed(_own()):
        operator = node.proto.domain, node.proto.op_type
        chosen[operator] = [node, *chosen.get(operator, [])]
    return chosen


def _chosen(candidates: list[Node]) -> list[Node]:
    newest = max(node.schema.since_version for node in candidates)
    return sorted((n for n in candidates if n.schema.since_version == newest), key=_cost)


def _cost(node: Node) -> tuple[bool, ...]:
    """What `nodes` is sorted by: plain dtypes first, then few elements, with as many operands as there are."""
    operands = [o for o in node.operands if o is not None]
    sizes = [o.size for o in operands]
    is_plain = all(o.dtype.type.__module__ == "numpy" and o.dtype not in (object, np.float16) for o in operands)
    is_degenerate = (
        0 in sizes or max(sizes, default=2) < 2 or not all(np.isfinite(o).all() for o in operands if is_plain)
    )
    return not is_plain, is_degenerate, sum(sizes) > 150, -len(operands), sum(sizes), node.name


def _node(case: Case) -> Node | None:
    """The node of a case, if it has but one and takes tensors alone."""
    graph = case.model.graph
    if len(graph.node) != 1 or case.kind == "light" or graph.sparse_initializer:
        return None
    if graph.node[0].op_type == "Dropout" and case.is_random:
        return None
    given = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    names = [i.name for i in graph.input if i.name not in given]
    given |= dict(zip(names, case.data[0][0], strict=True))
    proto = graph.node[0]
    opset = next((o.version for o in case.model.opset_import if o.domain == proto.domain), 1)
    operands = tuple(given[name] if name else None for name in proto.input)
    if not all(o is None or isinstance(o, np.ndarray) for o in operands):
        return None
    return Node(case.name, proto, operands, opset, _schema(proto, opset))


def _schema(proto: onnx.NodeProto, opset: int) -> onnx.defs.OpSchema:
    return onnx.defs.get_schema(proto.op_type, max_inclusive_version=opset, domain=proto.domain)


def _own() -> list[Node]:
    """Nodes of the operators that the suite lacks, or has in cases that do not suit."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3)).astype(np.float32)
    image = rng.normal(size=(1, 2, 4, 4)).astype(np.float32)
    boxes = np.array([[0, 0, 0, 3, 3], [0, 1, 1, 2, 3]], np.float32)
    linear = {"coefficients": [1.0, -2.0, 0.5, 2.0, 0.0, 1.0], "intercepts": [0.1, 0.2]}
    tree = {
        "nodes_treeids": [0, 0, 0],
        "nodes_nodeids": [0, 1, 2],
        "nodes_featureids": [1, 0, 0],
        "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"],
        "nodes_values": [0.1, 0.0, 0.0],
        "nodes_truenodeids": [1, 0, 0],
        "nodes_falsenodeids": [2, 0, 0],
    }
    leaves = {"treeids": [0] * 4, "nodeids": [1, 1, 2, 2], "ids": [0, 1, 0, 1], "weights": [0.75, 0.25, 0.4, 0.6]}
    svm = {"coefficients": [0.5, -0.25], "support_vectors": [1.0, 0.0, 2.0, -1.0, 0.5, 0.5], "kernel_type": "RBF"}
    svm |= {"kernel_params": [0.5, 0.0, 3.0], "rho": [0.25]}

    def standard(op: str, operands: Sequence[np.ndarray], **attributes: Any) -> Node:
        return _made("", op, operands, attributes)

    def ml(op: str, operands: Sequence[np.ndarray], outputs: int = 1, **attributes: Any) -> Node:
        return _made("ai.onnx.ml", op, operands, attributes, outputs)

    return [
        standard("Cast", [3 * x], to=onnx.TensorProto.DOUBLE),
        standard("CastLike", [3 * x, x[0]]),
        standard("GlobalLpPool", [image], p=3),
        standard("MaxRoiPool", [image, boxes], pooled_shape=[2, 2]),
        standard("Multinomial", [x], sample_size=3),
        standard("RandomNormal", [], shape=[2, 3]),
        standard("RandomNormalLike", [x]),
        standard("RandomUniform", [], shape=[2, 3]),
        standard("RandomUniformLike", [x]),
        standard("ReduceMax", [x, np.array([1])]),
        standard("ReduceMin", [x, np.array([1])]),
        standard("Resize", [image, None, np.array([1, 1, 2, 0.6], np.float32)]),
        standard("Trilu", [x, np.array(1)]),
        ml("FeatureVectorizer", [x, x[:, :1]], inputdimensions=[3, 1]),
        ml("Imputer", [x], imputed_value_floats=[1.0], imputed_value_int64s=[7], replaced_value_int64=2),
        ml("LinearClassifier", [x], 2, classlabels_ints=[0, 1], post_transform="SOFTMAX", **linear),
        ml("LinearRegressor", [x], targets=2, **linear),
        ml("Normalizer", [x], norm="L2"),
        ml("OneHotEncoder", [np.array([0, 2, 1])], cats_int64s=[0, 1, 2]),
        ml("Scaler", [x], offset=[0.5], scale=[2.0]),
        ml("SVMClassifier", [x], 2, classlabels_ints=[0, 1], vectors_per_class=[1, 1], **svm),
        ml("SVMRegressor", [x], n_supports=2, **svm),
        ml("TreeEnsembleClassifier", [x], 2, classlabels_int64s=[0, 1], **tree, **_prefixed("class", leaves)),
        ml("TreeEnsembleRegressor", [x], n_targets=2, **tree, **_prefixed("target", leaves)),
    ]


def _prefixed(prefix: str, attributes: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}_{name}": value for name, value in attributes.items()}


def _made(domain: str, op: str, operands: Sequence[np.ndarray], attributes: dict[str, Any], outputs: int = 1) -> Node:
    names = [f"x{i}" for i in range(len(operands))]
    proto = helper.make_node(op, names, [f"y{i}" for i in range(outputs)], domain=domain, **attributes)
    newest = max(
        schema.since_version
        for schema in onnx.defs.get_all_schemas_with_history()
        if (schema.domain, schema.name) == (domain, op) and not schema.deprecated
    )
    return Node(op, proto, tuple(operands), newest, _schema(proto, newest))
