"""ai.onnx.ml and the optimiser steps: against ONNX Runtime, differentiated, compiled, with labels that are strings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import pytest
from comparison import assert_equal
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from onenode import ort_node, run_node
from onnx import TensorProto as T
from onnx import helper, numpy_helper, parser

import transmuter

F32 = np.float32
ML = "ai.onnx.ml"
TRANSFORMS = ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT"]
CLASSIFIED = [T.INT64, T.FLOAT]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def node(
    op: str, x: Any, attributes: Mapping[str, Any], outputs: list[Any], version: int = 3, input_type: Any = None
) -> onnx.ModelProto:
    """A model of one node with the input `x`. `outputs` are element types, or types of other values."""

    def value(name: str, kind: Any) -> onnx.ValueInfoProto:
        kind = helper.make_tensor_type_proto(kind, None) if isinstance(kind, int) else kind
        return helper.make_value_info(name, kind)

    given = input_type or helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
    names = [f"y{i}" for i in range(len(outputs))]
    graph = helper.make_graph(
        [helper.make_node(op, ["x"], names, domain=ML, **attributes)],
        "one_node",
        [value("x", given)],
        [value(n, k) for n, k in zip(names, outputs, strict=True)],
    )
    imports = [helper.make_opsetid("", 20), helper.make_opsetid(ML, version)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def run(proto: onnx.ModelProto, x: Any) -> list[Any]:
    return list(transmuter.run(transmuter.load(proto), {"x": x}).values())


def assert_same(
    op: str, x: Any, attributes: Mapping[str, Any], outputs: list[Any], *, compiled: bool = True, **options: Any
) -> None:
    """Eager and, on request, compiled results are ONNX Runtime's."""
    proto = node(op, x, attributes, outputs, **options)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(None, {"x": x})
    results = [run(proto, x)]
    if compiled:
        results.append(list(transmuter.compile(transmuter.load(proto))({"x": x}).values()))
    for actual in results:
        for result, wanted in zip(actual, expected, strict=True):
            result = np.asarray(result) if isinstance(result, jax.Array) else result
            assert_equal(result, wanted, rtol=1e-4, atol=1e-5)


def function(
    op: str, x: np.ndarray, attributes: Mapping[str, Any], outputs: list[int], of: int = 0, **options: Any
) -> Any:
    """One of the operator's outputs as a function of its input."""
    model = transmuter.load(node(op, x, attributes, outputs, **options))
    return lambda x: model.apply({}, [x])[f"y{of}"]


# ---- features -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64, np.int32])
def test_features_of_every_dtype(kind: Any, rng: np.random.Generator) -> None:
    x = (rng.normal(size=(4, 3)) * 10).astype(kind)
    assert_same("Scaler", x, {"offset": [0.1, 0.2, 0.3], "scale": [1.0, 2.0, 3.0]}, [T.FLOAT], version=1)
    assert_same("Scaler", x, {"offset": [0.1], "scale": [3.0]}, [T.FLOAT], version=1)
    (y,) = run(node("Binarizer", x, {"threshold": 0.5}, [helper.np_dtype_to_tensor_dtype(x.dtype)], version=1), x)
    assert_equal(np.asarray(y), (x > x.dtype.type(0.5)).astype(kind))
    assert_same("FeatureVectorizer", x, {"inputdimensions": [3]}, [T.FLOAT], version=1)
    for norm in ("MAX", "L1", "L2"):
        for rows in (x, x[0], x * 0):
            assert_same("Normalizer", rows, {"norm": norm}, [T.FLOAT], version=1)


def test_imputer() -> None:
    x = np.array([[1, np.nan, 3], [0, 5, 0]], F32)
    replaced = {"imputed_value_floats": [7.0, 8.0, 9.0], "replaced_value_float": float("nan")}
    assert_same("Imputer", x, replaced, [T.FLOAT], version=1)
    assert_same("Imputer", x, {"imputed_value_floats": [7.0], "replaced_value_float": 0.0}, [T.FLOAT], version=1)
    numbers = {"imputed_value_int64s": [7, 9], "replaced_value_int64": 1}
    assert_same("Imputer", np.array([[1, 2], [3, 1]]), numbers, [T.INT64], version=1)


@pytest.mark.parametrize("norm", ["MAX", "L1", "L2"])
def test_normalizer_has_gradients_even_at_zero(norm: str, rng: np.random.Generator) -> None:
    x = rng.random((3, 4)).astype(F32) + 0.5
    normalize = function("Normalizer", x, {"norm": norm}, [T.FLOAT], version=1)
    check_grads(normalize, (jnp.asarray(x),), 1, modes=["rev"], rtol=1e-2, atol=1e-2)
    assert np.isfinite(jax.grad(lambda x: normalize(x).sum())(jnp.zeros_like(x))).all()


EDGES = st.sampled_from([0.0, -0.0, 1.0, -0.5, 2.5, np.inf, -np.inf, np.nan])


@settings(max_examples=15, deadline=None)
@given(
    values=st.lists(EDGES, min_size=6, max_size=6),
    shape=st.sampled_from([(2, 3), (6,), (0, 3)]),
    replaced=st.sampled_from([0.0, 1.0, np.nan, np.inf]),
    imputed=st.sampled_from([[7.0], [7.0, -0.0, np.inf]]),
)
def test_missing_values(values: list[float], shape: Any, replaced: float, imputed: list[float]) -> None:
    x = np.array(values[: int(np.prod(shape))], F32).reshape(shape)
    imputed = imputed if shape[-1] == 3 else imputed[:1]
    attributes = {"imputed_value_floats": imputed, "replaced_value_float": replaced}
    assert_same("Imputer", x, attributes, [T.FLOAT], version=1, compiled=False)
    if not np.isnan(x).any():
        assert_same("Binarizer", x, {"threshold": replaced}, [T.FLOAT], version=1, compiled=False)


@settings(max_examples=10, deadline=None)
@given(
    shape=st.sampled_from([(2, 3), (3,), (0, 3), (2, 2, 3)]),
    picked=st.lists(st.integers(0, 2), min_size=1, max_size=4),
    kind=st.sampled_from([F32, np.int64, object]),
)
def test_picked_features(shape: Any, picked: list[int], kind: Any) -> None:
    x = np.arange(np.prod(shape)).reshape(shape)
    x = x.astype(str).astype(object) if kind is object else x.astype(kind)
    inputs, options = [x, np.array(picked)], {"domain": ML, "known": [1]}
    (wanted,), (y,) = (f("ArrayFeatureExtractor", inputs, **options) for f in (ort_node, run_node))
    assert_equal(y, wanted)


@pytest.mark.parametrize("picked", [-1, 3])
def test_features_that_are_not_there(picked: int) -> None:
    with pytest.raises(transmuter.TransmuterError, match="wanted of 3"):
        run_node("ArrayFeatureExtractor", [np.zeros((2, 3), F32), np.array([picked])], domain=ML)


def test_nan_stays_in_a_normalized_row() -> None:
    x = np.array([[np.nan, 1, 2], [3, 4, 0]], F32)
    for norm, wanted in (("MAX", [0.75, 1, 0]), ("L1", [3 / 7, 4 / 7, 0]), ("L2", [0.6, 0.8, 0])):
        (y,) = run(node("Normalizer", x, {"norm": norm}, [T.FLOAT], version=1), x)
        np.testing.assert_allclose(y, [[np.nan] * 3, wanted], rtol=1e-6)


# ---- tables and maps ------------------------------------------------------------------------------------------------

TABLES = {
    "floats": (F32, T.FLOAT, [1.0, np.nan, 0.0, -0.5], [1.0, np.nan, -0.0, -0.5, np.inf, 2.0]),
    "int64s": (np.int64, T.INT64, [1, 0, -5, 2**62], [1, 0, -5, 2**62, 2**62 + 1, -(2**63)]),
    "strings": (object, T.STRING, ["", "a", "é", "A"], ["", "a", "É", "é", "A", "zz"]),
}


@settings(max_examples=25, deadline=None)
@given(
    keys=st.sampled_from(list(TABLES)),
    values=st.sampled_from(list(TABLES)),
    default=st.sampled_from([None, 1]),
    shape=st.sampled_from([(6,), (2, 3), (0,), ()]),
)
def test_encoded_labels(keys: str, values: str, default: int | None, shape: tuple[int, ...]) -> None:
    kind, _, known, asked = TABLES[keys]
    _, type_, mapped, _ = TABLES[values]
    attributes: dict[str, Any] = {f"keys_{keys}": known, f"values_{values}": mapped}
    if default is not None:
        attributes[f"default_{values[:-1]}"] = mapped[default]
    x = np.array(asked, kind)[: int(np.prod(shape))].reshape(shape)
    assert_same("LabelEncoder", x, attributes, [type_], version=4, compiled=False)


@settings(max_examples=15, deadline=None)
@given(
    numbers=st.lists(st.sampled_from([-3, 0, 1, 2, 9]), min_size=1, max_size=4),
    words=st.lists(st.sampled_from(["", "a", "é", "A"]), min_size=1, max_size=4),
)
def test_categories(numbers: list[int], words: list[str]) -> None:
    mapping = {"cats_strings": ["", "a", "é"], "cats_int64s": [1, 0, -3]}
    x, y = np.array(numbers), np.array(words, object)
    assert_same("CategoryMapper", x, mapping, [T.STRING], version=1, compiled=False)
    assert_same("CategoryMapper", y, {**mapping, "default_int64": 7}, [T.INT64], version=1, compiled=False)
    for kind in (np.int64, F32):
        floats = x.astype(kind) + kind(0.5 if kind is F32 else 0)
        assert_same("OneHotEncoder", floats, {"cats_int64s": [1, 0, -3]}, [T.FLOAT], version=1, compiled=False)
    assert_same("OneHotEncoder", y, {"cats_strings": ["", "é"]}, [T.FLOAT], version=1, compiled=False)
    assert_same("LabelEncoder", y, {"classes_strings": ["a", ""]}, [T.INT64], version=1, compiled=False)
    classes = {"classes_strings": ["a", ""], "default_string": "none"}
    assert_same("LabelEncoder", x, classes, [T.STRING], version=1, compiled=False)


def test_encoders() -> None:
    floats, words = np.array([1, np.nan, 2, 3, -0.0], F32), np.array([["a", "c"], ["b", "a"]], object)
    keys = [1.0, float("nan"), 0.0]
    assert_same("LabelEncoder", floats, {"keys_floats": keys, "values_floats": [5.0, 6.0, 7.0]}, [T.FLOAT], version=4)
    assert_same("LabelEncoder", floats, {"keys_floats": keys, "values_strings": ["x", "y", "z"]}, [T.STRING], version=4)
    assert_same("LabelEncoder", words, {"keys_strings": ["a", "b"], "values_int64s": [5, 6]}, [T.INT64], version=2)
    assert_same("LabelEncoder", words, {"classes_strings": ["a", "b"]}, [T.INT64], version=1)
    assert_same("LabelEncoder", np.array([0, 1, 5]), {"classes_strings": ["a", "b"]}, [T.STRING], version=1)
    tensors = {
        "keys_tensor": numpy_helper.from_array(np.array([3, 2], np.int16)),
        "values_tensor": numpy_helper.from_array(np.array([0.5, 0.25])),
        "default_tensor": numpy_helper.from_array(np.array([9.0])),
    }
    x = np.array([1, 2, 3], np.int16)
    (y,) = run(node("LabelEncoder", x, tensors, [T.DOUBLE], version=4), x)
    assert_equal(np.asarray(y), np.array([9, 0.25, 0.5]))
    mapping = {"cats_strings": ["a", "b"], "cats_int64s": [4, 5]}
    assert_same("CategoryMapper", words, mapping, [T.INT64], version=1)
    assert_same("CategoryMapper", np.array([[4, 7]]), mapping, [T.STRING], version=1)
    assert_same("OneHotEncoder", words, {"cats_strings": ["b", "a"]}, [T.FLOAT], version=1)
    for x in (np.array([[1, 2], [3, 9]]), np.array([1.5, 2, -3.9], F32)):
        assert_same("OneHotEncoder", x, {"cats_int64s": [3, 2, 1, -3]}, [T.FLOAT], version=1)


def test_the_last_of_equal_keys_holds() -> None:
    attributes = {"keys_int64s": [3, 2, 3], "values_int64s": [5, 6, 7]}
    x = np.array([2, 3, 4])
    (y,) = run(node("LabelEncoder", x, attributes, [T.INT64], version=4), x)
    np.testing.assert_array_equal(y, [6, 7, -1])


def test_an_unknown_category_is_an_error_on_request() -> None:
    x = np.array([1, 4])
    with pytest.raises(transmuter.TransmuterError, match="none of the categories"):
        run(node("OneHotEncoder", x, {"cats_int64s": [1, 2], "zeros": 0}, [T.FLOAT], version=1), x)


def test_zip_map_gives_python_dicts(rng: np.random.Generator) -> None:
    x = rng.random((2, 3)).astype(F32)
    for keys, kind, name in (([4, 5, 6], T.INT64, "int64s"), (["a", "b", "c"], T.STRING, "strings")):
        maps = helper.make_map_type_proto(kind, helper.make_tensor_type_proto(T.FLOAT, None))
        attributes = {f"classlabels_{name}": keys}
        assert_same("ZipMap", x, attributes, [helper.make_sequence_type_proto(maps)], version=1)
        assert_same("ZipMap", x[0], attributes, [helper.make_sequence_type_proto(maps)], version=1)


@pytest.mark.parametrize("form", ["DENSE", "SPARSE"])
def test_maps_become_tensors(form: str) -> None:
    kind = helper.make_map_type_proto(T.INT64, helper.make_tensor_type_proto(T.FLOAT, None))
    for to in ("TO_FLOAT", "TO_INT64"):
        out = [T.FLOAT if to == "TO_FLOAT" else T.INT64]
        x, attributes = {3: 2.5, 1: 1.0}, {"cast_to": to, "map_form": form, "max_map": 5}
        assert_same("CastMap", x, attributes, out, version=1, input_type=kind)
    kind = helper.make_map_type_proto(T.STRING, helper.make_tensor_type_proto(T.FLOAT, None))
    vocabulary = {"string_vocabulary": ["c", "b", "a"]}
    assert_same("DictVectorizer", {"a": 2.0, "c": 3.0}, vocabulary, [T.FLOAT], version=1, input_type=kind)


@settings(max_examples=10, deadline=None)
@given(
    given_keys=st.sets(st.sampled_from(["", "b", "é"]), min_size=1),
    numbers=st.lists(st.sampled_from([1.5, -0.0, np.inf, np.nan]), min_size=3, max_size=3),
)
def test_dictionaries(given_keys: set[str], numbers: list[float]) -> None:
    kind = helper.make_map_type_proto(T.STRING, helper.make_tensor_type_proto(T.FLOAT, None))
    x = dict(zip(sorted(given_keys), numbers, strict=False))
    vocabulary = {"string_vocabulary": ["é", "", "b"]}
    assert_same("DictVectorizer", x, vocabulary, [T.FLOAT], version=1, input_type=kind, compiled=False)
    kind = helper.make_map_type_proto(T.INT64, helper.make_tensor_type_proto(T.FLOAT, None))
    x = {i: v for i, v in enumerate(x.values()) if np.isfinite(v)} or {2: 1.0}
    for form in ("DENSE", "SPARSE"):
        attributes = {"cast_to": "TO_FLOAT", "map_form": form, "max_map": 4}
        assert_same("CastMap", x, attributes, [T.FLOAT], version=1, input_type=kind, compiled=False)
    attributes = {"cast_to": "TO_STRING", "map_form": "DENSE"}
    assert_same("CastMap", x, attributes, [T.STRING], version=1, input_type=kind, compiled=False)


def test_a_key_outside_of_the_vocabulary_is_an_error() -> None:
    kind = helper.make_map_type_proto(T.STRING, helper.make_tensor_type_proto(T.FLOAT, None))
    proto = node("DictVectorizer", None, {"string_vocabulary": ["a"]}, [T.FLOAT], version=1, input_type=kind)
    with pytest.raises(transmuter.TransmuterError, match="'b' is not in the vocabulary"):
        run(proto, {"b": 1.0})


def test_strings_and_maps_between_numbers() -> None:
    """A label, a table of it and a map of probabilities: what pipelines end with."""
    pipeline = parser.parse_model("""<ir_version: 8, opset_import: ["" : 18, "ai.onnx.ml" : 3]>
      main (float[n, 2] x) => (string[n] label, int64[n] number, float[n, 2] doubled, seq(map(string, float)) chances) {
        scaled = ai.onnx.ml.Scaler <offset = [0.5, 0.0], scale = [2.0, 1.0]> (x)
        label, scores = ai.onnx.ml.LinearClassifier <coefficients = [1.0, 0.0, 0.0, 1.0], intercepts = [0.0, 0.25],
          classlabels_strings = ["no", "yes"], post_transform = "SOFTMAX"> (scaled)
        number = ai.onnx.ml.LabelEncoder <keys_strings = ["yes", "no"], values_int64s = [1, 0]> (label)
        doubled = Add (scores, scores)
        chances = ai.onnx.ml.ZipMap <classlabels_strings = ["no", "yes"]> (scores)
      }""")
    x = np.array([[0, 1], [1, 0], [0.5, 0]], F32)
    wanted = onnxruntime.InferenceSession(pipeline.SerializeToString()).run(None, {"x": x})
    model = transmuter.load(pipeline)
    for outputs in (transmuter.run(model, {"x": x}), transmuter.compile(model)({"x": x})):
        for name, expected in zip(model.outputs, wanted, strict=True):
            actual = np.asarray(outputs[name]) if isinstance(outputs[name], jax.Array) else outputs[name]
            assert_equal(actual, expected, rtol=1e-5, where=name)


# ---- linear models and support vector machines ----------------------------------------------------------------------

QUARTERS = st.integers(-4, 4).map(lambda i: i / 4)
SCORES = [t for t in TRANSFORMS if t not in ("PROBIT", "SOFTMAX_ZERO")]


@settings(max_examples=15, deadline=None)
@given(
    x=st.lists(QUARTERS, min_size=6, max_size=6),
    weights=st.lists(QUARTERS, min_size=12, max_size=12),
    shape=st.sampled_from([(3, 2), (2,), (0, 2)]),
    count=st.integers(1, 3),
    post_transform=st.sampled_from(SCORES),
    is_text=st.booleans(),
)
def test_linear_models_of_ties_and_vectors(
    x: Any, weights: list[float], shape: Any, count: int, post_transform: str, is_text: bool
) -> None:
    x = np.array(x[: int(np.prod(shape))], F32).reshape(shape)
    shared = {"coefficients": weights[: 2 * count], "intercepts": weights[6 : 6 + count]}
    if count > 1 or post_transform == "NONE":  # of one score, ONNX Runtime ignores the transform
        attributes = {**shared, "targets": count, "post_transform": post_transform}
        assert_same("LinearRegressor", x, attributes, [T.FLOAT], version=1, compiled=False)
    labels = ["a", "", "é"][: max(count, 2)] if is_text else [5, -7, 0][: max(count, 2)]
    attributes = {**shared, "post_transform": post_transform}
    attributes["classlabels_strings" if is_text else "classlabels_ints"] = labels
    outputs = [T.STRING if is_text else T.INT64, T.FLOAT]
    assert_same("LinearClassifier", x, attributes, outputs, version=1, compiled=False)


@settings(max_examples=12, deadline=None)
@given(
    x=st.lists(QUARTERS, min_size=4, max_size=4),
    weights=st.lists(QUARTERS, min_size=24, max_size=24),
    kernel=st.sampled_from(["LINEAR", "POLY", "RBF", "SIGMOID"]),
    params=st.sampled_from([[0.25, 0.5, 3.0], [0.5, 0.0, 2.0], [1.0, 1.0, 0.0]]),
    labels=st.sampled_from([["a", ""], ["a", "", "é"]]),
    odds=st.booleans(),
)
def test_support_vectors_of_ties(
    x: Any, weights: list[float], kernel: str, params: Any, labels: Any, odds: bool
) -> None:
    x, count = np.array(x, F32).reshape(2, 2), len(labels)
    shared = {"kernel_type": kernel, "kernel_params": params, "support_vectors": weights[:6]}
    for one_class in (0, 1):
        attributes = {**shared, "coefficients": weights[6:9], "n_supports": 3, "rho": [0.25], "one_class": one_class}
        assert_same("SVMRegressor", x, attributes, [T.FLOAT], version=1, compiled=False)
    pairs = count * (count - 1) // 2
    attributes = {
        **shared,
        "coefficients": weights[6 : 6 + 3 * (count - 1)],
        "vectors_per_class": [1, 2] if count == 2 else [1, 1, 1],
        "rho": weights[18 : 18 + pairs],
        "classlabels_strings": labels,
    }
    if odds:
        attributes |= {"prob_a": [-1.5] * pairs, "prob_b": weights[21 : 21 + pairs]}
    assert_same("SVMClassifier", x, attributes, [T.STRING, T.FLOAT], version=1, compiled=False)


@pytest.mark.parametrize("post_transform", TRANSFORMS)
def test_linear_models(post_transform: str, rng: np.random.Generator) -> None:
    x = rng.normal(size=(4, 3)).astype(F32)
    weights = (rng.random(9) * 0.1).tolist()
    regression = {"coefficients": weights[:6], "intercepts": [0.4, 0.5], "targets": 2, "post_transform": post_transform}
    assert_same("LinearRegressor", x, regression, [T.FLOAT], version=1)
    for scores, labels in ((1, [4, 7]), (2, [4, 7]), (3, [0, 1, 2])):
        if scores == 1 and post_transform == "PROBIT":  # ONNX Runtime writes half of what it returns
            continue
        attributes = {
            "coefficients": weights[: 3 * scores],
            "intercepts": [0.3, 0.5, 0.4][:scores],
            "classlabels_ints": labels,
            "post_transform": post_transform,
        }
        assert_same("LinearClassifier", x, attributes, CLASSIFIED, version=1)


def test_linear_models_have_gradients(rng: np.random.Generator) -> None:
    x = rng.normal(size=(4, 3)).astype(F32)
    weights = {"coefficients": rng.normal(size=9).tolist(), "intercepts": [0.1, 0.2, 0.3]}
    classes = {**weights, "classlabels_strings": ["a", "b", "c"], "post_transform": "SOFTMAX"}
    classify = function("LinearClassifier", x, classes, [T.STRING, T.FLOAT], of=1, version=1)
    check_grads(classify, (jnp.asarray(x),), 1, modes=["rev"], rtol=1e-2, atol=1e-2)


def test_a_compiled_classifier_has_string_labels(rng: np.random.Generator) -> None:
    x = rng.normal(size=(4, 3)).astype(F32)
    attributes = {
        "coefficients": rng.normal(size=3).tolist(),
        "intercepts": [0.1],
        "classlabels_strings": ["no", "yes"],
    }
    assert_same("LinearClassifier", x, attributes, [T.STRING, T.FLOAT], version=1)


@pytest.mark.parametrize("kernel", ["LINEAR", "POLY", "RBF", "SIGMOID"])
def test_support_vectors(kernel: str, rng: np.random.Generator) -> None:
    x = rng.normal(size=(6, 4)).astype(F32)
    shared = {"kernel_type": kernel, "kernel_params": [0.3, 0.1, 3.0]}
    regression = {
        **shared,
        "coefficients": rng.normal(size=5).tolist(),
        "support_vectors": rng.normal(size=20).tolist(),
        "n_supports": 5,
        "rho": [0.2],
    }
    assert_same("SVMRegressor", x, regression, [T.FLOAT], version=1)
    assert_same("SVMRegressor", x, {**regression, "one_class": 1}, [T.FLOAT], version=1)
    predict = function("SVMRegressor", x, regression, [T.FLOAT], version=1)
    check_grads(predict, (jnp.asarray(x),), 1, modes=["rev"], rtol=2e-2, atol=2e-2)
    for count in (2, 4):
        pairs = count * (count - 1) // 2
        classes = {
            **shared,
            "coefficients": rng.normal(size=(count - 1) * 2 * count).tolist(),
            "support_vectors": rng.normal(size=8 * count).tolist(),
            "vectors_per_class": [2] * count,
            "rho": (rng.normal(size=pairs) * 0.3).tolist(),
            "classlabels_ints": list(range(3, 3 + count)),
        }
        odds = {"prob_a": (-1 - rng.random(pairs)).tolist(), "prob_b": (rng.normal(size=pairs) * 0.1).tolist()}
        assert_same("SVMClassifier", x, classes, CLASSIFIED, version=1)
        assert_same("SVMClassifier", x, {**classes, **odds}, CLASSIFIED, version=1)


# ---- trees ----------------------------------------------------------------------------------------------------------

MODES = ["BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ"]


def forest(rng: np.random.Generator, modes: list[str], trees: int = 3, depth: int = 3) -> tuple[dict, list]:
    """Nodes of random trees over four features, and the ids of their leaves."""
    names = ("treeids", "nodeids", "featureids", "modes", "values", "truenodeids", "falsenodeids")
    rows, missing, leaves = [], [], []
    for tree in range(trees):
        for i in range(2 ** (depth + 1) - 1):
            if i >= 2**depth - 1 or (i > 2 and rng.random() < 0.2):
                leaves.append((tree, i))
                rows.append((tree, i, 0, "LEAF", 0.0, 0, 0))
            else:
                threshold = float(rng.integers(-2, 3)) / 2
                rows.append((tree, i, int(rng.integers(4)), str(rng.choice(modes)), threshold, 2 * i + 1, 2 * i + 2))
            missing.append(int(rng.integers(2)))
    nodes = {f"nodes_{name}": list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
    return {**nodes, "nodes_missing_value_tracks_true": missing}, leaves


@pytest.mark.parametrize("aggregate", ["SUM", "AVERAGE", "MIN", "MAX"])
@pytest.mark.parametrize("modes", [["BRANCH_LEQ"], MODES])
def test_tree_regression(aggregate: str, modes: list[str], rng: np.random.Generator) -> None:
    x = (rng.integers(-4, 5, size=(6, 4)) / 4).astype(F32)
    x[0, 1] = np.nan
    for targets, base in ((1, [0.25]), (2, None)):
        nodes, leaves = forest(rng, modes)
        votes = {
            "target_treeids": [tree for tree, _ in leaves],
            "target_nodeids": [leaf for _, leaf in leaves],
            "target_ids": rng.integers(0, targets, len(leaves)).tolist(),
            "target_weights": rng.normal(size=len(leaves)).tolist(),
            "n_targets": targets,
            "aggregate_function": aggregate,
        }
        attributes = {**nodes, **votes, **({"base_values": base} if base else {})}
        for operand in (x, x.astype(np.float64)):
            assert_same("TreeEnsembleRegressor", operand, attributes, [T.FLOAT])
        whole = np.nan_to_num(x * 4)
        a, b = (
            run(node("TreeEnsembleRegressor", v, attributes, [T.FLOAT]), v) for v in (whole, whole.astype(np.int64))
        )
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("post_transform", TRANSFORMS)
def test_tree_classification(post_transform: str, rng: np.random.Generator) -> None:
    """Two classes by one score, which all exporters write for two, and three classes."""
    x = rng.normal(size=(6, 4)).astype(F32)
    for labels, weights in (([5, 7], "positive"), ([5, 7], "any"), ([0, 1, 2], "positive")):
        if len(labels) == 2 and post_transform == "PROBIT":  # ONNX Runtime writes half of what it returns
            continue
        nodes, leaves = forest(rng, ["BRANCH_LEQ"])
        weight = rng.random(len(leaves)) * 0.4 if weights == "positive" else rng.normal(size=len(leaves))
        attributes = {
            **nodes,
            "class_treeids": [tree for tree, _ in leaves],
            "class_nodeids": [leaf for _, leaf in leaves],
            "class_ids": rng.integers(0, 1 if len(labels) == 2 else 3, len(leaves)).tolist(),
            "class_weights": weight.tolist(),
            "classlabels_int64s": labels,
            "base_values": [0.25] if len(labels) == 2 else [0.25, 0.1, 0.2],
            "post_transform": post_transform,
        }
        assert_same("TreeEnsembleClassifier", x, attributes, CLASSIFIED)


def test_trees_of_version_5(rng: np.random.Generator) -> None:
    """An inner root, a root that is a leaf, and membership."""
    attributes = {
        "nodes_splits": numpy_helper.from_array(np.array([0.5, 0.0, 0.0], F32)),
        "nodes_modes": numpy_helper.from_array(np.array([0, 6, 0], np.uint8)),
        "nodes_featureids": [0, 1, 0],
        "nodes_truenodeids": [1, 0, 2],
        "nodes_trueleafs": [0, 1, 1],
        "nodes_falsenodeids": [1, 1, 2],
        "nodes_falseleafs": [1, 1, 1],
        "leaf_targetids": [0, 1, 1],
        "leaf_weights": numpy_helper.from_array(np.array([1, 2, 10], F32)),
        "membership_values": numpy_helper.from_array(np.array([3, 4, 9, np.nan], F32)),
        "tree_roots": [0, 2],
        "n_targets": 2,
    }
    x = np.array([[0, 4], [0, 5], [1, 4], [0.5, 9]], F32)
    (y,) = run(node("TreeEnsemble", x, attributes, [T.FLOAT], version=5), x)
    np.testing.assert_array_equal(y, [[1, 10], [0, 12], [0, 12], [1, 10]])
    assert not jax.grad(lambda x: function("TreeEnsemble", x, attributes, [T.FLOAT], version=5)(x).sum())(x).any()


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 999),
    mode=st.sampled_from([*MODES, "BRANCH_NEQ", "all"]),
    depth=st.integers(0, 3),
    aggregate=st.sampled_from(["SUM", "AVERAGE", "MIN", "MAX"]),
    tracks=st.booleans(),
    has_base=st.booleans(),
    kind=st.sampled_from([F32, np.float64]),
)
def test_trees_of_missing_values_and_ties(
    seed: int, mode: str, depth: int, aggregate: str, tracks: bool, has_base: bool, kind: Any
) -> None:
    """Every leaf votes for both targets: ONNX Runtime forgets the base value of one without a vote."""
    rng = np.random.default_rng(seed)
    nodes, leaves = forest(rng, [*MODES, "BRANCH_NEQ"] if mode == "all" else [mode], depth=depth)
    if not tracks:
        del nodes["nodes_missing_value_tracks_true"]
    x = (rng.integers(-4, 5, size=(4, 4)) / 4).astype(kind)
    x[rng.random(x.shape) < 0.2] = np.nan
    x[rng.random(x.shape) < 0.1] = np.inf
    attributes = {
        **nodes,
        "target_treeids": [tree for tree, _ in leaves for _ in range(2)],
        "target_nodeids": [leaf for _, leaf in leaves for _ in range(2)],
        "target_ids": [0, 1] * len(leaves),
        "target_weights": (rng.integers(-4, 5, 2 * len(leaves)) / 4).tolist(),
        "n_targets": 2,
        "aggregate_function": aggregate,
        **({"base_values": [0.25, -1.5]} if has_base else {}),
    }
    assert_same("TreeEnsembleRegressor", x, attributes, [T.FLOAT], compiled=False)


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 999),
    labels=st.sampled_from([["a", ""], ["a", "", "é"], [5, -7], [5, -7, 0]]),
    is_positive=st.booleans(),
    post_transform=st.sampled_from(SCORES),
    has_base=st.booleans(),
)
def test_top_classes_of_trees(seed: int, labels: Any, is_positive: bool, post_transform: str, has_base: bool) -> None:
    """Ties, and classes that have no vote."""
    rng, count = np.random.default_rng(seed), len(labels)
    nodes, leaves = forest(rng, ["BRANCH_LEQ"], trees=2, depth=2)
    weights = rng.integers(-4, 5, len(leaves)) / 8
    kind = "strings" if isinstance(labels[0], str) else "int64s"
    attributes = {
        **nodes,
        "class_treeids": [tree for tree, _ in leaves],
        "class_nodeids": [leaf for _, leaf in leaves],
        "class_ids": [0] * len(leaves) if count == 2 else rng.integers(0, 3, len(leaves)).tolist(),
        "class_weights": (np.abs(weights) if is_positive else weights).tolist(),
        f"classlabels_{kind}": labels,
        "post_transform": post_transform,
        **({"base_values": [0.25] if count == 2 else [0.25, -0.125, 0.0]} if has_base else {}),
    }
    x = (rng.integers(-4, 5, size=(4, 4)) / 4).astype(F32)
    outputs = [T.STRING if kind == "strings" else T.INT64, T.FLOAT]
    assert_same("TreeEnsembleClassifier", x, attributes, outputs, compiled=False)


def test_a_tree_that_bites_its_tail_is_an_error(rng: np.random.Generator) -> None:
    nodes, leaves = forest(rng, ["BRANCH_LEQ"], trees=1)
    nodes["nodes_truenodeids"][1] = 0
    votes = {
        "target_treeids": [0] * len(leaves),
        "target_nodeids": [leaf for _, leaf in leaves],
        "target_ids": [0] * len(leaves),
        "target_weights": [1.0] * len(leaves),
        "n_targets": 1,
    }
    x = np.zeros((1, 4), F32)
    with pytest.raises(transmuter.TransmuterError, match="leads back"):
        run(node("TreeEnsembleRegressor", x, {**nodes, **votes}, [T.FLOAT]), x)


def test_all_is_the_same_with_64_bits_off(rng: np.random.Generator) -> None:
    x = rng.normal(size=(4, 3)).astype(F32)
    attributes = {
        "coefficients": rng.normal(size=9).tolist(),
        "intercepts": [0.1, 0.2, 0.3],
        "classlabels_ints": [3, 4, 5],
    }
    proto = node("LinearClassifier", x, attributes, CLASSIFIED, version=1)
    expected = run(proto, x)
    model = transmuter.load(proto)
    with jax.enable_x64(False), jax.numpy_dtype_promotion("strict"):
        labels, scores = jax.jit(lambda x: tuple(model.apply({}, [x]).values()))(x)
    np.testing.assert_array_equal(labels, expected[0])
    np.testing.assert_allclose(scores, expected[1], rtol=1e-6)


# ---- optimiser steps ------------------------------------------------------------------------------------------------


def test_the_first_step_of_adam_has_the_plain_rate() -> None:
    step = helper.make_node(
        "Adam", ["r", "t", "x", "g", "v", "h"], ["x1", "v1", "h1"], domain="ai.onnx.preview.training"
    )
    inputs = [helper.make_tensor_value_info("t", T.INT64, [])]
    inputs += [helper.make_tensor_value_info(n, T.FLOAT, [] if n == "r" else [3]) for n in "rxgvh"]
    outputs = [helper.make_tensor_value_info(n, T.FLOAT, [3]) for n in ("x1", "v1", "h1")]
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnx.preview.training", 1)]
    graph = helper.make_graph([step], "step", inputs, outputs)
    model = transmuter.load(helper.make_model(graph, opset_imports=imports, ir_version=10))
    x, g, zero = np.array([1, 2, 3], F32), np.array([0.5, -1, 2], F32), np.zeros(3, F32)
    given = {"r": np.array(0.1, F32), "t": np.array(0), "x": x, "g": g, "v": zero, "h": zero}
    outputs = transmuter.run(model, given)
    wanted = x - 0.1 * (0.1 * g) / (np.sqrt(0.001 * g * g) + 1e-6)
    np.testing.assert_allclose(outputs["x1"], wanted, rtol=1e-4)
