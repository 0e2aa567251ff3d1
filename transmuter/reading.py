"""ONNX bytes → `onnx_ir.Model` plus weights, checked.

A file's large initializers are not parsed: their place in the file is found on the wire, they are cut out before
protobuf sees the rest, and each is read straight into an array of its own. So inline weights cost no more memory than
external ones, and nothing refers to the file afterwards.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

import google.protobuf.message
import numpy as np
import onnx
import onnx.defs
import onnx_ir as ir
from onnx_ir.passes import common as passes

from transmuter.errors import ModelError
from transmuter.lifting import lift

Source: TypeAlias = str | os.PathLike[str] | bytes | onnx.ModelProto | ir.Model

_CUT_FROM = 4096  # bytes of raw_data from which an initializer is cut out of the file
_LIFT_FROM = 17  # elements from which a Constant node's tensor is a weight like any other
_ALIGNMENT = 64  # bytes; XLA's CPU client uses an array in place if it is aligned like this
_MAP_FROM = 1 << 20  # bytes from which a weight gets pages of its own
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


@dataclass
class Weights:
    """What `read` returns: the graph, and the contents of its initializers (those of subgraphs included)."""

    model: ir.Model
    arrays: dict[ir.Value, np.ndarray]
    map_types: dict[str, onnx.TypeProto]
    """The types of graph inputs and outputs that onnx_ir does not know: those with maps."""


def read(source: Source) -> Weights:
    """Reads, checks and sorts a model, and inlines its functions where their opsets allow it.

    Raises:
        ModelError: The source is no ONNX model that could run; the message says why.
    """
    if isinstance(source, ir.Model):
        tensors = [v.const_value for graph in source.graphs() for v in graph.initializers.values()]
        base = next((Path(t.base_dir) for t in tensors if isinstance(t, ir.ExternalTensor)), None)
        try:
            proto = ir.to_proto(source)
        except Exception as error:
            raise ModelError(
                f"The onnx_ir model cannot be serialized: {error}. Check it with onnx_ir first."
            ) from error
        return _build(proto, _Tensors(base))
    if isinstance(source, onnx.ModelProto):
        proto = onnx.ModelProto()
        proto.CopyFrom(source)
        return _build(proto, _Tensors())
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _read_stream(io.BytesIO(source), None)
    if not isinstance(source, (str, os.PathLike)):
        raise ModelError(
            f"A model cannot be read from a {type(source).__name__}. "
            "Give a path, bytes, an onnx.ModelProto or an onnx_ir.Model."
        )
    path = Path(source)
    try:
        with open(path, "rb") as stream:
            return _read_stream(stream, path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}. Check the path.") from error


def external_locations(path: Path) -> list[str]:
    """The files, relative to the model's folder, in which its initializers lie."""
    with open(path, "rb") as stream:
        proto, token = _parse(stream, str(path))
    graphs, found = [proto.graph], {}
    while graphs:
        graph = graphs.pop()
        graphs += [
            inner for node in graph.node for a in node.attribute for inner in (a.g, *a.graphs) if a.type in _GRAPHS
        ]
        for tensor in graph.initializer:
            found.update((e.value, None) for e in tensor.external_data if e.key == "location" and e.value != token)
    return list(found)


def _read_stream(stream: BinaryIO, path: Path | None) -> Weights:
    proto, token = _parse(stream, str(path) if path else "The given source")
    return _build(proto, _Tensors(path.parent if path else None, path, stream, token))


def _parse(stream: BinaryIO, name: str) -> tuple[onnx.ModelProto, str]:
    """The model without its large initializers, and the location that those now have."""
    size = stream.seek(0, io.SEEK_END)
    if size == 0:
        raise ModelError(f"{name} is empty. Download or export the model again.")
    token = secrets.token_hex(8)
    try:
        return onnx.ModelProto.FromString(_cut_model(stream, size, token)), token
    except (google.protobuf.message.DecodeError, _WireError) as error:
        raise ModelError(
            f"{name} is not an ONNX model, or is truncated ({error}). Download or export it again."
        ) from error


# ---- the wire ------------------------------------------------------------------------------------------------------


class _WireError(ValueError):
    pass


def _varint(stream: BinaryIO, end: int) -> int:
    value = 0
    for shift in range(0, 70, 7):
        byte = stream.read(1)
        if not byte or stream.tell() > end:
            break
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
    raise _WireError("a field ends early")


def _fields(stream: BinaryIO, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Each protobuf field between two offsets: its number (0 if it is not length-delimited, which is all that anyone
    here looks into), and the offsets of its tag, its payload and its end."""
    while start < end:
        stream.seek(start)
        tag = _varint(stream, end)
        kind = tag & 7
        payload = start
        if kind == 0:
            _varint(stream, end)
            stop = stream.tell()
        elif kind == 2:
            length = _varint(stream, end)
            payload = stream.tell()
            stop = payload + length
        elif kind in (1, 5):
            stop = stream.tell() + (8 if kind == 1 else 4)
        else:
            raise _WireError(f"wire type {kind}")
        if stop > end:
            raise _WireError("a field ends early")
        yield (tag >> 3 if kind == 2 else 0), start, payload, stop
        start = stop


_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9  # field numbers in ModelProto, GraphProto, TensorProto


def _cut_model(stream: BinaryIO, size: int, token: str) -> bytes:
    """The model's bytes without large raw data, which become external tensors at the location `token`."""
    out = bytearray()
    for number, start, payload, stop in _fields(stream, 0, size):
        if number == _GRAPH:
            _append(out, _GRAPH, _cut_graph(stream, payload, stop, token))
        else:
            out += _slice(stream, start, stop)
    return bytes(out)


def _cut_graph(stream: BinaryIO, begin: int, end: int, token: str) -> bytes:
    out = bytearray()
    for number, start, payload, stop in _fields(stream, begin, end):
        if number == _INITIALIZER and stop - payload >= _CUT_FROM:
            _append(out, _INITIALIZER, _cut_tensor(stream, payload, stop, token))
        else:
            out += _slice(stream, start, stop)
    return bytes(out)


def _cut_tensor(stream: BinaryIO, begin: int, end: int, token: str) -> bytes:
    out = bytearray()
    place = None
    for number, start, payload, stop in _fields(stream, begin, end):
        if number == _RAW_DATA and stop - payload >= _CUT_FROM:
            place = payload, stop - payload
        else:
            out += _slice(stream, start, stop)
    if place is not None:
        stub = onnx.TensorProto(data_location=onnx.TensorProto.EXTERNAL)
        for key, value in (("location", token), ("offset", place[0]), ("length", place[1])):
            stub.external_data.add(key=key, value=str(value))
        out += stub.SerializeToString()
    return bytes(out)


def _slice(stream: BinaryIO, start: int, stop: int) -> bytes:
    stream.seek(start)
    data = stream.read(stop - start)
    if len(data) != stop - start:
        raise _WireError("the file ends early")
    return data


def _append(out: bytearray, number: int, payload: bytes) -> None:
    for value in (number << 3 | 2, len(payload)):
        while value >= 0x80:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        out.append(value)
    out += payload


# ---- tensors -------------------------------------------------------------------------------------------------------


class _Tensors:
    """Reads the contents of `TensorProto`s into arrays that alias neither the proto nor a file."""

    def __init__(
        self,
        folder: Path | None = None,
        path: Path | None = None,
        stream: BinaryIO | None = None,
        token: str | None = None,
    ):
        self._folder, self._path, self._stream, self._token = folder, path, stream, token

    def read(self, name: str, tensor: ir.TensorProtocol) -> np.ndarray:
        where = f"The initializer {name!r}"
        try:
            shape = tuple(int(d) for d in tensor.shape)
            if any(d < 0 for d in shape):
                raise ValueError(f"its shape is {list(shape)}")
            if isinstance(tensor, ir.ExternalTensor):
                return self._external(where, tensor, shape)
            array = tensor.numpy()
            if array.size != math.prod(shape):
                raise ValueError(f"it holds {array.size} elements, but its shape is {list(shape)}")
            if tensor.dtype is ir.DataType.STRING:
                return strings(array, shape)
            return np.array(array).reshape(shape)
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(f"{where} cannot be read: {error}. Download or export the model again.") from error

    def _external(self, where: str, tensor: ir.ExternalTensor, shape: tuple[int, ...]) -> np.ndarray:
        size = -(-math.prod(shape) * tensor.dtype.bitwidth // 8)
        offset, length = tensor.offset or 0, size if tensor.length is None else tensor.length
        if length != size or offset < 0:
            raise ValueError(f"{length} bytes at offset {offset} are no {tensor.dtype.name} of shape {list(shape)}")
        location = os.fspath(tensor.location)
        if location == self._token:
            return _array_from(self._stream, offset, shape, tensor.dtype)
        path = self._resolve(location, where)
        try:
            with open(path, "rb") as stream:
                return _array_from(stream, offset, shape, tensor.dtype)
        except FileNotFoundError as error:
            raise ModelError(
                f"{where} lies in {location!r}, which is missing from {self._folder}. Put that file beside the model."
            ) from error
        except OSError as error:
            raise ModelError(
                f"{where} lies in {location!r}, which cannot be read: {error.strerror}. Check the file."
            ) from error

    def _resolve(self, location: str, where: str) -> Path:
        if self._folder is None:
            raise ModelError(
                f"{where} lies in the external file {location!r}, but the model was not loaded from a path. "
                "Load it from its path, or with its weights inside."
            )
        # A model in a cache of symlinked blobs has its data beside its own target.
        roots = {self._folder.resolve(), *({self._path.resolve().parent} if self._path else ())}
        path = self._folder / location
        leaves = os.path.isabs(location) or ".." in Path(location).parts or "\0" in location or not location
        if leaves or not any(path.resolve().is_relative_to(root) for root in roots):
            raise ModelError(
                f"{where} lies in {location!r}, outside of the model's folder. "
                "Move the file into that folder if you trust it, and name it relatively."
            )
        return path


def _array_from(stream: BinaryIO, offset: int, shape: tuple[int, ...], element: ir.DataType) -> np.ndarray:
    """An array of its own with what `stream` holds at `offset`."""
    size = -(-math.prod(shape) * element.bitwidth // 8)
    stream.seek(0, io.SEEK_END)
    if offset + size > stream.tell():
        raise ValueError(f"its {size} bytes at offset {offset} lie past the end of the file")
    buffer = aligned(size)
    stream.seek(offset)
    view = memoryview(buffer)
    filled = 0
    while filled < size:
        count = stream.readinto(view[filled:])
        if not count:
            raise ValueError("the file ends early")
        filled += count
    if element.bitwidth < 8:
        return ir.PackedTensor(buffer, element, shape=ir.Shape(shape)).numpy().copy()
    return buffer.view(element.numpy()).reshape(shape)


def aligned(size: int) -> np.ndarray:
    """Bytes for a weight, where XLA's CPU client takes them as they are. Those of a large one are a mapping of their
    own, which goes back to the system at once: a heap would keep what lies between weights that are still there."""
    if size >= _MAP_FROM:
        return np.frombuffer(mmap.mmap(-1, size, **_PRIVATE), np.uint8)
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size]


def strings(values: np.ndarray, shape: Iterable[int]) -> np.ndarray:
    """A string tensor: an object array of `str`."""
    decoded = [v.decode() if isinstance(v, bytes) else str(v) for v in np.asarray(values).reshape(-1)]
    array = np.empty(len(decoded), object)
    array[:] = decoded
    return array.reshape(tuple(shape))


# ---- the graph -----------------------------------------------------------------------------------------------------


def _build(proto: onnx.ModelProto, tensors: _Tensors) -> Weights:
    _check_versions(proto)
    map_types = _take_map_types(proto.graph)
    _make_dense(proto.graph)
    for function in proto.functions:
        _make_dense_nodes(function.node)
    _check_names(proto.graph, set(), "the graph")
    for function in proto.functions:
        body = onnx.GraphProto(node=function.node)
        _check_names(body, set(function.input), f"the function {function.name!r}")
    try:
        model = ir.from_proto(proto)
        passes.TopologicalSortPass()(model)
        passes.LiftConstantsToInitializersPass(size_limit=_LIFT_FROM)(model)
        passes.InlinePass(lambda function: _agrees(function, model))(model)
        lift(model, _LIFT_FROM)
    except Exception as error:
        raise ModelError(f"The graph is malformed: {_reason(error)}. Export the model again.") from error
    arrays = {
        value: tensors.read(value.name, value.const_value)
        for graph in model.graphs()
        for value in graph.initializers.values()
        if value.const_value is not None
    }
    return Weights(model, arrays, map_types)


def _reason(error: BaseException) -> str:
    """The innermost message of a chain of errors, which is the one that names the cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).rstrip(".")


def _check_versions(proto: onnx.ModelProto) -> None:
    if not proto.HasField("graph") or not proto.graph.output:
        raise ModelError("The model has no graph with outputs: it is empty, or no ONNX model. Export it again.")
    if proto.ir_version < 3:
        raise ModelError(
            f"The model has IR version {proto.ir_version}, and the first stable one is 3. Export it again."
        )
    newest = onnx.defs.onnx_opset_version()
    for imports in (proto.opset_import, *(function.opset_import for function in proto.functions)):
        for entry in imports:
            if entry.domain in ("", "ai.onnx") and not 1 <= entry.version <= newest:
                raise ModelError(
                    f"The model imports opset {entry.version}, and opsets 1 to {newest} are known. "
                    "Update the onnx package and Transmuter, or export for an older opset."
                )


def _agrees(function: ir.Function, model: ir.Model) -> bool:
    """Whether the function means the same under the model's opsets."""
    return all(model.opset_imports.get(d, v) == v for d, v in function.opset_imports.items())


def _check_names(graph: onnx.GraphProto, outer: set[str], where: str) -> None:
    """Raises where a node or output reads a value that nothing defines."""
    for tensor in graph.initializer:
        for entry in tensor.external_data:
            if entry.key in ("offset", "length") and not entry.value.isdigit():
                raise ModelError(
                    f"The initializer {tensor.name!r} lies at the {entry.key} {entry.value!r} of a file, which is no "
                    "count of bytes. Export the model again."
                )
    own = {i.name for i in graph.input} | {t.name for t in graph.initializer}
    own |= {t.values.name for t in graph.sparse_initializer}
    for node in graph.node:
        own.update(name for name in node.output if name)
    texts = {*own, *(text for n in graph.node for text in (n.op_type, n.domain, n.name, *n.input))}
    if not all(isinstance(text, str) for text in texts):
        raise ModelError(f"A name in {where} is no text: the file is damaged. Download or export it again.")
    visible = outer | own
    for node in graph.node:
        for name in node.input:
            if name and name not in visible:
                raise ModelError(
                    f"The node {node.name or node.op_type!r} of {where} reads {name!r}, which nothing defines. "
                    "Export the model again."
                )
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs) if attribute.type in _GRAPHS else ():
                _check_names(inner, visible, f"{attribute.name!r} of {node.name or node.op_type!r}")
    for output in graph.output:
        if output.name not in visible:
            raise ModelError(f"The output {output.name!r} of {where} is defined by no node. Export the model again.")


_GRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)


def _take_map_types(graph: onnx.GraphProto) -> dict[str, onnx.TypeProto]:
    """Takes out the types with maps in them, which onnx_ir cannot hold."""
    taken = {}
    for info in (*graph.input, *graph.output, *graph.value_info):
        if "map(" in spell(info.type):
            taken[info.name] = onnx.TypeProto.FromString(info.type.SerializeToString())
            info.ClearField("type")
    return taken


def spell(kind: onnx.TypeProto) -> str:
    """A type as ONNX's documents spell it: `tensor(float)`, `seq(map(int64,tensor(float)))`."""
    which = kind.WhichOneof("value")
    if which == "sequence_type":
        return f"seq({spell(kind.sequence_type.elem_type)})"
    if which == "optional_type":
        return f"optional({spell(kind.optional_type.elem_type)})"
    if which == "map_type":
        key = onnx.TensorProto.DataType.Name(kind.map_type.key_type).lower()
        return f"map({key},{spell(kind.map_type.value_type)})"
    element = getattr(kind, which).elem_type if which else 0
    return f"tensor({onnx.TensorProto.DataType.Name(element).lower()})"


def _make_dense(graph: onnx.GraphProto) -> None:
    """Replaces sparse initializers and sparse constants, which onnx_ir drops or refuses, by dense ones."""
    for sparse in graph.sparse_initializer:
        graph.initializer.append(_dense(sparse))
    graph.ClearField("sparse_initializer")
    _make_dense_nodes(graph.node)


def _make_dense_nodes(nodes: Iterable[onnx.NodeProto]) -> None:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.SPARSE_TENSOR:
                dense = _dense(attribute.sparse_tensor)
                attribute.CopyFrom(onnx.AttributeProto(name="value", type=onnx.AttributeProto.TENSOR, t=dense))
            for inner in (attribute.g, *attribute.graphs) if attribute.type in _GRAPHS else ():
                _make_dense(inner)


def _dense(sparse: onnx.SparseTensorProto) -> onnx.TensorProto:
    try:
        values = onnx.numpy_helper.to_array(sparse.values)
        indices = onnx.numpy_helper.to_array(sparse.indices)
        dense = np.zeros(tuple(sparse.dims), values.dtype)
        if indices.ndim == 2:
            dense[tuple(indices.T)] = values
        else:
            dense.reshape(-1)[indices] = values
    except Exception as error:
        raise ModelError(
            f"The sparse tensor {sparse.values.name!r} is malformed: {error}. Export the model again."
        ) from error
    return onnx.numpy_helper.from_array(dense, sparse.values.name)
