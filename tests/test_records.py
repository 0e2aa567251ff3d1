"""Records in the persistent cache: what a later process computes without a trace, and when there must be a new one."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import onnx
import pytest
from building import info, model_of
from compiled_models import W, X, breaking, broken_result, hooks, plain, reshaping
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from onnx import TensorProto, helper, numpy_helper

import transmuter
from transmuter.segments import identity
from transmuter.segments.executor import CompiledModel
from transmuter.segments.records import Recipe

Y = np.tanh(X @ W)


@pytest.fixture(autouse=True)
def _jax_cache() -> Iterator[None]:
    """Leaves JAX's compilation cache as it is where nobody has asked for it."""
    yield
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()


def is_recorded(compiled: CompiledModel) -> bool:
    """Whether all that has run was from records."""
    return all(segment._flat is None for segment in compiled.segments)


def records(folder: Path) -> list[Path]:
    return sorted(folder.glob("transmuter-segment-*"))


def mixed(*, scale: float = 2.0, seed: int = 0) -> onnx.ModelProto:
    """Weights that are transposed, padded, scaled and joined before they are used, and an integer output."""
    rng = np.random.default_rng(seed)
    weights = {
        "a": rng.standard_normal((8, 24)),
        "b": rng.standard_normal((40, 8)),
        "kernel": rng.standard_normal((24, 1, 3)),
        "table": rng.standard_normal((24, 24)),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"]),
        helper.make_node("Mul", ["table", "scale"], ["scaled"]),
        helper.make_node("MatMul", ["h", "scaled"], ["g"]),
        helper.make_node("Gemm", ["x", "b"], ["f"], transB=1),
        helper.make_node("Unsqueeze", ["g", "last"], ["signal"]),
        helper.make_node("Conv", ["signal", "kernel"], ["c"], group=24, pads=[1, 1]),
        helper.make_node("ArgMax", ["f"], ["best"], axis=-1),
        helper.make_node("Tanh", ["c"], ["y"]),
    ]
    initializers = [numpy_helper.from_array(w.astype(np.float32), name) for name, w in weights.items()]
    initializers += [
        numpy_helper.from_array(np.float32(scale), "scale"),
        numpy_helper.from_array(np.array([-1]), "last"),
    ]
    outputs = [info("y", None), info("best", None, TensorProto.INT64)]
    return model_of(nodes, [info("x", ("n", 8))], outputs, initializers)


def same(actual: dict, expected: dict) -> None:
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype
        np.testing.assert_array_equal(actual[name], array)


def test_a_record_spares_the_trace_and_changes_nothing(tmp_path: Path) -> None:
    first = transmuter.compile(transmuter.load(mixed()), persistent_cache=tmp_path)
    expected = first({"x": X})
    assert not is_recorded(first)
    assert len(records(tmp_path)) == 1
    again = transmuter.compile(transmuter.load(mixed()), persistent_cache=tmp_path)
    for _ in range(3):
        same(again({"x": X}), expected)
    same(again([jax.numpy.asarray(X)]), expected)
    assert is_recorded(again)
    [was], [now] = first.cache_info().segments, again.cache_info().segments
    for name in ("nodes", "results", "operators", "signature"):
        assert getattr(now, name) == getattr(was, name)
    assert (now.calls, now.hits) == (4, 3)
    assert now.compile_seconds > 0
    assert again.explain().as_dict()["segments"][0]["results"] == ("y", "best")
    assert is_recorded(again)


def test_other_weights_of_the_same_shapes_need_no_other_record(tmp_path: Path) -> None:
    transmuter.compile(transmuter.load(mixed()), {"x": X}, persistent_cache=tmp_path)
    model = transmuter.load(mixed(seed=1))
    again = transmuter.compile(model, persistent_cache=tmp_path)
    found, expected = again({"x": X}), transmuter.run(transmuter.load(mixed(seed=1)), {"x": X})
    assert is_recorded(again)
    np.testing.assert_allclose(found["y"], expected["y"], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found["best"], expected["best"])
    for name, param in transmuter.load(mixed(seed=1)).params.items():
        np.testing.assert_array_equal(model.params[name], param, "prepared copies give the originals back")


def test_gradients_and_transforms_trace_when_they_are_asked_for(tmp_path: Path) -> None:
    first = transmuter.compile(transmuter.load(mixed()), {"x": X}, persistent_cache=tmp_path)
    again = transmuter.compile(transmuter.load(mixed()), {"x": X}, persistent_cache=tmp_path)
    assert is_recorded(again)
    of_input = lambda compiled: jax.grad(lambda x: compiled({"x": x})["y"].sum())(jax.numpy.asarray(X))
    of_params = lambda compiled: jax.grad(lambda p: compiled({"x": X}, params=p)["y"].sum())(compiled.model.params)
    np.testing.assert_array_equal(of_input(again), of_input(first))
    assert not is_recorded(again)
    same(of_params(again), of_params(first))
    stacked = jax.vmap(lambda x: again({"x": x})["y"])(np.stack([X, 2 * X]))
    np.testing.assert_allclose(stacked[0], first({"x": X})["y"], rtol=1e-5, atol=1e-6)
    same(again({"x": X}), first({"x": X}))
    assert jax.jit(lambda x: again({"x": x})["y"])(X).shape == (4, 24, 1)


def test_warming_up_takes_records_too(tmp_path: Path) -> None:
    transmuter.compile(plain(), persistent_cache=tmp_path).warm_up([{"x": (n, 8)} for n in (2, 4)])
    assert len(records(tmp_path)) == 2
    again = transmuter.compile(plain(), persistent_cache=tmp_path).warm_up([{"x": (n, 8)} for n in (2, 4)])
    np.testing.assert_allclose(again({"x": X})["y"], Y, rtol=1e-5)
    assert is_recorded(again)
    assert again.cache_info().misses == 0


def test_there_are_records_of_whole_graphs_alone(tmp_path: Path) -> None:
    for _ in range(2):
        compiled = transmuter.compile(breaking(), persistent_cache=tmp_path)
        np.testing.assert_allclose(compiled(X)["y"], broken_result(X), rtol=1e-4)
        assert not is_recorded(compiled)
    assert not records(tmp_path)


@pytest.mark.parametrize("declared", [["shape"], []])
def test_contents_of_static_inputs_tell_records_apart(tmp_path: Path, declared: list[str]) -> None:
    for times in range(2):
        compiled = transmuter.compile(reshaping(), static_inputs=declared, persistent_cache=tmp_path)
        for shape in ([16, 2], [2, 16]):
            result = compiled({"x": X, "shape": np.array(shape)})["y"]
            np.testing.assert_array_equal(result, X.reshape(shape))
        assert is_recorded(compiled) == bool(times)
        assert {s.calls for s in compiled.cache_info().segments} == {1}
    assert len(records(tmp_path)) == 2 + (not declared), "and one that says that the input is static"


def test_code_of_others_is_traced_each_time(tmp_path: Path) -> None:
    called = []
    hooks["of others"] = lambda x: called.append(x.shape)
    for times in (1, 2):
        transmuter.compile(plain("of others"), {"x": X}, persistent_cache=tmp_path)
        assert len(called) == times
    assert not records(tmp_path)


@pytest.mark.parametrize("spoil", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b[:-9] + bytes(9)])
def test_a_spoilt_record_is_made_anew(tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    transmuter.compile(plain(), {"x": X}, persistent_cache=tmp_path)
    [file] = records(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(spoil(whole))
    compiled = transmuter.compile(plain(), persistent_cache=tmp_path)
    np.testing.assert_allclose(compiled({"x": X})["y"], Y, rtol=1e-5)
    assert not is_recorded(compiled)
    assert len(file.read_bytes()) > len(whole) // 2
    compiled = transmuter.compile(plain(), {"x": X}, persistent_cache=tmp_path)
    assert is_recorded(compiled)


def test_what_jax_had_in_its_own_cache_gets_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA serialises only a part of an executable that it has loaded."""
    with monkeypatch.context() as patch:
        patch.setattr(Recipe, "pickled", lambda recipe: None)
        transmuter.compile(plain(), {"x": X}, persistent_cache=tmp_path)
    jax.clear_caches()
    for _ in range(2):
        compiled = transmuter.compile(plain(), persistent_cache=tmp_path)
        np.testing.assert_allclose(compiled({"x": X})["y"], Y, rtol=1e-5)
        assert not is_recorded(compiled)
    assert not records(tmp_path)


def test_a_limit_of_the_users_own_holds(tmp_path: Path) -> None:
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 60.0)
    try:
        transmuter.compile(plain(), {"x": X}, persistent_cache=tmp_path)
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    assert not list(tmp_path.iterdir())


def test_what_xla_cannot_load_is_compiled_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transmuter.compile(plain(), {"x": X}, persistent_cache=tmp_path)

    def refuse(*arguments: object, **options: object) -> None:
        raise jax.errors.JaxRuntimeError("of another version")

    monkeypatch.setattr(serialize_executable, "deserialize_and_load", refuse)
    compiled = transmuter.compile(plain(), persistent_cache=tmp_path)
    with pytest.warns(RuntimeWarning, match="cannot be loaded, and is compiled anew: of another version"):
        np.testing.assert_allclose(compiled({"x": X})["y"], Y, rtol=1e-5)
    np.testing.assert_allclose(compiled({"x": X})["y"], Y, rtol=1e-5)


def test_a_folder_that_takes_nothing_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("a file")
    compiled = transmuter.compile(plain(), persistent_cache=tmp_path / "folder")
    with pytest.warns() as caught:  # JAX warns of its own cache, too
        np.testing.assert_allclose(compiled({"x": X})["y"], Y, rtol=1e-5)
    assert any("The persistent cache cannot" in str(warning.message) for warning in caught)


def test_a_model_is_told_by_all_that_tracing_looks_at() -> None:
    def changed(change: Callable[[onnx.ModelProto], object], **options: object) -> str | None:
        proto = mixed()
        change(proto)
        return identity.of_model(transmuter.load(proto, **options))

    def swap(proto: onnx.ModelProto) -> None:
        nodes = proto.graph.node
        nodes[3].input[0], nodes[0].input[0] = "g", "x"
        nodes[3].input[1] = "c2"
        proto.graph.initializer.append(numpy_helper.from_array(np.ones((40, 24), np.float32), "c2"))

    nothing = lambda proto: None
    digests = [
        changed(nothing),
        changed(nothing, trainable=True),
        changed(nothing, compute_type=None),
        changed(swap),
        changed(lambda p: p.graph.initializer[4].CopyFrom(numpy_helper.from_array(np.float32(3), "scale"))),
        changed(lambda p: p.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.ones((41, 8), np.float32), "b"))),
        changed(lambda p: p.graph.node[6].attribute[0].__setattr__("i", 0)),
        changed(lambda p: p.graph.node[7].__setattr__("op_type", "Sigmoid")),
        changed(lambda p: p.opset_import[0].__setattr__("version", 17)),
        changed(lambda p: p.graph.output.reverse()),
        changed(lambda p: p.graph.input[0].CopyFrom(info("x", (4, 8)))),
    ]
    assert None not in digests
    assert len(set(digests)) == len(digests)
    assert changed(nothing) == digests[0], "and by nothing else"
    names = changed(lambda p: [n.__setattr__("name", f"node {i}") for i, n in enumerate(p.graph.node)])
    assert names == digests[0], "a node's name is told in messages alone"


def test_graphs_in_attributes_and_functions_tell_models_apart() -> None:
    def branching(constant: float) -> onnx.ModelProto:
        def branch(value: float) -> onnx.GraphProto:
            tensor = numpy_helper.from_array(np.full(3, value, np.float32))
            return helper.make_graph(
                [helper.make_node("Constant", [], ["z"], value=tensor)], "b", [], [info("z", (3,))]
            )

        node = helper.make_node("If", ["c"], ["y"], then_branch=branch(1), else_branch=branch(constant))
        return model_of([node], [info("c", (), TensorProto.BOOL)], [info("y", (3,))])

    def calling(alpha: float) -> onnx.ModelProto:
        imports = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
        body = [helper.make_node("LeakyRelu", ["a"], ["b"], alpha=alpha)]
        function = helper.make_function("own", "F", ["a"], ["b"], body, imports[:1])
        node = helper.make_node("F", ["x"], ["y"], domain="own")
        return model_of([node], [info("x")], [info("y")], functions=[function], opset_imports=imports)

    for build in (branching, calling):
        one, two, again = (identity.of_model(transmuter.load(build(x))) for x in (0.5, 0.25, 0.5))
        assert one == again != two


def test_a_process_is_told_by_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [identity.of_process()]
    assert identity.of_process() == found[0]
    with jax.default_matmul_precision("bfloat16"):
        found.append(identity.of_process())
    with jax.enable_x64(not jax.config.jax_enable_x64):
        found.append(identity.of_process())
    with jax.numpy_dtype_promotion("strict"):
        found.append(identity.of_process())
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    found.append(identity.of_process())
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("setting", "value"), [("jax_compilation_cache_dir", None), ("jax_enable_compilation_cache", False)]
)
def test_without_a_folder_there_are_no_records(tmp_path: Path, setting: str, value: object) -> None:
    compiled = transmuter.compile(plain(), persistent_cache=tmp_path)
    before = getattr(jax.config, setting)
    jax.config.update(setting, value)
    try:
        np.testing.assert_allclose(compiled({"x": X})["y"], Y, rtol=1e-5)
    finally:
        jax.config.update(setting, before)
    assert not records(tmp_path)


def test_what_calls_other_libraries_has_no_record(tmp_path: Path) -> None:
    """JAX makes LAPACK ready when it lowers: a process that loads a record would crash."""
    proto = model_of([helper.make_node("Det", ["x"], ["y"])], [info("x", ("n", 8, 8))], [info("y", None)])
    for _ in range(2):
        compiled = transmuter.compile(transmuter.load(proto), persistent_cache=tmp_path)
        x = np.stack([W, 2 * W])
        np.testing.assert_allclose(compiled({"x": x})["y"], np.linalg.det(x), rtol=1e-3)
    assert not records(tmp_path)


def in_a_process(code: str, **variables: str) -> str:
    preamble = """
        import jax, numpy as np, transmuter
        from compiled_models import X, plain
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(preamble) + textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), **variables},
    )
    return done.stdout


def test_a_later_process_need_not_trace_on_whichever_device(tmp_path: Path) -> None:
    code = """
        compiled = transmuter.compile(plain(), persistent_cache=FOLDER)
        first = np.asarray(compiled({"x": X})["y"])
        print(compiled.segments[0]._flat is None)
        other = compiled({"x": jax.device_put(X, jax.devices()[1])})["y"]
        np.testing.assert_array_equal(other, first)
        print(*other.devices())
        mesh = jax.sharding.Mesh(jax.devices(), ("batch",))
        split = jax.device_put(X, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch")))
        np.testing.assert_array_equal(compiled({"x": split})["y"], first)
        np.testing.assert_array_equal(compiled({"x": X})["y"], first)
        """.replace("FOLDER", repr(str(tmp_path)))
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    before, device = in_a_process(code, **flags).split()
    assert before == "False"
    assert in_a_process(code, **flags).split() == ["True", device]
