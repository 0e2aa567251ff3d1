"""If, Loop and Scan, under every JAX transform, against ONNX Runtime and against the same thing in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import pytest
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from onnx import parser

import transmuter

F32 = np.float32
X = np.array([0.5, -1.0, 2.0], F32)


def graph(text: str, opset: int = 18) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> main {text}')


def load(text: str, opset: int = 18) -> transmuter.Model:
    return transmuter.load(graph(text, opset), trainable=True)


def ort(text: str, inputs: dict[str, Any], opset: int = 18) -> list[np.ndarray]:
    return onnxruntime.InferenceSession(graph(text, opset).SerializeToString()).run(None, inputs)


def everywhere(text: str, inputs: dict[str, np.ndarray], *, jitted: bool = True, **options: Any) -> None:
    """Eager, compiled and (without a break) jitted results are those of ONNX Runtime."""
    model, expected = load(text, **options), ort(text, inputs, **options)
    found = {
        "run": lambda: transmuter.run(model, inputs),
        "compile": lambda: transmuter.compile(model)(inputs),
        "jit": lambda: jax.jit(lambda x: model.apply(model.params, x))(inputs),
    }
    for mode, call in found.items():
        if mode == "jit" and not jitted:
            with pytest.raises(transmuter.GraphBreakError):
                call()
            continue
        actuals = call()
        for name, wanted in zip(model.outputs, expected, strict=True):
            actual = actuals[name]
            np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-6, err_msg=mode)
            assert actual.shape == wanted.shape, mode


def function(model: transmuter.Model, output: str = "y") -> Callable[..., Any]:
    return lambda *inputs: model.apply(model.params, list(inputs))[output]


def exported(f: Callable[..., Any], *args: Any) -> Any:
    return export.deserialize(export.export(jax.jit(f))(*args).serialize()).call(*args)


# ---- If ------------------------------------------------------------------------------------------------------------

IF = """(bool c, float[n] x) => (float[n] y) <float[3] w = {1, 2, 3}> {
  y = If (c) <then_branch = t () => (float[n] a) { a = Mul (x, w) },
              else_branch = e () => (float[n] b) { s = Sin (x) b = Mul (s, x) }>
}"""
IF_SHAPES = """(bool c, float[n] x) => (float[m] y) {
  y = If (c) <then_branch = t () => (float[n] a) { a = Identity (x) },
              else_branch = e () => (float[k] b) { b = Concat<axis = 0> (x, x) }>
}"""


@pytest.mark.parametrize("c", [True, False])
def test_if(c: bool) -> None:
    everywhere(IF, {"c": np.array(c), "x": X})
    everywhere(IF_SHAPES, {"c": np.array(c), "x": X}, jitted=False)


def test_if_runs_one_branch_of_a_known_condition() -> None:
    model = load(IF_SHAPES)
    for c, size in ((True, 3), (False, 6)):
        y = jax.jit(lambda x, c=c: model.apply({}, {"c": np.array(c), "x": x})["y"])(X)
        assert y.shape == (size,)


def test_if_in_a_hidden_condition_names_it() -> None:
    with pytest.raises(transmuter.GraphBreakError, match="'cond'"):
        jax.jit(function(load(IF_SHAPES)))(True, X)


def test_if_under_transforms() -> None:
    f = function(load(IF))

    def python(c: Any, x: Any) -> Any:
        return jnp.where(c, x * jnp.array([1.0, 2, 3]), jnp.sin(x) * x)

    flags = np.array([True, False])
    rows = np.stack([X, X + 1])
    np.testing.assert_allclose(jax.vmap(f)(flags, rows), jax.vmap(python)(flags, rows), rtol=1e-6)
    for c in flags:
        for g in (f, jax.jit(f), jax.checkpoint(f)):
            ours, theirs = (jax.grad(lambda c, x, h=h: h(c, x).sum(), 1)(c, X) for h in (g, python))
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)
        np.testing.assert_allclose(exported(f, c, X), python(c, X), rtol=1e-6)


# ---- Loop ----------------------------------------------------------------------------------------------------------

FOR = """(int64 n, float[k] x) => (float[k] y, float[m, k] h) <float[3] w = {0.5, -0.25, 1}, bool true = {1}> {
  y, h = Loop (n, true, x) <body = b (int64 i, bool c, float[k] v)
      => (bool d, float[k] u, float[k] z) <float s = {0.5}> {
    d = Identity (c)
    f = Cast<to = 1> (i)
    t = Tanh (v)
    p = Mul (t, w)
    q = Add (p, s)
    u = Mul (q, v)
    z = Add (u, f)
  }>
}"""
FOR_WITHOUT_OUTPUTS = FOR.replace(", float[m, k] h", "").replace("y, h =", "y =").replace(", float[k] z)", ")")
WHILE = """(float limit, float[k] x) => (float[k] y, int64 steps) <int64 n = {40}, bool true = {1}, int64 zero = {0}> {
  y, steps = Loop (n, true, x, zero) <body = b (int64 i, bool c, float[k] v, int64 j)
      => (bool d, float[k] u, int64 g) <float s = {1.5}, int64 one = {1}, float[1] w = {0.9}> {
    p = Mul (v, s)
    u = Mul (p, w)
    r = ReduceMax<keepdims = 0> (u)
    d = Less (r, limit)
    g = Add (j, one)
  }>
}"""
COUNTED = """(float[k] x) => (float[k] y, float[m, k] h)
    <int64 n = {9223372036854775807}, bool true = {1}, int64 zero = {0}> {
  y, last, same, h = Loop (n, true, x, zero, x) <body = b (int64 i, bool c, float[k] v, int64 j, float[k] w)
      => (bool d, float[k] u, int64 g, float[k] w_out, float[k] z)
      <int64 one = {1}, int64 end = {20}, int64 twelve = {12}> {
    g = Add (j, one)
    less = Less (g, end)
    early = Less (i, twelve)
    d = And (less, early)
    t = Tanh (v)
    u = Mul (t, w)
    w_out = Identity (w)
    z = Identity (u)
  }>
}"""
GROWS = """(int64 n, float[k] x) => (float[m] y) <bool true = {1}> {
  y = Loop (n, true, x) <body = b (int64 i, bool c, float[p] v) => (bool d, float[q] u) {
    d = Identity (c)
    u = Concat<axis = 0> (v, x)
  }>
}"""


def python_for(n: int, x: Any) -> Any:
    for _ in range(n):
        x = (jnp.tanh(x) * jnp.array([0.5, -0.25, 1]) + 0.5) * x
    return x


@pytest.mark.parametrize("n", [0, 1, 5, 30])
def test_for(n: int) -> None:
    inputs = {"n": np.array(n), "x": X}
    everywhere(FOR, inputs, jitted=False)
    everywhere(FOR_WITHOUT_OUTPUTS, inputs)
    model, (y, h) = load(FOR), ort(FOR, inputs)
    known = jax.jit(lambda x: model.apply(model.params, {"n": inputs["n"], "x": x}))(X)
    np.testing.assert_allclose(known["y"], y, rtol=1e-6)
    np.testing.assert_allclose(known["h"], h, rtol=1e-6)


@pytest.mark.parametrize("n", [3, 30])
def test_for_under_transforms(n: int) -> None:
    model = load(FOR)

    def f(x: Any) -> Any:
        return model.apply(model.params, {"n": np.array(n), "x": x})["y"]

    rows = np.stack([X, 0.3 * X])
    for g in (f, jax.jit(f), jax.checkpoint(f)):
        np.testing.assert_allclose(jax.vmap(g)(rows), python_for(n, rows), rtol=1e-5)
        ours, theirs = (jax.grad(lambda x, h=h: h(x).sum())(X) for h in (g, lambda x: python_for(n, x)))
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(exported(f, X), python_for(n, X), rtol=1e-5)


def test_for_of_a_hidden_count() -> None:
    f = function(load(FOR_WITHOUT_OUTPUTS))
    counts, rows = jnp.array([2, 12]), np.stack([X, X])
    expected = np.stack([python_for(2, X), python_for(12, X)])
    np.testing.assert_allclose(jax.vmap(f)(counts, rows), expected, rtol=1e-5)
    np.testing.assert_allclose(exported(f, counts[0], X), expected[0], rtol=1e-5)


def test_a_loop_without_a_bound_has_no_reverse_mode() -> None:
    text = FOR_WITHOUT_OUTPUTS.replace("=> (float[k] y)", "=> (float[k] y, float[k] e)")
    model = load(text.replace("  y = Loop", "  e = Exp (x)\n  y = Loop"))
    compiled = transmuter.compile(model)
    n = np.array(12)

    def f(x: Any) -> Any:
        return compiled({"n": n, "x": x})["y"]

    np.testing.assert_allclose(f(X), python_for(12, X), rtol=1e-5)
    by_hand = jax.jvp(lambda x: python_for(12, x), (X,), (X,))
    for g in (
        f,
        jax.jit(lambda x: model.apply(model.params, {"n": jnp.array(12) + 0 * x[0].astype(int), "x": x})["y"]),
    ):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), jax.jvp(g, (X,), (X,)), by_hand)
        with pytest.raises(transmuter.GradientError, match=r"the node of 'y' \(Loop\).*at most 10000"):
            jax.grad(lambda x, g=g: g(x).sum())(X)
    apart = jax.jit(lambda x, n: model.apply(model.params, {"n": n, "x": x})["e"])  # where nobody needs the loop's
    np.testing.assert_allclose(jax.grad(lambda x: apart(x, n).sum())(X), np.exp(X), rtol=1e-6)


def test_gradients_reach_weights_inside_of_bodies() -> None:
    model = load(FOR)

    def loss(params: Any, n: int) -> Any:
        return model.apply(params, {"n": np.array(n), "x": X})["y"].sum()

    eager = jax.grad(loss)(model.params, 12)
    jitted = jax.jit(jax.grad(loss), static_argnums=1)(model.params, 12)
    assert set(eager) == {"w", "s"}
    for name in eager:
        assert np.abs(eager[name]).min() > 0
        np.testing.assert_allclose(jitted[name], eager[name], rtol=1e-4)


def python_while(limit: float, x: Any, w: float = 0.9) -> tuple[Any, int]:
    for step in range(40):
        x = x * 1.5 * w
        if not x.max() < limit:
            return x, step + 1
    return x, 40


@pytest.mark.parametrize("limit", [1.0, 30.0, 1e30])
def test_while(limit: float) -> None:
    everywhere(WHILE, {"limit": np.array(limit, F32), "x": X})


def test_while_under_transforms() -> None:
    model = load(WHILE)
    f = function(model)
    limits, rows = np.array([1.0, 30.0, 1e30], F32), np.stack([X, 0.1 * X, X])
    expected = np.stack([python_while(limit, x)[0] for limit, x in zip(limits, rows, strict=True)])
    for g in (f, jax.jit(f), jax.checkpoint(f)):
        np.testing.assert_allclose(jax.vmap(g)(limits, rows), expected, rtol=1e-4)
        steps = [python_while(limit, x)[1] for limit, x in zip(limits, rows, strict=True)]
        gradients = jax.vmap(jax.grad(lambda limit, x, g=g: g(limit, x).sum(), 1))(limits, rows)
        np.testing.assert_allclose(gradients, [[1.35**n] * 3 for n in steps], rtol=1e-4)
    np.testing.assert_allclose(exported(f, limits[0], X), expected[0], rtol=1e-6)
    check_grads(lambda x: jax.jit(f)(F32(30), x), (X,), 1, rtol=2e-2, modes=["rev"])


def test_gradients_of_a_while_loop_reach_what_it_captures() -> None:
    model = load(WHILE)
    steps = python_while(30.0, X)[1]

    def loss(params: Any, limit: Any) -> Any:
        return model.apply(params, {"limit": limit, "x": X})["y"].sum()

    expected = X.sum() * steps * 1.35**steps
    for gradient in (jax.grad(loss), jax.jit(jax.grad(loss))):
        found = gradient(model.params, F32(30))
        np.testing.assert_allclose(found["w"], [expected / 0.9], rtol=1e-4)
        np.testing.assert_allclose(found["s"], expected / 1.5, rtol=1e-4)


def test_a_count_that_known_values_decide_needs_no_break() -> None:
    everywhere(COUNTED, {"x": X})
    model = load(COUNTED)
    text = str(jax.make_jaxpr(lambda x: model.apply(model.params, {"x": x}))(X))
    assert "scan[" in text
    assert "length=13" in text
    assert "while" not in text


def test_the_condition_is_ignored_where_none_is_given() -> None:
    text = """(int64 n) => (int64[m] h) {
      h = Loop (n, "") <body = b (int64 i, bool c) => (bool d, int64 z) <int64 two = {2}> {
        d = Less (i, two)
        z = Identity (i)
      }>
    }"""
    text = text.replace('""', "")
    model = load(text)
    assert transmuter.run(model, {"n": np.array(5)})["h"].tolist() == [0, 1, 2, 3, 4]
    for n in (5, 200):
        jitted = jax.jit(lambda n=n: model.apply({}, {"n": np.array(n)}))()
        assert jitted["h"].tolist() == list(range(n))


@pytest.mark.parametrize("n", [0, 3, 12])
def test_values_that_grow(n: int) -> None:
    everywhere(GROWS, {"n": np.array(n), "x": X}, jitted=False)
    model = load(GROWS)
    y = jax.jit(lambda x: model.apply({}, {"n": np.array(n), "x": x})["y"])(X)
    assert y.shape == (3 * n + 3,)


COUNTS = """(int64 n, float[k] x) => (float[k] y) <bool true = {1}> {
  y = Loop (n, true, x) <body = b (int64 i, bool c, float[k] v) => (bool d, float[k] u) {
    d = Identity (c)
    nz = NonZero (v)
    s = STEP (nz)
    f = Cast<to = 1> (s)
    r = ReduceSum<keepdims = 0> (f)
    u = Add (v, r)
  }>
}"""


@pytest.mark.parametrize(("step", "jitted"), [("Shape", True), ("CumSum", False)])
def test_a_body_that_needs_contents_breaks_the_loop(step: str, jitted: bool) -> None:
    """How many elements are not zero is computed padded; a sum up to each cannot be."""
    text = COUNTS.replace("STEP (nz)", "CumSum (nz, n)" if step == "CumSum" else "Shape (nz)")
    everywhere(text, {"n": np.array(1), "x": np.array([0, 1, 0, 2], F32)}, jitted=jitted)


SEARCH = """(float[k] x, float limit) => (float[k] y, float[m, k] h, float[j] sums)
    <int64 most = {20}, bool true = {1}> {
  y, h, sums = Loop (most, true, x) <body = b (int64 i, bool c, float[k] v)
      => (bool d, float[k] u, float[k] z, float t) <float s = {1.25}> {
    u = Mul (v, s)
    t = ReduceSum<keepdims = 0> (u)
    d = Less (t, limit)
    z = Neg (u)
  }>
}"""


@pytest.mark.parametrize("limit", [0, 10, 30, 1e9])
def test_what_a_loop_with_an_early_exit_collects_stays_inside(limit: float) -> None:
    inputs = {"x": X, "limit": np.array(limit, F32)}
    everywhere(SEARCH, inputs, jitted=False)
    compiled = transmuter.compile(load(SEARCH))
    compiled(inputs)
    assert not compiled.explain().breaks
    text = SEARCH.replace("float[j] sums)", "float total)")
    summed = load(text.replace("}>\n}", "}>\n  total = ReduceSum<keepdims = 0> (sums)\n}"))

    def f(*inputs: Any) -> jax.Array:
        return summed.apply(summed.params, list(inputs), outputs=["total"])["total"]

    np.testing.assert_allclose(jax.jit(f)(*inputs.values()), f(*inputs.values()), rtol=1e-5)
    slope, wanted = (jax.grad(g)(*inputs.values()) for g in (jax.jit(f), f))
    np.testing.assert_allclose(slope, wanted, rtol=1e-5)


def test_random_bodies_draw_anew_in_each_iteration() -> None:
    text = """(float[k] x) => (float[m, k] h) <int64 n = {N}, bool true = {1}> {
      h = Loop (n, true) <body = b (int64 i, bool c) => (bool d, float[k] z) {
        d = Identity (c)
        z = RandomUniformLike (x)
      }>
    }"""
    for n in (4, 20):
        model = load(text.replace("N", str(n)))
        eager = model.apply({}, {"x": X}, key=jax.random.key(1))["h"]
        jitted = jax.jit(lambda x, key, model=model: model.apply({}, {"x": x}, key=key)["h"])(X, jax.random.key(1))
        assert len(np.unique(eager)) == 3 * n
        np.testing.assert_allclose(jitted, eager, rtol=1e-6)


def test_a_random_while_loop_has_a_derivative() -> None:
    text = """(float limit, float[k] x) => (float[k] y) <int64 n = {12}, bool true = {1}> {
      y = Loop (n, true, x) <body = b (int64 i, bool c, float[k] v) => (bool d, float[k] u) {
        r = RandomUniformLike (v)
        u = Add (v, r)
        m = ReduceMax<keepdims = 0> (u)
        d = Less (m, limit)
      }>
    }"""
    model = load(text)

    def f(limit: Any, x: Any, key: Any) -> Any:
        return model.apply({}, {"limit": limit, "x": x}, key=key)["y"]

    key = jax.random.key(3)
    np.testing.assert_allclose(jax.jit(f)(F32(4), X, key), f(F32(4), X, key), rtol=1e-6)
    gradient = jax.jit(jax.grad(lambda *args: f(*args).sum(), 1))(F32(4), X, key)
    np.testing.assert_array_equal(gradient, np.ones(3, F32))


def test_a_loop_over_nothing_has_the_declared_outputs() -> None:
    text = """(float[n, 2] x) => (float[n, 2] h) <bool true = {1}, int64 zero = {0}> {
      size = Shape<start = 0, end = 1> (x)
      n = Squeeze (size)
      h = Loop (n, true) <body = b (int64 i, bool c) => (bool d, float[2] z) { d = Identity (c) z = Gather (x, i) }>
    }"""
    for rows in (0, 3):
        everywhere(text, {"x": np.ones((rows, 2), F32)})


def test_loops_inside_of_shard_map() -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    text = """(float[k] x) => (float[k] y) <int64 n = {20}, bool true = {1}, float[2] zeros = {0, 0}> {
      y = Loop (n, true, zeros) <body = b (int64 i, bool c, float[k] v) => (bool d, float[k] u) {
        d = Identity (c)
        u = Add (v, x)
      }>
    }"""
    model = load(text)
    f = jax.shard_map(function(model), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    np.testing.assert_allclose(jax.jit(f)(X[:2]), 20 * X[:2], rtol=1e-6)
    model = load(IF)
    f = jax.shard_map(function(model), mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    np.testing.assert_allclose(jax.jit(f)(jnp.array(True), X), X * [1, 2, 3], rtol=1e-6)


# ---- Scan ----------------------------------------------------------------------------------------------------------

SCAN = """(float[k] s, float[k, t] x, float[t, k] z) => (float[k] y, float[k, t] h) <float[3] w = {0.5, -0.25, 1}> {
  y, h = Scan <num_scan_inputs = 2, scan_input_axes = [1, 0], scan_input_directions = [0, 1],
               scan_output_axes = [-1], scan_output_directions = [1],
               body = b (float[k] v, float[k] a, float[k] c) => (float[k] u, float[k] o) {
    p = Mul (v, w)
    q = Add (p, a)
    r = Tanh (q)
    u = Add (r, c)
    o = Mul (u, a)
  }> (s, x, z)
}"""


def scan_inputs(t: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(t)
    return {n: draw.normal(size=s).astype(F32) for n, s in (("s", (3,)), ("x", (3, t)), ("z", (t, 3)))}


def python_scan(s: Any, x: Any, z: Any) -> Any:
    for i in range(x.shape[1]):
        s = jnp.tanh(s * jnp.array([0.5, -0.25, 1]) + x[:, i]) + z[-1 - i]
    return s


@pytest.mark.parametrize("t", [1, 7])
def test_scan(t: int) -> None:
    everywhere(SCAN, scan_inputs(t))


def test_scan_of_nothing() -> None:
    model, inputs = load(SCAN), scan_inputs(0)
    for call in (transmuter.run, lambda model, inputs: transmuter.compile(model)(inputs)):
        found = call(model, inputs)
        np.testing.assert_array_equal(found["y"], inputs["s"])
        assert found["h"].shape == (3, 0)


def test_scan_under_transforms() -> None:
    f, inputs = function(load(SCAN)), list(scan_inputs(5).values())
    batch = [np.stack([x, x + 0.5]) for x in inputs]
    expected = np.stack([python_scan(*(x[i] for x in batch)) for i in range(2)])
    for g in (f, jax.jit(f), jax.checkpoint(f)):
        np.testing.assert_allclose(jax.vmap(g)(*batch), expected, rtol=1e-5)
        ours, theirs = (jax.grad(lambda *x, h=h: h(*x).sum(), (0, 1, 2))(*inputs) for h in (g, python_scan))
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(exported(f, *inputs), python_scan(*inputs), rtol=1e-5)


def test_scan_of_a_symbolic_length() -> None:
    f = function(load(SCAN))
    (t,) = export.symbolic_shape("t")
    specs = [jax.ShapeDtypeStruct(s, F32) for s in ((3,), (3, t), (t, 3))]
    call = export.export(jax.jit(f))(*specs).call
    for length in (1, 6):
        inputs = list(scan_inputs(length).values())
        np.testing.assert_allclose(call(*inputs), python_scan(*inputs), rtol=1e-5)


def test_scan_8_batches_sequences_of_their_own_lengths() -> None:
    text = """(int64[b] lens, float[b, k] s, float[b, t, k] x) => (float[b, k] y, float[b, t, k] h) {
      y, h = Scan <num_scan_inputs = 1, directions = [D],
                   body = b (float[k] v, float[k] a) => (float[k] u, float[k] o) {
        u = Add (v, a)
        o = Mul (u, a)
      }> (lens, s, x)
    }"""
    draw = np.random.default_rng(0)
    inputs = {
        "lens": np.array([4, 2]),
        "s": draw.normal(size=(2, 3)).astype(F32),
        "x": draw.normal(size=(2, 4, 3)).astype(F32),
    }
    for direction in "01":
        everywhere(text.replace("D", direction), inputs, opset=8)


def test_a_state_that_changes_its_shape_is_an_error() -> None:
    text = """(float[k] s, float[t, k] x) => (float[m] y) {
      y = Scan <num_scan_inputs = 1, body = b (float[p] v, float[k] a) => (float[q] u) {
        u = Concat<axis = 0> (v, a)
      }> (s, x)
    }"""
    model = load(text)
    with pytest.raises(transmuter.LoweringError, match="state variable"):
        jax.eval_shape(function(model), X, np.zeros((200, 3), F32))


COLLECTS = """(float[3] x, int64 n) => (float[3] y, float[m, 3] h) <float zero = {0}, bool true = {1}> {
  COUNT
  y, h = Loop (count, COND, x) <body = b (int64 i, bool c, float[3] v) => (bool d, float[3] u, float[3] z)
      <float s = {1.25}, float limit = {9}> {
    u = Mul (v, s)
    t = ReduceSum<keepdims = 0> (u)
    d = Less (t, limit)
    z = Tanh (u)
  }>
}"""


def test_no_iteration_of_a_loop_that_data_may_end() -> None:
    text = COLLECTS.replace(
        "COUNT", "count = Identity (n) less = ReduceMax<keepdims = 0> (x) go = Greater (less, zero)"
    )
    for n in (0, 3):
        inputs = {"x": np.abs(X), "n": np.array(n)}
        everywhere(text.replace("COND", "go"), inputs, jitted=False)


@pytest.mark.parametrize("condition", ["", "true"])
def test_a_count_of_elements_bounds_a_loop(condition: str) -> None:
    """What it collects stays inside, though only the run knows how much that is."""
    text = COLLECTS.replace("COUNT", "p = Greater (x, zero) at = NonZero (p) f = Gather (at, n) count = Size (f)")
    text = text.replace("COND", condition or '""').replace('""', "")
    text = text if condition else text.replace("d = Less (t, limit)", "d = Identity (c)")
    model = load(text)
    compiled = transmuter.compile(model)
    for x in (np.abs(X), X, -np.abs(X)):
        inputs = {"x": x, "n": np.array(0)}
        found, expected = compiled(inputs), transmuter.run(model, inputs)
        for name, wanted in zip(model.outputs, ort(text, inputs), strict=True):
            np.testing.assert_allclose(found[name], wanted, rtol=1e-5)
            np.testing.assert_allclose(expected[name], wanted, rtol=1e-5)
        slopes = [
            jax.grad(lambda x, f=f: jnp.sum(f({"x": x, "n": np.array(0)})["y"]))(x)
            for f in (compiled, lambda feed: model.apply(model.params, feed))
        ]
        np.testing.assert_allclose(*slopes, rtol=1e-5)
    assert not compiled.explain().breaks
