"""Batches of tokens: rows of different lengths padded to a few shapes, run through a compiled model, and cut again."""

from __future__ import annotations

import functools
import operator
import os
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

import transmuter
from transmuter.errors import GraphBreakError, InputError, ModelError
from transmuter.model import Model
from transmuter.segments.executor import CompiledModel
from transmuter.serving.vocabulary import embedding_rows, gathered_tokens
from transmuter.staging import exact_dtypes

Outputs = dict[str, np.ndarray]
"""What the model says of one row, by output name."""

_MADE = ("attention_mask", "token_type_ids", "position_ids")
"""Inputs that follow from the length of a row, where it does not bring them."""
_PAST = "past_key_values"
"""How the names of inputs begin that are what a decoder remembers of tokens before: nothing here."""
_CPU_TOKENS = 1024
"""More tokens at once gain nothing on a CPU, and lose up to a half where their scores outgrow its caches (measured with
MiniLM: 32 x 128 and 4 x 512 tokens take 1.4 and 2 times as long for each token as 8 x 128)."""
_LANES = 4
"""So many batches at most run at a time on a CPU, one for each core: XLA spreads one over few cores with some loss, and
runs what one thread launches one after another."""
_UNPADDED_SHAPES = 32
"""How many shapes stay compiled where each length is one."""
_QUANTIZING = {"DynamicQuantizeLinear", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM"}


@dataclass(frozen=True)
class Row:
    """One row of a batch.

    Attributes:
        arrays: By input name, without the axis of rows. Those of one axis hold something of each token.
    """

    arrays: Mapping[str, np.ndarray]


def positive_sizes(name: str, given: int | Sequence[int]) -> tuple[int, ...]:
    """A number, or several, as sorted ones.

    Raises:
        ValueError: It is neither, or one is not positive.
    """
    try:
        several = given if isinstance(given, Iterable) and not isinstance(given, (str, bytes)) else (given,)
        sizes = tuple(sorted({operator.index(size) for size in several}))
    except TypeError:
        sizes = ()
    if not sizes or sizes[0] < 1:
        raise ValueError(f"{name} is {given!r}, but must be a positive number, or some of them.")
    return sizes


def row_buckets(batch_size: int | Sequence[int]) -> tuple[int, ...]:
    """The numbers of rows that a batch is padded to: `batch_size`, a quarter of it, a sixteenth, and so on to 1.

    A few rows then cost little more than they must, and few shapes are compiled. Several numbers are taken as they are.
    """
    sizes = positive_sizes("batch_size", batch_size)
    if isinstance(batch_size, Iterable):
        return sizes
    (size,) = sizes
    return tuple(sorted({max(1, size // 4**i) for i in range(size.bit_length())}))


def quantizes_dynamically(model: Model) -> bool:
    """Whether the graph takes scales from the contents of whole batches, so that padding moves its results."""
    return any(node.op_type in _QUANTIZING for node in model.graph)


class TokenBatches:
    """Runs rows of tokens in batches of few shapes.

    A batch is padded to the smallest sequence length that holds its longest row, and, with copies of the last one, to
    the smallest number of rows that holds them all. Padded tokens are masked (`attention_mask` is 0), so that they
    change no result. A graph without a mask is never padded: there only rows of equal lengths share a batch.

    Attributes:
        model: The model.
        compiled: The `CompiledModel`, which keeps all the shapes.
        batch_sizes: The numbers of rows that batches are padded to.
        batch_size: The largest of them.
        in_flight: How many batches are best launched before the results of the first are waited for.
        sequence_lengths: The lengths that rows are padded to; None if they are not padded.
        max_length: The length of the longest row that may be given; None without a limit.
    """

    def __init__(
        self,
        model: Model,
        *,
        batch_size: int | Sequence[int] = 1,
        sequence_lengths: int | Sequence[int] | None = (32, 128, 512),
        pad_values: Mapping[str, int | float] | None = None,
        padding_side: Literal["left", "right"] = "right",
        outputs: Sequence[str] | None = None,
        max_length: int | None = None,
    ):
        """
        Args:
            model: From `transmuter.load`; its inputs have rows as first and tokens as second axis.
            batch_size: How many rows share a batch at most, or the numbers of rows to compile for: by default
                `row_buckets` of that. A graph of a fixed number of rows has that one alone.
            sequence_lengths: The lengths to pad to. None pads nothing: each length is compiled when it first comes. A
                graph of a fixed length has that one alone.
            pad_values: What inputs are padded with, by name; 0 for the others.
            padding_side: Where. What counts positions by itself needs the right.
            outputs: Which outputs, or internal values, are computed. None is all outputs.
            max_length: The longest row, where `sequence_lengths` is None.

        Raises:
            InputError: There is no such output.
            ValueError: A size is not positive.
        """
        tokens = [spec for spec in model.inputs.values() if spec.shape is not None and len(spec.shape) == 2]
        self.model = model
        self.batch_sizes = row_buckets(batch_size)
        fixed = {spec.shape[0] for spec in tokens if isinstance(spec.shape[0], int)}
        if fixed:
            self.batch_sizes = tuple(sorted(fixed))
        self.batch_size = self.batch_sizes[-1]
        lengths = None if sequence_lengths is None else positive_sizes("sequence_length", sequence_lengths)
        widths = {spec.shape[1] for spec in tokens if isinstance(spec.shape[1], int)}
        is_masked = any("mask" in name for name in model.inputs)
        if widths:
            lengths = tuple(sorted(widths))
        elif not is_masked and lengths is not None:
            lengths, max_length = None, max(lengths)
        self.sequence_lengths = lengths
        self.max_length = max_length if self.sequence_lengths is None else self.sequence_lengths[-1]
        self._pads, self._side = dict(pad_values or {}), padding_side
        self._is_on_cpu = (model.device.platform if model.device is not None else jax.default_backend()) == "cpu"
        lanes = min(_cores(), _LANES) if self._is_on_cpu else 1
        self.in_flight = lanes + 1
        self._lanes = ThreadPoolExecutor(lanes, thread_name_prefix="batch") if lanes > 1 else None
        shapes = _UNPADDED_SHAPES * len(self.batch_sizes) if self.sequence_lengths is None else len(self._shapes())
        self.compiled: CompiledModel = transmuter.compile(model, outputs=outputs, cache_size=shapes)
        self._dtypes = {name: spec.dtype for name, spec in model.inputs.items()}
        self._tables = {name: rows for name in model.inputs if (rows := embedding_rows(model, name)) is not None}
        self._gathered = {name: ids for name in model.inputs if (ids := gathered_tokens(model, name))}
        self._symbols = {spec.shape[1] for spec in tokens if isinstance(spec.shape[1], str)}
        self._is_fixed = bool(widths)
        self._growing: dict[str, tuple[int, ...]] = {}

    # -- what a row is

    def key(self, row: Row) -> Hashable:
        """What rows of one batch have in common: the shapes of what is no token array, all lengths if unpadded, and how
        often they have the tokens that the graph gathers from all rows at once.

        Raises:
            InputError: The row lacks an input of the model, its arrays disagree on its length, or it is too long.
            ModelError: A token has no place in the model's table, so that the tokenizer is of another model.
        """
        arrays = row.arrays
        missing = [name for name in self._dtypes if name not in arrays and not _is_made(name)]
        if missing:
            raise InputError(
                f"The model has an input {missing[0]!r} that this task does not make. Use a model with the inputs "
                f"{', '.join(arrays)}."
            )
        lengths = {x.shape[0] for name, x in arrays.items() if x.ndim == 1 and name in self._dtypes}
        if len(lengths) != 1:
            raise InputError(f"The arrays of a row have the lengths {sorted(lengths)}. Give them one for each token.")
        (length,) = lengths
        if length == 0:
            raise InputError("The text has no token at all. Give another, or a tokenizer that adds special tokens.")
        if self.max_length is not None and length > self.max_length:
            raise InputError(
                f"A row has {length} tokens, but the longest that is compiled for has {self.max_length}. Truncate it, "
                "or give a larger sequence_length."
            )
        for name, size in self._tables.items():
            ids = arrays.get(name)
            if ids is not None and (ids.max() >= size or ids.min() < 0):
                raise ModelError(
                    f"The {name} are {ids.min()} to {ids.max()}, but the model's table has {size} entries. Take the "
                    "tokenizer and the model from the same repository."
                )
        others = tuple((n, x.shape) for n, x in sorted(arrays.items()) if x.ndim != 1 and n in self._dtypes)
        counts = tuple(
            np.count_nonzero(arrays[name] == id) for name, ids in self._gathered.items() if name in arrays for id in ids
        )
        return (others, length if self.sequence_lengths is None else None, counts)

    def length(self, row: Row) -> int:
        """How many tokens a row has."""
        return next(x.shape[0] for name, x in row.arrays.items() if x.ndim == 1 and name in self._dtypes)

    def width(self, row: Row) -> int:
        """How many tokens a row has once it is padded, if it has the longest row of its batch."""
        return self._width(self.length(row))

    def _width(self, length: int) -> int:
        if self.sequence_lengths is None:
            return length
        return next(size for size in self.sequence_lengths if size >= length)

    def room(self, row: Row) -> int:
        """How many rows a batch has at most whose longest row is this one."""
        return self._room(self.width(row))

    def _room(self, width: int) -> int:
        if not self._is_on_cpu:
            return self.batch_size
        return max((size for size in self.batch_sizes if size * width <= _CPU_TOKENS), default=self.batch_sizes[0])

    def _shapes(self) -> list[tuple[int, int]]:
        """All numbers of rows and tokens that batches may be padded to."""
        widths = self.sequence_lengths or ()
        return [(size, width) for width in widths for size in self.batch_sizes if size <= self._room(width)]

    def places(self, count: int) -> int:
        """How many rows a batch of `count` has once it is padded."""
        return next(size for size in self.batch_sizes if size >= count)

    # -- running

    def __call__(self, rows: Sequence[Row]) -> list[Outputs]:
        """Runs any number of rows, in as many batches as that takes.

        Returns:
            By row, the outputs: views without the axis of rows, with axes of tokens cut to those of the row.

        Raises:
            InputError, ModelError: What `key` raises.
            ExecutionError: XLA failed.
        """
        return run_all(self, rows)

    def launch(self, rows: Sequence[Row]) -> Callable[[], list[Outputs]]:
        """Starts a batch of rows of one key, no more than there is `room` for. Returns what waits for its results."""
        lengths = [self.length(row) for row in rows]
        count, width = self.places(len(rows)), self._width(max(lengths))
        inputs = self._inputs(rows, lengths, count, width)
        if self._lanes is None:
            results = self.compiled(inputs)
            return lambda: self._outputs(results, lengths, count, width)
        running = self._lanes.submit(lambda: jax.block_until_ready(self.compiled(inputs)))
        return lambda: self._outputs(running.result(), lengths, count, width)

    def _inputs(self, rows: Sequence[Row], lengths: Sequence[int], count: int, width: int) -> dict[str, np.ndarray]:
        inputs = {}
        for name, dtype in self._dtypes.items():
            if name not in rows[0].arrays and name not in _MADE:
                inputs[name] = np.zeros(self._shape(name, count, width), dtype)
                continue
            given = [row.arrays[name] for row in rows] if name in rows[0].arrays else self._made(name, lengths)
            if given[0].ndim == 1:
                array = np.full((count, width), self._pads.get(name, 0), dtype)
                for i, x in enumerate(given):
                    array[i, self._place(len(x), width)] = x
            else:
                array = np.empty((count, *given[0].shape), dtype)
                array[: len(given)] = given
            array[len(given) :] = array[len(given) - 1]
            inputs[name] = array
        return inputs

    def _made(self, name: str, lengths: Sequence[int]) -> list[np.ndarray]:
        """An input that follows from the lengths: all is attended to, in one segment, counted from 0."""
        make = {"attention_mask": np.ones, "token_type_ids": np.zeros, "position_ids": np.arange}[name]
        return [make(length, dtype=self._dtypes[name]) for length in lengths]

    def _place(self, length: int, width: int) -> slice:
        return slice(length) if self._side == "right" else slice(width - length, width)

    def _outputs(self, results: Mapping[str, Any], lengths: Sequence[int], count: int, width: int) -> list[Outputs]:
        arrays = {name: np.asarray(x) for name, x in results.items()}
        cuts = {}
        for name, array in arrays.items():
            if array.ndim == 0 or array.shape[0] != count:
                raise ModelError(
                    f"The output {name!r} has the shape {list(array.shape)}, without an axis of {count} rows. Use a "
                    "model whose outputs have the rows of a batch first."
                )
            cuts[name] = self._token_axes(name, array.shape, width)
        found = []
        for i, length in enumerate(lengths):
            place = self._place(length, width)
            whole = slice(None)
            found.append(
                {
                    name: array[(i, *(place if axis in cuts[name] else whole for axis in range(1, array.ndim)))]
                    for name, array in arrays.items()
                }
            )
        return found

    def _shape(self, name: str, count: int, width: int) -> tuple[int, ...]:
        """The shape of an input of a batch: one of tokens, or a decoder's empty past."""
        declared = self.model.inputs[name].shape or ()
        if name.startswith(_PAST):
            return (count, *(size if isinstance(size, int) else 0 for size in declared[1:]))
        if len(declared) < 2:
            return tuple(size if isinstance(size, int) else count for size in declared)
        return (count, width, *(size if isinstance(size, int) else 1 for size in declared[2:]))

    # -- which axes of outputs are tokens

    def _token_axes(self, name: str, shape: Sequence[int], width: int) -> tuple[int, ...]:
        """The axes of an output that have one place for each token.

        Those which its graph declares with the symbol of the inputs' tokens, and those that grow with the inputs where
        the declaration says neither that nor a number.
        """
        axes = tuple(axis for axis in range(1, len(shape)) if shape[axis] == width)
        if self._is_fixed:  # nothing grows: the size has to do, and the second axis is that of tokens by custom
            return axes[:1] if axes[:1] == (1,) else axes
        spec = self.model.outputs.get(name)
        declared = spec.shape if spec is not None and spec.shape is not None else (None,) * len(shape)
        return tuple(
            axis
            for axis in axes
            if not isinstance(declared[axis], int)
            and (declared[axis] in self._symbols or axis in self._growing_axes(name))
        )

    def _growing_axes(self, name: str) -> tuple[int, ...]:
        """The axes of an output that are longer by one where the inputs are."""
        if name not in self._growing:
            short, long = self._shapes_at(name, 7), self._shapes_at(name, 8)
            self._growing[name] = tuple(i for i, (a, b) in enumerate(zip(short, long, strict=True)) if b == a + 1)
        return self._growing[name]

    def _shapes_at(self, name: str, width: int) -> tuple[int, ...]:
        count = self.batch_sizes[0]
        shapes = {
            input_: jax.ShapeDtypeStruct(self._shape(input_, count, width), spec.dtype)
            for input_, spec in self.model.inputs.items()
        }
        apply = functools.partial(self.model.apply, outputs=[name])
        try:
            with exact_dtypes():
                kinds = self.model.shapes
                traced = jax.eval_shape(
                    lambda params, buffers, inputs: apply(params, inputs, buffers=buffers),
                    kinds["param"],
                    kinds["buffer"],
                    shapes,
                )
            return traced[name].shape
        except GraphBreakError:  # only a run tells
            blank = {input_: np.ones(x.shape, x.dtype) for input_, x in shapes.items()}
            return transmuter.run(self.model, blank, outputs=[name])[name].shape

    # -- ahead of calls

    def warm_up(self, *, progress: bool | None = None) -> None:
        """Compiles for all numbers of rows and all sequence lengths, several at once.

        Args:
            progress: Show a bar; that needs tqdm. None shows it on a terminal, if tqdm is there.
        """
        others = [name for name in self.model.inputs if not _is_made(name)]
        if any(len(self.model.inputs[name].shape or ()) != 2 for name in others):
            return  # only rows tell the sizes of their axes
        examples: list[dict[str, Any]] = []
        for count, width in self._shapes():
            shapes = {name: self._shape(name, count, width) for name in self.model.inputs}
            # Of a scalar that decides a branch the contents matter.
            examples.append({n: np.zeros(s, self._dtypes[n]) if len(s) < 2 else s for n, s in shapes.items()})
        if examples:
            self.compiled.warm_up(examples, progress=progress)


def plan(batches: Any, rows: Sequence[Row]) -> list[list[int]]:
    """Places of `rows` in batches that have room for them: rows of one key, by length, the longest first.

    Neighbours then have similar lengths, and only the last batch of a key may have places left.
    """
    groups: dict[Hashable, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(batches.key(row), []).append(index)
    found = []
    for indexes in groups.values():
        indexes.sort(key=lambda i: -batches.length(rows[i]))
        start = 0
        while start < len(indexes):
            end = start + batches.room(rows[indexes[start]])
            found.append(indexes[start:end])
            start = end
    return found


def run(
    batches: Any, rows: Sequence[Row], places: Iterable[Sequence[int]]
) -> Iterator[tuple[Sequence[int], list[Outputs]]]:
    """Runs batches of `rows` at the places that `plan` has found, several at a time. Yields places and outputs."""
    flying: deque[tuple[Sequence[int], Callable[[], list[Outputs]]]] = deque()
    for indexes in places:
        flying.append((indexes, batches.launch([rows[i] for i in indexes])))
        if len(flying) == batches.in_flight:
            indexes, wait = flying.popleft()
            yield indexes, wait()
    for indexes, wait in flying:
        yield indexes, wait()


def run_all(batches: Any, rows: Sequence[Row]) -> list[Outputs]:
    """Runs any number of rows, in as many batches as that takes. Returns the outputs by row."""
    results: list[Outputs] = [{}] * len(rows)
    for indexes, found in run(batches, rows, plan(batches, rows)):
        for index, outputs in zip(indexes, found, strict=True):
            results[index] = outputs
    return results


def _cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _is_made(name: str) -> bool:
    """Whether an input follows from the lengths of rows, where they do not bring it."""
    return name in _MADE or name == "use_cache_branch" or name.startswith(_PAST)
