"""The ONNX backend suite: each case runs eagerly and compiled, under strict dtype promotion."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from comparison import assert_equal

import transmuter
from conformance.suite import cases, input_names

CASES = cases()


def call(mode: str, model: transmuter.Model, inputs: dict) -> dict:
    if mode == "run":
        return transmuter.run(model, inputs)
    return transmuter.compile(model, inputs)(inputs)


@pytest.mark.parametrize("mode", ["run", "compile"])
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, mode: str, request: pytest.FixtureRequest) -> None:
    case = CASES[name]
    model = transmuter.load(case.model)
    if model.unsupported_operators:
        reason = f"no lowering of {', '.join(model.unsupported_operators)}"
        request.applymarker(pytest.mark.xfail(raises=transmuter.UnsupportedOperatorError, strict=True, reason=reason))
    for inputs, expected in case.data:
        with jax.numpy_dtype_promotion("strict"):
            outputs = call(mode, model, dict(zip(input_names(case.model), inputs, strict=True)))
        assert list(outputs) == [o.name for o in case.model.graph.output]
        for actual, (output, wanted) in zip(outputs.values(), zip(outputs, expected, strict=True)):
            assert_equal(_host(actual), wanted, rtol=case.rtol, atol=case.atol, where=output, values=not case.is_random)


def _host(value: object) -> object:
    if isinstance(value, list):
        return [_host(item) for item in value]
    return np.asarray(value) if isinstance(value, jax.Array) else value
