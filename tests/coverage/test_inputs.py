"""Inputs by rules: plausible values, the same each time, and what an entry says goes first."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import transmuter
from transmuter.coverage import inputs
from transmuter.coverage.catalogue import Entry


def graph(*declared: tuple[str, int, list], vocabulary: int = 0) -> onnx.ModelProto:
    values = [helper.make_tensor_value_info(name, kind, shape) for name, kind, shape in declared]
    nodes, tables = [], []
    if vocabulary:
        tables = [helper.make_tensor("table", TensorProto.FLOAT, [vocabulary, 2], np.zeros(2 * vocabulary))]
        nodes = [
            helper.make_node("Cast", [declared[0][0]], ["cast"], to=TensorProto.INT32),
            helper.make_node("Gather", ["table", "cast"], ["y"]),
        ]
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    return helper.make_model(helper.make_graph(nodes, "g", values, [out], tables))


def made(model: onnx.ModelProto, entry: Entry | None = None) -> list[dict[str, np.ndarray]]:
    declared = inputs.declared_inputs(model)
    entry = entry or Entry("m", "local://m.onnx")
    return [inputs.made(declared, entry, case) for case in range(inputs.case_count(declared, entry))]


INT64, FLOAT, BOOL = TensorProto.INT64, TensorProto.FLOAT, TensorProto.BOOL
TEXT = [
    ("input_ids", INT64, ["batch_size", "sequence_length"]),
    ("attention_mask", INT64, ["batch_size", "past_sequence_length + sequence_length"]),
    ("position_ids", INT64, ["batch_size", "sequence_length"]),
    ("token_type_ids", INT64, ["batch_size", "sequence_length"]),
    ("past_key_values.0.key", FLOAT, ["batch_size", 2, "past_sequence_length", 8]),
    ("use_cache_branch", BOOL, [1]),
]


def test_a_decoder():
    first, second = made(graph(*TEXT, vocabulary=9))
    batch, length = first["input_ids"].shape
    past = first["past_key_values.0.key"].shape[2]
    assert first["attention_mask"].shape == (batch, past + length)
    assert first["input_ids"].dtype == np.int64
    assert first["input_ids"].min() >= 0
    assert first["input_ids"].max() < 9
    np.testing.assert_array_equal(first["position_ids"][0], np.arange(length))
    assert not first["token_type_ids"].any()
    assert set(np.unique(first["attention_mask"])) == {0, 1}
    assert first["attention_mask"][0].all()
    assert first["input_ids"].shape != second["input_ids"].shape
    assert [case["use_cache_branch"].item() for case in (first, second)] == [False, True]
    for one, other in zip(made(graph(*TEXT, vocabulary=9)), (first, second), strict=True):
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


def test_pictures_sound_and_states():
    model = graph(
        ("pixel_values", FLOAT, [None, 3, None, None]),
        ("input_values", FLOAT, ["batch", "sequence_length"]),
        ("sr", INT64, []),
        ("h0", FLOAT, [2, "batch", 4]),
        ("x", TensorProto.BFLOAT16, [2]),
        ("text", TensorProto.STRING, ["n"]),
        ("none", FLOAT, [0, 3]),
    )
    first, second = made(model)
    assert first["pixel_values"].shape[1:] == (3, 64, 64)
    assert np.abs(first["pixel_values"]).max() <= 1
    assert first["input_values"].shape[1] == 16_000
    assert np.abs(first["input_values"]).max() < 1
    assert first["sr"].shape == ()
    assert first["sr"] == 16_000
    assert not first["h0"].any()
    assert second["h0"].any()
    assert first["x"].dtype == ml_dtypes.bfloat16
    assert first["text"].dtype == object
    assert first["none"].shape == (0, 3)


def test_what_an_entry_says_goes_first():
    rules = {"a": {"shape": [2, "n"], "low": 5, "high": 6}, "b": {"value": [1, 2]}, "c": {"kind": "ones"}}
    entry = Entry("m", "local://m.onnx", inputs=rules, sizes=[{"n": 4}, {"n": 5}, {"n": 6}])
    cases = made(graph(("a", INT64, [None, None]), ("b", FLOAT, [2]), ("c", FLOAT, ["n"])), entry)
    assert [case["a"].shape for case in cases] == [(2, 4), (2, 5), (2, 6)]
    assert [case["c"].tolist() for case in cases] == [[1] * 4, [1] * 5, [1] * 6]
    assert (cases[0]["a"] == 5).all()
    np.testing.assert_array_equal(cases[0]["b"], np.array([1, 2], np.float32))


def test_fixed_shapes_are_one_case():
    assert len(made(graph(("a", FLOAT, [1, 3])))) == 1


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        ({"z": {}}, "'z', which is no input"),
        ({"a": {"kind": "poem"}}, "'poem' is no kind"),
        ({"a": {"size": 3}}, "the key 'size'"),
    ],
)
def test_rules_that_make_no_sense(rules, told):
    with pytest.raises(transmuter.CoverageError, match=told):
        made(graph(("a", FLOAT, [1])), Entry("m", "local://m.onnx", inputs=rules))
