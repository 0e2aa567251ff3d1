"""Compiled models: segments, plans, prepared weights."""
from __future__ import annotations
import jax
from transmuter.model import Model, _to_jax
from transmuter.staging import exact_dtypes


def run(model, inputs, *, outputs=None, key=None):
    with exact_dtypes():
        return model.apply(model.params, inputs, outputs=outputs, key=key)


class CompiledModel:
    """Stand-in."""

    def __init__(self, model, static=()):
        self.model = model

    def __call__(self, inputs):
        model = self.model
        with exact_dtypes():
            held = model.bind_inputs(inputs)
            wanted = model.values(None)
            if not all(hasattr(x, "dtype") and x.dtype != object for x in held.values()):
                return run(model, inputs)
            return jax.jit(lambda a, p, b: model.evaluate(dict(zip(held, a)), p, b, None, wanted))(list(held.values()), model.params, model.buffers)


def compile(model, example_inputs=None):
    return CompiledModel(model)
