"""A model under JAX's transforms gives what ONNX Runtime gives, with 64-bit types off and on."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import pytest
from comparison import assert_equal
from jax import export
from jax.test_util import check_grads

import transmuter

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import graphs


@dataclass(frozen=True)
class Subject:
    """A small network, and what the tests have to know of it."""

    name: str
    build: Callable[[], onnx.ModelProto]
    inputs: graphs.Inputs
    """A batch of five."""
    batch_axes: dict[str, int]
    """Where each output has its batch."""
    internal: str
    """The operator whose first result the tests ask for."""

    @functools.cached_property
    def model(self) -> transmuter.Model:
        return transmuter.load(self.build())

    @functools.cached_property
    def internal_name(self) -> str:
        return next(node.output[0] for node in self.build().graph.node if node.op_type == self.internal)

    @functools.cached_property
    def session(self) -> onnxruntime.InferenceSession:
        proto = self.build()
        proto.graph.output.add(name=self.internal_name)
        return onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])

    def expected(self, inputs: graphs.Inputs) -> dict[str, np.ndarray]:
        """What ONNX Runtime gives for the outputs and the internal value."""
        names = [output.name for output in self.session.get_outputs()]
        return dict(zip(names, self.session.run(names, inputs), strict=True))

    def check(self, outputs: dict[str, Any], inputs: graphs.Inputs) -> None:
        expected = self.expected(inputs)
        assert outputs.keys() == self.batch_axes.keys()
        for name in outputs:
            assert_equal(outputs[name], expected[name], rtol=1e-4, atol=1e-5, where=name)

    def loss(self, outputs: dict[str, jax.Array]) -> jax.Array:
        """A scalar on which every output bears."""
        return sum(jnp.mean(jnp.sin(3 * outputs[name])) for name in self.batch_axes)


def traced(inputs: graphs.Inputs) -> dict[str, jax.Array]:
    """Inputs as JAX holds them: with 64-bit types off, int64 ones are int32."""
    narrow = {np.dtype(np.int64): np.int32} if not jax.config.jax_enable_x64 else {}
    return {name: jnp.asarray(x.astype(narrow.get(x.dtype, x.dtype))) for name, x in inputs.items()}


def cut(inputs: graphs.Inputs, *sizes: int) -> graphs.Inputs:
    """The inputs, up to these sizes of their first dimensions."""
    return {name: x[tuple(map(slice, sizes))] for name, x in inputs.items()}


CONVNET = Subject(
    "convnet",
    lambda: graphs.resnet(blocks=(1,), width=4, size=32, classes=10),
    graphs.image_inputs(5, size=32),
    {"output": 0},
    "GlobalAveragePool",
)
ENCODER = Subject(
    "encoder",
    lambda: graphs.bert(layers=1, hidden=32, heads=4, ffn=64, vocab=50, positions=16),
    graphs.bert_inputs(5, 8, vocab=50, padding=1),
    {"last_hidden_state": 0},
    "Softmax",
)
LSTM = Subject(
    "lstm",
    lambda: graphs.lstm(layers=1, features=6, hidden=8),
    graphs.normal_inputs("input", (5, 8, 6)),
    {"output": 0, "hidden": 1},
    "Reshape",
)
SUBJECTS = [CONVNET, ENCODER, LSTM]


@pytest.fixture(params=[False, True], ids=["x64 off", "x64 on"], autouse=True)
def x64(request: pytest.FixtureRequest) -> Iterator[None]:
    before = jax.config.jax_enable_x64
    with jax.enable_x64(request.param):
        yield
        assert jax.config.jax_enable_x64 == request.param
    assert jax.config.jax_enable_x64 == before


@pytest.fixture(params=SUBJECTS, ids=lambda subject: subject.name)
def subject(request: pytest.FixtureRequest) -> Subject:
    return request.param


def assert_same(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Both are trees of the same arrays, up to rounding relative to each one's largest element."""

    def check(path: Any, a: Any, b: Any) -> None:
        bound = tolerance * float(np.abs(b).max()) + 1e-7
        assert_equal(a, b, rtol=0, atol=bound, where=jax.tree_util.keystr(path))

    jax.tree_util.tree_map_with_path(check, actual, expected)


# ---- without transforms --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [dict, traced], ids=["numpy", "jax"])
def test_run_and_compile(subject: Subject, held: Callable) -> None:
    inputs = held(subject.inputs)
    subject.check(transmuter.run(subject.model, inputs), subject.inputs)
    subject.check(transmuter.compile(subject.model)(inputs), subject.inputs)


# ---- jit, grad, checkpoint, vmap -----------------------------------------------------------------------------------


def test_jit(subject: Subject) -> None:
    model = subject.model
    subject.check(jax.jit(model.apply)(model.params, traced(subject.inputs)), subject.inputs)
    subject.check(jax.jit(lambda inputs: transmuter.compile(model)(inputs))(traced(subject.inputs)), subject.inputs)


def test_grad_is_the_slope(subject: Subject) -> None:
    model, inputs = subject.model, traced(subject.inputs)
    loss = jax.jit(lambda params: subject.loss(model.apply(params, inputs)))
    check_grads(loss, (model.params,), order=1, modes=["rev"], eps=3e-3, rtol=0.02, atol=1e-3)


def test_grad_is_the_same_on_every_way(subject: Subject) -> None:
    model, inputs = subject.model, traced(subject.inputs)
    compiled = transmuter.compile(model)

    def loss(params: dict, inputs: dict) -> jax.Array:
        return subject.loss(model.apply(params, inputs))

    expected = jax.jit(jax.grad(loss))(model.params, inputs)
    assert expected.keys() == model.params.keys()
    assert all(np.any(np.asarray(g) != 0) for g in expected.values())
    assert_same(jax.jit(jax.grad(jax.checkpoint(loss)))(model.params, inputs), expected)
    assert_same(jax.grad(lambda params: subject.loss(compiled(inputs, params=params)))(model.params), expected)
    if subject is ENCODER:  # without jit, each operation is compiled by itself: slow, so one has to do
        assert_same(jax.grad(loss)(model.params, inputs), expected)


@pytest.mark.parametrize("subject", [CONVNET, LSTM], ids=lambda subject: subject.name)
def test_grad_with_respect_to_inputs(subject: Subject) -> None:
    model, inputs = subject.model, traced(subject.inputs)
    compiled = transmuter.compile(model)

    def loss(inputs: dict) -> jax.Array:
        return subject.loss(model.apply(model.params, inputs))

    check_grads(jax.jit(loss), (inputs,), order=1, modes=["rev"], eps=3e-3, rtol=0.02, atol=1e-3)
    gradient = jax.grad(lambda inputs: subject.loss(compiled(inputs)))(inputs)
    assert_same(gradient, jax.jit(jax.grad(loss))(inputs))


def test_vmap_over_examples_is_the_batch(subject: Subject) -> None:
    model = subject.model
    compiled = transmuter.compile(model)

    def over_examples(call: Callable) -> Callable:
        def single(inputs: dict) -> dict:
            outputs = call({name: x[None] for name, x in inputs.items()})
            return {name: jnp.squeeze(y, subject.batch_axes[name]) for name, y in outputs.items()}

        return jax.vmap(single, out_axes=subject.batch_axes)

    subject.check(over_examples(compiled)(traced(subject.inputs)), subject.inputs)
    subject.check(
        jax.jit(over_examples(functools.partial(model.apply, model.params)))(traced(subject.inputs)), subject.inputs
    )


def test_vmap_over_params_is_an_ensemble(subject: Subject) -> None:
    model, inputs = subject.model, traced(subject.inputs)
    members = [model.params, jax.tree.map(lambda p: 0.9 * p, model.params)]
    stacked = jax.tree.map(lambda *ps: jnp.stack(ps), *members)
    call = jax.jit(model.apply)
    outputs = jax.jit(jax.vmap(model.apply, in_axes=(0, None)))(stacked, inputs)
    singles = [call(params, inputs) for params in members]
    assert_same(outputs, jax.tree.map(lambda *ys: jnp.stack(ys), *singles))


def test_gradients_of_single_examples(subject: Subject) -> None:
    model, inputs = subject.model, traced(subject.inputs)

    def loss(params: dict, inputs: dict) -> jax.Array:
        return subject.loss(model.apply(params, {name: x[None] for name, x in inputs.items()}))

    gradient = jax.grad(loss)
    together = jax.jit(jax.vmap(gradient, in_axes=(None, 0)))(model.params, inputs)
    gradient = jax.jit(gradient)
    singles = [gradient(model.params, {name: x[i] for name, x in inputs.items()}) for i in range(5)]
    assert_same(together, jax.tree.map(lambda *gs: jnp.stack(gs), *singles))


# ---- export --------------------------------------------------------------------------------------------------------


def shapes_of(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def round_trip(function: Callable, *specs: Any, vjp_order: int = 0) -> export.Exported:
    artifact = export.export(jax.jit(function))(*specs)
    return export.deserialize(artifact.serialize(vjp_order=vjp_order))


def test_export(subject: Subject) -> None:
    model, inputs = subject.model, traced(subject.inputs)
    artifact = round_trip(model.apply, shapes_of(model.params), shapes_of(inputs))
    subject.check(artifact.call(model.params, inputs), subject.inputs)


def test_exported_gradient(subject: Subject) -> None:
    model, inputs = subject.model, traced(subject.inputs)
    artifact = round_trip(model.apply, shapes_of(model.params), shapes_of(inputs), vjp_order=1)

    def gradient(call: Callable) -> Callable:
        return jax.jit(jax.grad(lambda params, inputs: subject.loss(call(params, inputs))))

    assert_same(*(gradient(call)(model.params, inputs) for call in (artifact.call, model.apply)))


def test_one_artifact_serves_every_batch_size(subject: Subject) -> None:
    model = subject.model
    [batch] = export.symbolic_shape("batch")
    specs = {n: jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for n, x in traced(subject.inputs).items()}
    artifact = round_trip(model.apply, shapes_of(model.params), specs)
    for size in (1, 2, 5):
        inputs = cut(subject.inputs, size)
        subject.check(artifact.call(model.params, traced(inputs)), inputs)


@pytest.mark.parametrize("subject", [ENCODER, LSTM], ids=lambda subject: subject.name)
def test_one_artifact_serves_every_length(subject: Subject) -> None:
    model = subject.model
    # The bound is the encoder's: it has so many position embeddings.
    batch, length = export.symbolic_shape("batch, length", constraints=["length <= 16"])
    specs = {n: jax.ShapeDtypeStruct((batch, length, *x.shape[2:]), x.dtype) for n, x in traced(subject.inputs).items()}
    artifact = round_trip(model.apply, shapes_of(model.params), specs)
    for sizes in ((1, 3), (2, 8), (5, 7)):
        inputs = cut(subject.inputs, *sizes)
        subject.check(artifact.call(model.params, traced(inputs)), inputs)


# ---- outputs -------------------------------------------------------------------------------------------------------


def test_outputs_are_graph_outputs_and_internal_values(subject: Subject) -> None:
    model, inputs, name = subject.model, subject.inputs, subject.internal_name
    wanted = [name, list(model.outputs)[-1]]
    calls = {
        "run": transmuter.run(model, inputs, outputs=wanted),
        "apply": jax.jit(lambda params, inputs: model.apply(params, inputs, outputs=wanted))(
            model.params, traced(subject.inputs)
        ),
        "compile": transmuter.compile(model, outputs=wanted)(inputs),
    }
    for way, outputs in calls.items():
        assert set(outputs) == set(wanted), way
        for value in wanted:
            assert_equal(
                outputs[value], subject.expected(subject.inputs)[value], rtol=1e-4, atol=1e-5, where=f"{way}: {value}"
            )
    assert list(calls["run"]) == list(calls["compile"]) == wanted


def test_what_the_outputs_do_not_need_is_not_run(subject: Subject) -> None:
    model = subject.model

    def operations(outputs: list[str] | None) -> int:
        def call(params: dict, inputs: dict) -> dict:
            return model.apply(params, inputs, outputs=outputs)

        return len(jax.make_jaxpr(call)(model.params, traced(subject.inputs)).eqns)

    assert operations([subject.internal_name]) < operations(None)
