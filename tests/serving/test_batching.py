"""Padding to few shapes, and what must not be seen of it."""

from __future__ import annotations

import numpy as np
import pytest
import small_model
from onnx import TensorProto, helper, numpy_helper

import transmuter
from transmuter.errors import InputError, ModelError
from transmuter.serving.batching import Row, TokenBatches, plan, quantizes_dynamically, row_buckets

LENGTHS = (4, 8, 16)


@pytest.fixture(scope="module")
def model():
    return transmuter.load(small_model.attention())


@pytest.fixture(scope="module")
def batches(model):
    made = TokenBatches(model, batch_size=4, sequence_lengths=LENGTHS, pad_values={"input_ids": 7})
    made.warm_up(progress=False)
    return made


def _texts(count: int, longest: int = 16, seed: int = 0) -> list[tuple[int, ...]]:
    random = np.random.RandomState(seed)
    return [
        tuple(random.randint(0, small_model.VOCABULARY, random.randint(1, longest + 1)).tolist()) for _ in range(count)
    ]


def _agree(texts, results, **options):
    for text, found in zip(texts, results, strict=True):
        expected = small_model.alone(text, **options)
        assert found.keys() == expected.keys()
        for name in expected:
            assert found[name].shape == expected[name].shape
            np.testing.assert_allclose(found[name], expected[name], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("given", "buckets"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 3)),
        (np.int64(8), (1, 2, 8)),
        (32, (1, 2, 8, 32)),
        ((8,), (8,)),
        ([4, 1, 4], (1, 4)),
    ],
)
def test_numbers_of_rows(given, buckets):
    assert row_buckets(given) == buckets


@pytest.mark.parametrize("given", [0, -1, (), (0, 2), 2.0, "8", None, (2.5,)])
def test_a_batch_has_a_row(given):
    with pytest.raises(ValueError, match="must be a positive number"):
        row_buckets(given)


def test_padding_is_not_seen(batches):
    texts = _texts(50)
    _agree(texts, batches([small_model.row(text) for text in texts]))


@pytest.mark.parametrize("count", range(1, 6))
def test_each_number_of_rows_and_each_length(batches, count):
    for length in (1, 3, 4, 5, 8, 9, 16):
        texts = [tuple(range(i, i + length)) for i in range(count)]
        _agree(texts, batches([small_model.row(text) for text in texts]))


def test_all_shapes_are_compiled_ahead(model):
    made = TokenBatches(model, batch_size=4, sequence_lengths=LENGTHS)
    made.warm_up(progress=False)
    assert len(made.compiled.segments) == len(made.batch_sizes) * len(LENGTHS)
    made([small_model.row(text) for text in _texts(30)])
    assert made.compiled.cache_info().misses == 0


def test_padding_on_the_left():
    """This model counts positions by itself; one that is given them can be padded on either side."""
    placed = transmuter.load(small_model.attention(inputs=("input_ids", "attention_mask", "position_ids")))
    made = TokenBatches(placed, batch_size=4, sequence_lengths=(16,), padding_side="left")
    texts = _texts(6)
    results = made([small_model.row(text) for text in texts])
    for text, found in zip(texts, results, strict=True):
        expected = small_model.alone(text, types=None)["last_hidden_state"]
        np.testing.assert_allclose(found["last_hidden_state"], expected, atol=1e-5, rtol=0)


def test_without_a_mask_nothing_is_padded():
    bare = transmuter.load(small_model.attention(inputs=("input_ids",)))
    made = TokenBatches(bare, batch_size=4, sequence_lengths=(8, 16))
    assert made.sequence_lengths is None
    assert made.max_length == 16
    texts = _texts(20)
    _agree(texts, made([small_model.row(text) for text in texts]), types=None)


def test_rows_of_which_the_graph_gathers_other_numbers_of_tokens_share_no_batch():
    """A classifier of BART takes the state of the last end of each text, and for that as many in each row."""
    node = helper.make_node
    nodes = [
        node("Gather", ["table", "input_ids"], ["states"]),
        node("Equal", ["input_ids", "end"], ["is_end"]),
        node("NonZero", ["is_end"], ["found"]),
        node("Transpose", ["found"], ["places"]),
        node("GatherND", ["states", "places"], ["ends"]),
        node("Shape", ["input_ids"], ["rows"], start=0, end=1),
        node("Concat", ["rows", "rest"], ["shape"], axis=0),
        node("Reshape", ["ends", "shape"], ["ends_of_rows"]),
        node("Gather", ["ends_of_rows", "last"], ["lasts"], axis=1),
        node("ReduceMax", ["states", "axes"], ["largest"], keepdims=0),
        node("Add", ["lasts", "largest"], ["y"]),
    ]
    table = np.arange(100, dtype=np.float32).reshape(50, 2)
    table[0] = -1  # of padding
    constants = {"end": 2, "rest": [-1, 2], "last": -1, "axes": [1]}
    weights = [numpy_helper.from_array(np.asarray(x, np.int64), name) for name, x in constants.items()]
    inputs = [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ("batch", "sequence"))]
    inputs += [helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ("batch", "sequence"))]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ("batch", 2))]
    graph = helper.make_graph(nodes, "ends", inputs, outputs, [numpy_helper.from_array(table, "table"), *weights])
    opset = [helper.make_opsetid("", 18)]
    made = TokenBatches(
        transmuter.load(helper.make_model(graph, opset_imports=opset, ir_version=9)),
        batch_size=4,
        sequence_lengths=(8,),
    )
    texts = [(5, 2), (2, 2, 9), (7, 8, 2), (2, 3, 2, 2), (2, 4, 2)]
    for text, found in zip(texts, made([small_model.row(text) for text in texts]), strict=True):
        np.testing.assert_allclose(found["y"], table[2] + table[max(text)])


def test_exact_lengths_are_asked_for(model):
    made = TokenBatches(model, batch_size=2, sequence_lengths=None, max_length=9)
    assert made.key(small_model.row((1, 2))) != made.key(small_model.row((1, 2, 3)))
    texts = _texts(10, longest=9)
    _agree(texts, made([small_model.row(text) for text in texts]))
    with pytest.raises(InputError, match="has 10 tokens"):
        made.key(small_model.row(range(10)))


def test_a_graph_of_fixed_shape():
    fixed = transmuter.load(small_model.attention(dims=(2, 8), output_dims=(2, 8, small_model.HIDDEN)))
    made = TokenBatches(fixed, batch_size=32, sequence_lengths=(32, 128))
    assert made.batch_sizes == (2,)
    assert made.sequence_lengths == (8,)
    texts = _texts(7, longest=8)
    _agree(texts, made([small_model.row(text) for text in texts]))


@pytest.mark.parametrize("output_dims", [("batch", None, 16), ("rows", "other", "third"), (None, None, None)])
def test_axes_that_are_not_declared(output_dims):
    """The hidden size is a bucket's length, so that the size alone tells nothing."""
    odd = transmuter.load(small_model.attention(output_dims=output_dims))
    made = TokenBatches(odd, batch_size=2, sequence_lengths=(small_model.HIDDEN,))
    texts = _texts(4)
    _agree(texts, made([small_model.row(text) for text in texts]))


def test_inputs_that_rows_bring(batches):
    ids, types = (1, 2, 3, 4, 5), [0, 0, 1, 1, 1]
    [found] = batches([small_model.row(ids, token_type_ids=types, offsets=[9] * 5)])
    _agree([ids], [found], types=types)


def test_only_what_is_wanted(model):
    made = TokenBatches(model, sequence_lengths=(8,), outputs=["pooled"])
    [found] = made([small_model.row((1, 2, 3))])
    assert found.keys() == {"pooled"}
    with pytest.raises(InputError, match="nonsense"):
        TokenBatches(model, outputs=["nonsense"])


@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        ({}, InputError, "'input_ids' that this task does not make"),
        ({"input_ids": []}, InputError, "no token"),
        ({"input_ids": range(17)}, InputError, "has 17 tokens, but the longest"),
        ({"input_ids": [1, 2], "token_type_ids": [0]}, InputError, "lengths"),
        ({"input_ids": [1, small_model.VOCABULARY]}, ModelError, "table has 50 entries"),
        ({"input_ids": [1, -1]}, ModelError, "table has 50 entries"),
        ({"input_ids": [1, 2], "token_type_ids": [0, 2]}, ModelError, "table has 2 entries"),
    ],
)
def test_a_row_that_cannot_be_run(batches, arrays, error, message):
    with pytest.raises(error, match=message):
        batches.key(Row({name: np.asarray(x, np.int64) for name, x in arrays.items()}))


def test_batches_have_rows_of_similar_lengths(batches):
    rows = [small_model.row(range(length)) for length in (1, 16, 2, 15, 3, 14, 4, 13, 5)]
    assert plan(batches, rows) == [[1, 3, 5, 7], [8, 6, 4, 2], [0]]


def test_outputs_are_views(batches):
    first, second = batches([small_model.row((1, 2)), small_model.row((1, 2, 3))])
    assert first["last_hidden_state"].base is not None
    assert np.shares_memory(first["last_hidden_state"].base, second["last_hidden_state"].base)


def test_an_output_without_rows():
    graph = small_model.attention().graph
    graph.node.append(helper.make_node("ReduceSum", ["last_hidden_state"], ["total"], keepdims=0))
    graph.output.append(helper.make_tensor_value_info("total", TensorProto.FLOAT, ()))
    model = transmuter.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9))
    with pytest.raises(ModelError, match="'total' has the shape"):
        TokenBatches(model, sequence_lengths=(8,))([small_model.row((1, 2))])
    TokenBatches(model, sequence_lengths=(8,), outputs=["pooled"])([small_model.row((1, 2))])


def test_graphs_that_quantise_while_they_run(model):
    graph = small_model.attention().graph
    graph.node.append(helper.make_node("DynamicQuantizeLinear", ["pooled"], ["q", "scale", "zero_point"]))
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    assert quantizes_dynamically(transmuter.load(made))
    assert not quantizes_dynamically(model)
