"""Every operator whose float outputs depend on float operands has the gradient that finite differences have.

One small node of each operator of the standard domains, its lowering called directly in float64. Those that say
`differentiable=False` must have a gradient of zeros, the others one that is not. What happens at particular points (a
masked softmax row, the norm of zero) is tested with the operators of each family.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from conformance.nodes import Node, nodes, operators
from jax.test_util import check_grads
from onnx import numpy_helper

from transmuter.lowering import registry

TRIED = 12
"""Among how many of the smallest nodes one is looked for: not all have float operands and results."""

FLOATS = {"float16", "bfloat16", "float32", "float64"}

IN_FLOAT32 = {"DequantizeLinear", "DynamicQuantizeLinear", "LayerNormalization"}
"""Operators that compute in float32 or return it, whatever the operands are, as those of ai.onnx.ml do."""


@pytest.mark.parametrize("operator", operators(), ids="::".join)
def test_gradients_are_those_of_finite_differences(operator: tuple[str, str]) -> None:
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        lowering, function, operands = _function(operator)
        if function is None:
            assert not _can_have_a_gradient(operator), "has float operands and outputs, but no node that shows it"
            pytest.skip("no float operand or no float output")
        value, pullback = jax.vjp(function, *operands)
        gradients = pullback(jnp.ones_like(value))
        assert any(np.any(gradient) for gradient in gradients) == lowering.differentiable
        if lowering.differentiable:
            is_coarse = operator[0] or operator[1] in IN_FLOAT32
            eps, tolerance = (1e-2, 1e-2) if is_coarse else (1e-6, 1e-4)
            check_grads(function, operands, 1, ["rev"], atol=tolerance, rtol=tolerance, eps=eps)


def _can_have_a_gradient(operator: tuple[str, str]) -> bool:
    node = nodes()[operator][0]
    lowering = _lowering(node)
    constraints = {c.type_param_str: set(c.allowed_type_strs) for c in node.schema.type_constraints}
    names = {"float16", "bfloat16", "float", "double"}
    are_float = lambda formals: [
        any(f"tensor({name})" in constraints.get(f.type_str, f.type_str) for name in names) for f in formals
    ]
    inputs = [x and f.name not in lowering.known for x, f in zip(are_float(node.schema.inputs), node.schema.inputs)]
    return lowering.differentiable and any(inputs) and any(are_float(node.schema.outputs))


def _function(
    operator: tuple[str, str],
) -> tuple[registry.Lowering, Callable[..., jax.Array] | None, list[jax.Array]]:
    """The lowering of an operator, a function of float operands that calls it, and these; None if there are none."""
    for node in nodes()[operator][:TRIED]:
        lowering = _lowering(node)
        function, operands = _weighted_sum(node, lowering)
        function = function if lowering.reads else jax.jit(function)
        value = function(*operands) if operands else None
        if value is not None and np.isfinite(value):
            return lowering, function, operands
    return lowering, None, []


def _lowering(node: Node) -> registry.Lowering:
    return registry.find(node.proto.domain, node.proto.op_type, node.schema.since_version)


def _weighted_sum(node: Node, lowering: registry.Lowering) -> tuple[Callable[..., jax.Array | None], list[jax.Array]]:
    """A function of a node's float operands: the sum of its float outputs, each element with a weight of its own. It is
    None if there are none. The operands are moved a little, off points where an operator has a kink."""
    rng = np.random.default_rng(0)
    operands, places = list(node.operands), []
    for i, operand in enumerate(operands):
        name = lowering.operand(i)
        if operand is not None and operand.dtype.name in FLOATS and name not in lowering.known:
            kind = np.float64 if lowering.differentiable else operand.dtype
            operands[i] = (operand + rng.uniform(0.005, 0.01, operand.shape)).astype(kind)
            places.append(i)
    attributes = _attributes(node, lowering)

    def function(*floats: jax.Array) -> jax.Array | None:
        given = list(operands)
        for i, value in zip(places, floats):
            given[i] = value
        results = lowering.function(*given, **attributes)
        results = results if isinstance(results, tuple) else (results,)
        weights = np.random.default_rng(1)
        terms = [
            jnp.sum(y * weights.normal(size=y.shape).astype(y.dtype))
            for y in results
            if y is not None and y.dtype.name in FLOATS
        ]
        return sum(term.astype(np.float64) for term in terms) if terms else None

    return function, [jnp.asarray(operands[i]) for i in places]


def _attributes(node: Node, lowering: registry.Lowering) -> dict[str, Any]:
    given = dict.fromkeys(lowering.attributes) | lowering.defaults(node.schema.since_version)
    given |= {name: _python(value) for name, value in node.attributes.items()}
    if "key" in lowering.fills:
        given["key"] = jax.random.key(0)
    if "output_count" in lowering.fills:
        given["output_count"] = len(node.proto.output)
    return given


def _python(value: Any) -> Any:
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_python, value))
    return value.decode() if isinstance(value, bytes) else value
