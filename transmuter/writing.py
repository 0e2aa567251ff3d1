"""`Model` → ONNX file: the graph that was read, with weights of the caller's choice."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import onnx
import onnx_ir as ir

from transmuter.errors import InputError

if TYPE_CHECKING:
    from transmuter.model import Model

_INLINE_LIMIT = 1_900_000_000
"""Bytes of weights above which they go beside the file by themselves: protobuf has none of 2 GiB."""


def write(model: Model, path: str | os.PathLike[str], params: Mapping[str, Any] | None, external: bool | None) -> None:
    """Writes `model.save`'s file. A file that is there is replaced once the new one is whole."""
    if params is not None:
        model.check_weights("param", params)
        params = {name: _written(name, array, model.shapes["param"][name].dtype) for name, array in params.items()}
    written = _with_weights(model, params)
    size = model.nbytes
    if external is None:
        external = size > _INLINE_LIMIT
    elif not external and size > _INLINE_LIMIT:
        raise InputError(
            f"The weights have {size} bytes, and an ONNX file holds at most 2 GiB. Leave external_data out, or True."
        )
    path = Path(path)
    beside = f"{path.name}.data"
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        whole = Path(folder) / path.name
        ir.save(written, whole, format="protobuf", external_data=beside if external else None)
        if model.map_types:
            _give_map_types(whole, model.map_types)
        if external:
            os.replace(whole.with_name(beside), path.with_name(beside))
        os.replace(whole, path)


def _written(name: str, array: Any, dtype: np.dtype) -> np.ndarray:
    """A given param in the dtype of the file."""
    if isinstance(array, jax.core.Tracer):
        raise InputError(f"The param {name!r} is being traced by a JAX transform. Save outside of it.")
    array = np.asarray(array)
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    if not np.isfinite(cast).all() and np.isfinite(array).all():
        raise InputError(
            f"The param {name!r} holds {np.abs(array).max():.6g}, which the {dtype.name} of the file cannot hold. "
            "Train with a penalty on large weights, or load a float32 export."
        )
    return cast


def _with_weights(model: Model, params: Mapping[str, np.ndarray] | None) -> ir.Model:
    """A copy of the graph whose initializers hold the weights, each fetched when it is written."""
    copy, originals = model.copied()
    for value, original in originals.items():
        value.const_value = _tensor(model, original, params)
    return copy


def _tensor(model: Model, value: ir.Value, params: Mapping[str, np.ndarray] | None) -> ir.TensorProtocol:
    if value not in model.weight_values:
        array = model.constant(value)
        if array.dtype == object:
            return ir.StringTensor(array, shape=ir.Shape(array.shape), name=value.name)
        return ir.Tensor(array, name=value.name)
    kind, name = model.weight_values[value]
    shape = model.shapes[kind][name]

    def fetch() -> ir.Tensor:
        array = model.weight(name) if params is None or kind == "buffer" else params[name]
        return ir.Tensor(np.asarray(array), name=value.name)

    return ir.LazyTensor(fetch, ir.DataType.from_numpy(shape.dtype), ir.Shape(shape.shape), name=value.name)


def _give_map_types(path: Path, types: Mapping[str, onnx.TypeProto]) -> None:
    """Puts in the types with maps in them, which onnx_ir cannot hold."""
    proto = onnx.load(path, load_external_data=False)
    for info in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        if info.name in types:
            info.type.CopyFrom(types[info.name])
    path.write_bytes(proto.SerializeToString())
