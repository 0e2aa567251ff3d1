"""What a compiled segment follows from, as a digest: if that is the same in another process, so is the executable."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnx_ir as ir

from transmuter import native
from transmuter.lowering import registry
from transmuter.lowering.evaluation import array_of, operator_name
from transmuter.model import Model
from transmuter.segments.preparation import fingerprint

_PACKAGE = Path(__file__).parent.parent
_FOLDERS = ("", "lowering", "native", "segments")
"""Where our own code is that traces and compiles."""
_PACKAGES = ("jax", "jaxlib", "ml_dtypes", "numpy", "onnx", "onnx_ir")
"""What decides, besides our own code, how a graph is traced and compiled."""
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "TRANSMUTER_NATIVE")
_OF_NO_MATTER = ("cache", "log", "traceback", "source", "dump", "pprint", "transfer_guard", "experimental_unsafe")
"""Parts of the names of JAX's settings that change no executable."""
_PLAIN = {
    ir.AttributeType.FLOAT,
    ir.AttributeType.FLOATS,
    ir.AttributeType.INT,
    ir.AttributeType.INTS,
    ir.AttributeType.STRING,
    ir.AttributeType.STRINGS,
}
"""Kinds of attributes whose `repr` tells all of them."""


class _UnknownError(Exception):
    """There is something in a model of which nobody can say whether it is the same."""


def digest(*parts: Any) -> str:
    """A name for parts whose `repr` tells all of them."""
    return hashlib.blake2b(repr(parts).encode("utf-8", "backslashreplace"), digest_size=20).hexdigest()


def of_model(model: Model) -> str | None:
    """A digest of all of a model that tracing looks at: its graph, its options, and its weights' shapes, but not their
    contents. None where code of others computes an operator of it, or where it has what cannot be told."""
    foreign = {
        (lowering.domain, lowering.name)
        for lowering in registry.registered()
        if not lowering.function.__module__.startswith("transmuter.")
    }
    names = {f"{domain}::{name}" if domain else name for domain, name in foreign}
    if not names.isdisjoint(model.operators):
        return None
    try:
        return digest(*_of_model(model))
    except _UnknownError:
        return None


def of_process() -> str:
    """A digest of what else decides: versions, code, JAX's settings, the devices, and the processor."""
    settings = {
        name: repr(getattr(jax.config, name, value))  # a thread may have a value of its own
        for name, value in sorted(jax.config.values.items())
        if not any(part in name for part in _OF_NO_MATTER)
    }
    device = jax.devices()[0]
    kind = (device.platform, device.device_kind, device.client.platform_version, jax.device_count())
    variables = [os.environ.get(name) for name in _VARIABLES]
    return digest(_installed(), _processor(), settings, kind, variables, os.cpu_count(), native.library.variant())


# ---- the parts -----------------------------------------------------------------------------------------------------


def _of_model(model: Model) -> Iterator[Any]:
    yield model.compute_type, model.is_trainable, sorted(model.opsets.items())
    yield [*model.inputs.values(), *model.overridable_inputs.values(), *model.outputs.values()]
    numbers: dict[ir.Value, int] = {}
    yield from _of_graph(model.graph, model, numbers)
    for key, function in model.ir_model.functions.items():
        attributes = [list(_of_attribute(a, model, numbers)) for a in function.attributes.values()]
        yield "function", key, sorted(function.opset_imports.items()), attributes
        yield from _of_graph(function.graph, model, numbers)


def _of_graph(graph: ir.Graph, model: Model, numbers: dict[ir.Value, int]) -> Iterator[Any]:
    """All of a graph, its values by numbers, since their names need not be unique."""

    def number(value: ir.Value | None) -> int | None:
        return None if value is None else numbers.setdefault(value, len(numbers))

    def declared(value: ir.Value) -> tuple[Any, ...]:
        return number(value), value.name, repr(value.dtype), str(value.shape)

    yield "graph", [declared(value) for value in graph.inputs]
    for value in graph.initializers.values():
        kind, name = model.weight_values.get(value, (None, None))
        if kind is not None:
            shape = model.shapes[kind][name]
            yield declared(value), kind, name, shape.shape, shape.dtype.name
        else:
            yield declared(value), _of_array(model.constant(value))
    for node in graph:
        attributes = [list(_of_attribute(node.attributes[name], model, numbers)) for name in sorted(node.attributes)]
        operands = [number(value) for value in node.inputs]
        yield operator_name(node), node.overload, operands, [declared(value) for value in node.outputs], attributes
    yield [number(value) for value in graph.outputs]


def _of_attribute(attribute: ir.Attr, model: Model, numbers: dict[ir.Value, int]) -> Iterator[Any]:
    yield attribute.name, attribute.type.name
    match attribute.type:
        case _ if attribute.is_ref():
            yield "reference", attribute.ref_attr_name
        case kind if kind in _PLAIN or attribute.value is None:
            yield attribute.value
        case ir.AttributeType.TENSOR:
            yield _of_array(array_of(attribute.value))
        case ir.AttributeType.TENSORS:
            yield from (_of_array(array_of(tensor)) for tensor in attribute.value)
        case ir.AttributeType.GRAPH:
            yield from _of_graph(attribute.value, model, numbers)
        case ir.AttributeType.GRAPHS:
            for graph in attribute.value:
                yield from _of_graph(graph, model, numbers)
        case _:
            raise _UnknownError(attribute.name)


def _of_array(array: np.ndarray) -> Any:
    if array.dtype == object:
        return array.shape, array.reshape(-1).tolist()
    return fingerprint(array)


@functools.cache
def _installed() -> str:
    """Versions, and our own code."""
    files = sorted(f for name in _FOLDERS for f in (_PACKAGE / name).iterdir() if f.suffix in (".py", ".so"))
    contents = hashlib.blake2b(digest_size=20)
    for file in files:
        contents.update(file.read_bytes())
    versions = [importlib.metadata.version(name) for name in _PACKAGES]
    return digest(sys.version, versions, [str(file.relative_to(_PACKAGE)) for file in files], contents.hexdigest())


@functools.cache
def _processor() -> str:
    """The machine's processor and its instructions: XLA compiles for these."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # no Linux
        lines = []
    wanted: Mapping[str, str] = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    known = [text for name, text in sorted(wanted.items()) if name.strip() in ("model name", "flags", "Features")]
    return digest(platform.machine(), platform.processor(), known)
