"""Sequences, which are Python lists, and optionals, of which an empty one is None."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from transmuter.lowering.arrays import dims, is_known, traced, xp
from transmuter.lowering.control_flow import folded
from transmuter.lowering.registry import operator


def _alike(items: Sequence[Any]) -> list[Any]:
    """The items as arrays of one kind, to be joined: known if all of them are."""
    return list(items) if is_known(items) else [traced(item) for item in items]


def _index(sequence: Sequence[Any], position: np.ndarray, last: int) -> int:
    """A position among the items of `sequence`, at most `last`, where negative ones count from the back."""
    (index,) = dims(position)
    if not -len(sequence) <= index <= last:
        raise ValueError(f"position {index} is outside of a sequence of {len(sequence)}")
    return index + len(sequence) if index < 0 else index


@operator()
def SequenceConstruct(*inputs):
    return list(inputs)


@operator()
def SequenceEmpty(*, dtype):
    return []


@operator(known=("position",))
def SequenceInsert(input_sequence, tensor, position=None):
    sequence = input_sequence
    at = len(sequence) if position is None else _index(sequence, position, len(sequence))
    return [*sequence[:at], tensor, *sequence[at:]]


@operator(known=("position",))
def SequenceErase(input_sequence, position=None):
    last = len(input_sequence) - 1
    at = _index(input_sequence, np.array(-1) if position is None else position, last)
    return [*input_sequence[:at], *input_sequence[at + 1 :]]


@operator(known=("position",))
def SequenceAt(input_sequence, position):
    return input_sequence[_index(input_sequence, position, len(input_sequence) - 1)]


@operator()
def SequenceLength(input_sequence):
    return np.array(len(input_sequence), np.int64)


@operator(known=("split",))
def SplitToSequence(input, split=None, *, axis, keepdims):
    """`keepdims` only counts without `split`; ONNX Runtime goes by it where `split` is a scalar, too."""
    size = input.shape[axis]
    sizes = np.ones((), np.int64) if split is None else split
    if sizes.ndim == 0:
        (step,) = dims(sizes)
        ends = range(step, size, step)
    else:
        ends = np.cumsum(sizes)[:-1].tolist()
        if sum(dims(sizes)) != size:
            raise ValueError(f"the lengths {list(dims(sizes))} do not sum up to the dimension {size}")
    parts = list(xp.split(input, list(ends), axis)) if size or len(sizes.shape) else []
    return parts if keepdims or split is not None else [xp.squeeze(part, axis) for part in parts]


@operator()
def ConcatFromSequence(input_sequence, *, axis, new_axis):
    return (xp.stack if new_axis else xp.concatenate)(_alike(input_sequence), axis)


@operator()
def SequenceMap(input_sequence, *additional_inputs, body, key):
    inputs = [input_sequence, *additional_inputs]
    if any(isinstance(x, list) and len(x) != len(input_sequence) for x in inputs):
        raise ValueError("the sequences have different lengths")
    rows = [
        body(*(x[i] if isinstance(x, list) else x for x in inputs), key=folded(key, i))
        for i in range(len(input_sequence))
    ]
    return tuple([row[k] for row in rows] for k in range(len(body.graph.outputs)))


@operator()
def Optional(input=None, *, type):
    return input


@operator()
def OptionalHasElement(input=None):
    return np.array(input is not None)


@operator()
def OptionalGetElement(input=None):
    if input is None:
        raise ValueError("the optional has no element")
    return input
