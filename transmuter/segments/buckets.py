"""Buckets: inputs padded to a few lengths, so that many lengths share an executable, and outputs cropped again.

The lengths of a call are those of its symbolic axes. Each bucketed one is rounded up to the next bucket, inputs are
padded to that, and what the model returns is cropped along the axes that have grown with the padding. Which axes those
are is not read off their names alone: the graph is traced, without computing anything, at the padded lengths, at the
call's own, and at some between, once for each padded shape.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from fractions import Fraction
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import Tracer

from transmuter.errors import GraphBreakError, InputError, LoweringError
from transmuter.lowering.arrays import contents, is_float
from transmuter.lowering.control_flow import varying_axes
from transmuter.model import Model, accept
from transmuter.segments import preparation
from transmuter.segments.executor import CompiledModel
from transmuter.segments.segment import SMALL
from transmuter.staging import differentiated, exact_dtypes, staged, transposed_exactly

Lengths = Mapping[str, int]
"""The size of each symbol."""


@dataclass(frozen=True)
class Buckets:
    """The lengths that symbolic axes are padded to, and how.

    Attributes:
        sizes: By symbol, as the graph's inputs have it (`print(model)` shows them), the lengths to pad to:
            `{"sequence_length": [32, 128, 512]}`. Each length of a call becomes the smallest of them that holds it.
        axes: Symbols of inputs and outputs where the graph's are missing or wrong, in the form of `torch.onnx.export`'s
            `dynamic_axes`: `{"input_ids": {0: "batch", 1: "sequence"}}`. Expressions of symbols with `+ - * // %` and
            `floor`, `ceil`, `min`, `max` may stand there: `{"audio": {2: "320 * frames"}}`. None is an axis that is
            neither padded nor cropped.
        pad_values: What an input is padded with, by name. It is 0 (False, an empty string) for the others.
        side: `"right"` pads behind, `"left"` before; or one of them by symbol, and right for the others.
        masks: The inputs that mask padding where they are 0. None is all that have "mask" in their names.
        rows: Symbols of rows that are computed each by itself. They need no mask, and are padded with copies of the
            last row (on the left: of the first), so that nothing is computed of a row that is masked as a whole. None
            is all that have "batch" in their names.
        unmasked: Symbols whose padding changes no result although no input masks it, which only the caller can know:
            that of a decoder which looks back only, say.
    """

    sizes: Mapping[str, Sequence[int]]
    _: KW_ONLY
    axes: Mapping[str, Mapping[int, str | None]] = field(default_factory=dict)
    pad_values: Mapping[str, Any] = field(default_factory=dict)
    side: str | Mapping[str, str] = "right"
    masks: Sequence[str] | None = None
    rows: Sequence[str] | None = None
    unmasked: Sequence[str] = ()


class BucketedModel(CompiledModel):
    """A `CompiledModel` that pads its inputs to buckets. Make one with `transmuter.compile(model, buckets=...)`.

    Its signatures (`cache_info`, `explain`) are those of padded inputs. Inside a caller's `jit`, where all lengths are
    that one trace's, nothing is padded.

    Attributes:
        buckets: The `Buckets` that it was made with.
    """

    def __init__(self, model: Model, buckets: Buckets | Mapping[str, Sequence[int]], **options: Any):
        super().__init__(model, **options)
        self.buckets = buckets if isinstance(buckets, Buckets) else Buckets(buckets)
        self._axes = _Axes(model, self.buckets, self._wanted)
        self._crops: dict[Any, dict[str, list[_Size | None]]] = {}
        self._deciding: frozenset[str] = frozenset(v.name for v in self._static if v.name not in self._axes.padded)

    def __call__(
        self,
        *inputs: Any,
        params: Mapping[str, Any] | None = None,
        buffers: Mapping[str, Any] | None = None,
        key: jax.Array | None = None,
    ) -> dict[str, Any]:
        """Runs the model on padded inputs; arguments, result and errors are those of `CompiledModel`.

        Raises:
            InputError: Also if a length is above the largest bucket, if inputs disagree on one, or if it cannot be told
                how an output is to be cropped: the message says what to declare.
        """
        given = inputs[0] if len(inputs) == 1 and isinstance(inputs[0], (Mapping, list, tuple)) else inputs
        held = {value.name: x for value, x in self.model.bind_inputs(given).items()}
        run = functools.partial(super().__call__, params=params, buffers=buffers, key=key)
        if staged() or varying_axes([x for x in jax.tree.leaves((held, params)) if isinstance(x, Tracer)]):
            return run(held)
        lengths = self._axes.lengths({name: np.shape(x) for name, x in held.items() if _is_array(x)})
        padded = self._axes.rounded(lengths)
        if padded == lengths:
            return run(held)
        held = {name: self._axes.pad(name, x, lengths, padded) for name, x in held.items()}
        results = run(held)
        return self._cropped(results, self._crops_for(held, results, lengths, padded), lengths, padded)

    def warm_up(
        self, examples: Mapping[str, Any] | Iterable[Mapping[str, Any]], *, progress: bool | None = None
    ) -> BucketedModel:
        """Compiles ahead for the buckets that hold the examples, which are those of `CompiledModel.warm_up`."""
        examples = [examples] if isinstance(examples, Mapping) else list(examples)
        super().warm_up([self._rounded(example) for example in examples], progress=progress)
        return self

    def _rounded(self, example: Mapping[str, Any]) -> Mapping[str, Any]:
        """An example of `warm_up` with its arrays padded, and its shapes too."""
        if not isinstance(example, Mapping):
            return example
        shapes = {name: x if isinstance(x, tuple) else np.shape(x) for name, x in example.items()}
        lengths = self._axes.lengths(shapes)
        padded = self._axes.rounded(lengths)
        rounded = dict(example)
        for name in example.keys() & self._axes.padded.keys():
            if isinstance(example[name], tuple):
                rounded[name] = self._axes.shape(name, example[name], padded)
            else:
                rounded[name] = self._axes.pad(name, accept(self._axes.specs[name], example[name]), lengths, padded)
        return rounded

    # -- outputs

    def _cropped(
        self, results: dict[str, Any], crops: Mapping[str, list[_Size | None]], lengths: Lengths, padded: Lengths
    ) -> dict[str, Any]:
        shifted = {s: padded[s] if s in self._axes.left else n for s, n in lengths.items()}
        cropped = {}
        for name, x in results.items():
            windows = []
            for axis, size in enumerate(crops.get(name, ())):
                length = np.shape(x)[axis] if size is None else size(lengths)
                start = 0 if size is None else size(shifted) - length
                windows.append((start, start + length))
            cropped[name] = _crop(x, windows) if any(size is not None for size in crops.get(name, ())) else x
        return cropped

    def _crops_for(
        self, held: Mapping[str, Any], results: Mapping[str, Any], lengths: Lengths, padded: Lengths
    ) -> dict[str, list[_Size | None]]:
        """For each output and axis its size without padding, as a function of lengths; None where none is cropped."""
        grown = tuple(s for s in lengths if padded[s] != lengths[s])
        shapes = tuple((name, np.shape(x)) for name, x in held.items() if _is_array(x))

        def key(known: Mapping[str, np.ndarray]) -> Any:
            return shapes, grown, tuple((n, x.dtype.str, x.shape, x.tobytes()) for n, x in known.items())

        known = _read(held, self._deciding)
        if key(known) in self._crops:
            return self._crops[key(known)]
        probes = _Probes(self, held, known, lengths, padded, grown)
        if probes.at(lengths) is None:  # it may be that small inputs decide shapes
            small = {n for n, x in held.items() if n not in self._axes.padded and _is_small(x)}
            more = _read(held, self._deciding | small)
            others = _Probes(self, held, more, lengths, padded, grown)
            if others.at(lengths) is not None:
                self._deciding, probes, known = self._deciding | small, others, more
        crops = {name: self._crops_of(name, x, probes) for name, x in results.items()}
        for symbol in grown:
            probes.check_order(symbol)
        self._crops[key(known)] = crops
        return crops

    def _crops_of(self, name: str, result: Any, probes: _Probes) -> list[_Size | None]:
        if result is None:
            return []
        if not _is_array(result):
            others = [o for o in self._wanted if o != name]
            raise InputError(
                f"The output {name!r} is no tensor, so that padding cannot be cropped from it. "
                f"Compile without buckets, or without it: outputs={others}."
            )
        return [self._crop_of(name, axis, size, probes) for axis, size in enumerate(np.shape(result))]

    def _crop_of(self, name: str, axis: int, full: int, probes: _Probes) -> _Size | None:
        """The size of one axis, which is `full` with padding, as a function of lengths."""
        axes, lengths, padded, grown = self._axes, probes.lengths, probes.padded, probes.grown
        declared = axes.outputs.get(name, {}).get(axis)
        is_callers = axis in self.buckets.axes.get(name, {})
        if is_callers and declared is None:
            return None
        sizes = [(where, shapes[name][axis]) for where, shapes in probes.shapes(name)]
        if not is_callers and sizes:
            slopes = {s: probes.slope(name, axis, full, s) for s in grown}
            change = sum((slope or 0) * (padded[s] - lengths[s]) for s, slope in slopes.items())
            if set(slopes.values()) <= {0, 1} and full - change == probes.at(lengths)[name][axis]:
                moving = [s for s in grown if slopes[s]]
                for s in moving:
                    probes.check_order(s, name, axis, full)
                return (lambda at: full - sum(padded[s] - at[s] for s in moving)) if moving else None
        if declared is not None and declared(padded) == full and all(declared(at) == n for at, n in sizes):
            if not declared.symbols & set(grown):
                return None
            for s in declared.symbols & set(grown):
                probes.check_order(s, name, axis, full)
                if declared.interleaves(s, padded):
                    raise InputError(
                        f"Axis {axis} of the output {name!r} has the size {declared.text}, where the padding of {s!r} "
                        f"is spread all over. Compile without buckets for {s!r}, or without that output."
                    )
            return declared
        if not is_callers and not sizes and isinstance(axes.fixed(name, axis), int):
            return None
        seen = ", ".join(f"{n} for {_spell(at, grown)}" for at, n in [(padded, full), *sizes])
        of = f" ({declared.text})" if declared is not None else ""
        raise InputError(
            f"How to crop axis {axis} of the output {name!r}{of} is unclear: its size is {seen}. Declare it in "
            f"Buckets(axes={{{name!r}: {{{axis}: ...}}}}), as an expression of {', '.join(axes.symbols)}, or as None "
            "if it holds no padding."
        )


_Size = Callable[[Lengths], int]


class _Axes:
    """Which axes of a model's inputs are padded, by the sizes that they have.

    Attributes:
        specs: `TensorSpec` of each input by name.
        sizes: The buckets of each symbol, ascending.
        symbols: All symbols that inputs have.
        padded: By input, the size of each axis that is padded.
        outputs: By output, the size of each axis of which it is declared; None where the caller says so.
        left: The symbols that are padded on the left.
        rows: The symbols that are padded with copies.
    """

    def __init__(self, model: Model, buckets: Buckets, wanted: Mapping[str, Any]):
        self.specs = {**model.inputs, **model.overridable_inputs}
        self._output_specs = model.outputs
        self.sizes = {symbol: _checked_sizes(symbol, sizes) for symbol, sizes in buckets.sizes.items()}
        names = {**self.specs, **dict.fromkeys(wanted)}
        for name, axes in buckets.axes.items():
            if name not in names:
                raise InputError(f"There is no {name!r} to declare axes of. There are {', '.join(names)}.")
            if not isinstance(axes, Mapping) or any(isinstance(a, bool) or not isinstance(a, int) for a in axes):
                raise InputError(f"The axes of {name!r} are {axes!r}. Give a dict of symbols by axis, as {{1: 'n'}}.")
            shape = getattr(names[name], "shape", None)
            for axis in axes:
                if axis < 0 or (shape is not None and axis >= len(shape)):
                    raise InputError(f"{name!r} has no axis {axis}. Count from 0; it is {names[name] or 'an output'}.")
                if axes[axis] is not None and name in self.specs and shape is not None and isinstance(shape[axis], int):
                    raise InputError(f"Axis {axis} of {name!r} cannot be padded, since the model takes {names[name]}.")
        texts = {name: self._texts(spec, buckets) for name, spec in self.specs.items()}
        given = [text for axes in texts.values() for text in axes.values() if text is not None]
        self.symbols = dict.fromkeys(text for text in given if _Dimension.parse(text, None) is None)
        # an expression of what no input has is a symbol of its own
        self.symbols |= dict.fromkeys(text for text in given if _Dimension.parse(text, self.symbols) is None)
        for symbol in self.sizes:
            if symbol not in self.symbols:
                raise InputError(
                    f"No input has the axis {symbol!r}. There are {', '.join(map(repr, self.symbols)) or 'none'}; "
                    "name others in Buckets(axes={...})."
                )
        self._all = {name: self._parsed(axes, self.symbols) for name, axes in texts.items()}
        self.padded = {
            name: found
            for name, axes in self._all.items()
            if (found := {a: d for a, d in axes.items() if d is not None and d.symbols & self.sizes.keys()})
        }
        self.outputs = {
            name: self._parsed(self._texts(model.outputs.get(name), buckets, name), self.symbols) for name in wanted
        }
        self.left = {s for s in self.sizes if _checked_side(buckets.side, s, self.sizes) == "left"}
        self.rows = {s for s in self.sizes if ("batch" in s.lower() if buckets.rows is None else s in buckets.rows)}
        self._check_masks(buckets)
        self._values = self._pad_values(buckets)

    @staticmethod
    def _texts(spec: Any, buckets: Buckets, name: str | None = None) -> dict[int, str | None]:
        """What the graph or the caller calls the axes of an input or output."""
        shape = () if spec is None or spec.shape is None else spec.shape
        own = {axis: d for axis, d in enumerate(shape) if isinstance(d, str)}
        return {**own, **buckets.axes.get(name or spec.name, {})}

    @staticmethod
    def _parsed(texts: Mapping[int, str | None], symbols: Iterable[str]) -> dict[int, _Dimension | None]:
        parsed = {}
        for axis, text in texts.items():
            dimension = None if text is None else _Dimension.parse(text, symbols)
            if text is None or dimension is not None:
                parsed[axis] = dimension
        return parsed

    def fixed(self, name: str, axis: int) -> Any:
        """What the graph declares of an output's axis."""
        spec = self._output_specs.get(name)
        shape = () if spec is None or spec.shape is None else spec.shape
        return shape[axis] if axis < len(shape) else None

    def _check_masks(self, buckets: Buckets) -> None:
        for name in buckets.masks or ():
            if name not in self.specs:
                raise InputError(f"There is no input {name!r} to mask padding. There are {', '.join(self.specs)}.")
        masks = [n for n in self.specs if "mask" in n.lower()] if buckets.masks is None else list(buckets.masks)
        for symbol in (*buckets.unmasked, *(buckets.rows or ())):
            if symbol not in self.sizes:
                raise InputError(f"{symbol!r} has no buckets. Those that have are {', '.join(self.sizes)}.")
        for symbol in self.sizes.keys() - self.rows:
            having = [n for n in masks if any(symbol in d.symbols for d in self.padded.get(n, {}).values())]
            if not having and symbol not in buckets.unmasked:
                raise InputError(
                    f"No input masks the padding of {symbol!r}, so that it may change results. Name the masks that "
                    f"have that axis in Buckets(masks=[...]), or say Buckets(rows=[{symbol!r}]) if it is the batch, or "
                    f"Buckets(unmasked=[{symbol!r}]) if padding changes nothing for another reason."
                )
            for name in having:
                if name not in buckets.pad_values and self.specs[name].dtype.kind not in "biu":
                    raise InputError(
                        f"The mask {name!r} holds {self.specs[name].dtype.name}, where 0 may stand for what is masked "
                        f"or for what is not. Say which: Buckets(pad_values={{{name!r}: ...}})."
                    )

    def _pad_values(self, buckets: Buckets) -> dict[str, Any]:
        values = {}
        for name in buckets.pad_values:
            if name not in self.padded:
                raise InputError(f"The input {name!r} is not padded. Those that are: {', '.join(self.padded)}.")
        for name in self.padded:
            dtype = self.specs[name].dtype
            is_text = dtype.kind == "O"
            value = buckets.pad_values.get(name, "" if is_text else 0)
            fits = isinstance(value, str) if is_text else np.ndim(value) == 0 and not isinstance(value, str)
            if fits and not is_text:
                with np.errstate(all="ignore"):
                    cast = np.asarray(value).astype(dtype)[()]
                fits = dtype.kind not in "biu" or bool(cast == value)
            if not fits:
                kind = "a string" if is_text else f"one number of {dtype.name}"
                raise InputError(f"{name!r} cannot be padded with {value!r}. Give {kind}.")
            values[name] = value if is_text else cast
        return values

    # -- of a call

    def lengths(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """The size of each symbol in inputs of these shapes."""
        lengths: dict[str, int] = {}
        first: dict[str, str] = {}
        composite = []
        for name, axes in self._all.items():
            for axis, dimension in axes.items():
                if dimension is None or name not in shapes or axis >= len(shapes[name]):
                    continue
                size, text = shapes[name][axis], dimension.text
                if text not in self.symbols:
                    composite.append((name, axis, dimension, size))
                elif lengths.setdefault(text, size) != size and text in self.sizes:
                    raise InputError(
                        f"The inputs disagree on {text!r}: it is {lengths[text]} in {first[text]!r} and {size} in "
                        f"{name!r}. If these axes differ, name them apart: Buckets(axes={{{name!r}: {{{axis}: ...}}}})."
                    )
                first.setdefault(text, name)
        for name, axis, dimension, size in composite:
            wanted = dimension(lengths) if dimension.symbols <= lengths.keys() else None
            if wanted not in (None, size) and axis in self.padded.get(name, {}):
                raise InputError(
                    f"The input {name!r} has the size {size} along axis {axis}, but {dimension.text} is {wanted}. If "
                    f"that axis is another, name it in Buckets(axes={{{name!r}: {{{axis}: ...}}}})."
                )
        return lengths

    def rounded(self, lengths: Lengths) -> dict[str, int]:
        """`lengths` with the bucketed ones rounded up."""
        rounded = dict(lengths)
        for symbol, sizes in self.sizes.items():
            if symbol not in lengths:
                continue
            size = next((size for size in sizes if size >= lengths[symbol]), None)
            if size is None:
                raise InputError(
                    f"{symbol!r} is {lengths[symbol]}, but its largest bucket is {sizes[-1]}. Add a larger one, or "
                    "shorten the input."
                )
            rounded[symbol] = size
        return rounded

    def shape(self, name: str, shape: Sequence[int], lengths: Lengths) -> tuple[int, ...]:
        """The shape of an input at other lengths."""
        axes = self.padded.get(name, {})
        moves = {axis for axis, size in axes.items() if size.symbols <= lengths.keys()}
        return tuple(axes[i](lengths) if i in moves else n for i, n in enumerate(shape))

    def pad(self, name: str, array: Any, lengths: Lengths, padded: Lengths) -> Any:
        """An input at the padded lengths."""
        axes = self.padded.get(name)
        if axes is None or not _is_array(array):
            return array
        shifted = {s: padded[s] if s in self.left else n for s, n in lengths.items()}
        widths = [(0, 0)] * array.ndim
        for axis, size in axes.items():
            if not size.symbols <= lengths.keys():  # an optional input that would tell is absent
                continue
            before = size(shifted) - size(lengths)
            widths[axis] = before, size(padded) - size(lengths) - before
            if min(widths[axis]) < 0 or any(
                size.interleaves(s, padded) for s in size.symbols & self.sizes.keys() if padded[s] != lengths[s]
            ):
                raise InputError(
                    f"Axis {axis} of {name!r} has the size {size.text}, which cannot be padded. Compile without "
                    f"buckets for {', '.join(size.symbols & self.sizes.keys())}."
                )
        copied = [axis for axis, size in axes.items() if size.symbols & self.rows and array.shape[axis]]
        filled = [(0, 0) if axis in copied else width for axis, width in enumerate(widths)]
        copies = [width if axis in copied else (0, 0) for axis, width in enumerate(widths)]
        return _pad(_pad(array, filled, self._values[name]), copies, None)


class _Probes:
    """Shapes of the outputs at other lengths than a call's, from traces of the graph."""

    def __init__(
        self,
        compiled: BucketedModel,
        held: Mapping[str, Any],
        known: Mapping[str, np.ndarray],
        lengths: Lengths,
        padded: Lengths,
        grown: Sequence[str],
    ):
        self._compiled, self._held, self._known = compiled, held, known
        self.lengths, self.padded, self.grown = lengths, padded, grown
        self._traces: dict[tuple[int, ...], tuple[dict[str, tuple[int, ...]], list[tuple[int, ...]]] | None] = {}

    def at(self, lengths: Lengths) -> dict[str, tuple[int, ...]] | None:
        """The outputs' shapes; None if contents decide them, or the graph accepts no such lengths."""
        trace = self._trace(lengths)
        return None if trace is None else trace[0]

    def shapes(self, name: str) -> list[tuple[Lengths, dict[str, tuple[int, ...]]]]:
        """What there is of the call's own lengths and those that differ from the padded ones in one symbol."""
        if self.at(self.lengths) is None:
            return []
        where = [self.lengths, *(self._beside(s) for s in self.grown)]
        return [(at, shapes) for at in where if (shapes := self.at(at)) is not None]

    def slope(self, name: str, axis: int, full: int, symbol: str) -> Fraction | None:
        """By how much an axis grows with one symbol."""
        beside = self._beside(symbol)
        shapes = self.at(beside)
        if shapes is None:
            return None
        return Fraction(full - shapes[name][axis], self.padded[symbol] - beside[symbol])

    def check_order(self, symbol: str, output: str | None = None, axis: int = 0, full: int = 0) -> None:
        """Raises if padding of `symbol` would come to lie in the middle of an output's axis, which has the size `full`
        with it, or, with no output, of an axis of some input."""
        axes = self._compiled._axes
        beside = self._beside(symbol)
        if output is None:
            spots = [
                (f"axis {axis} of the input {name!r}", size(self.padded), size(beside))
                for name, dimensions in axes.padded.items()
                for axis, size in dimensions.items()
                if symbol in size.symbols and size.text != symbol and size.symbols <= beside.keys()
            ]
        elif full != self.padded[symbol] and (shapes := self.at(beside)) is not None:
            spots = [(f"axis {axis} of the output {output!r}", full, shapes[output][axis])]
        else:
            spots = []
        if not spots:
            return
        large, small = self._trace(self.padded), self._trace(beside)
        if large is None or small is None or len(large[1]) != len(small[1]):
            return
        for a, b in zip(large[1], small[1], strict=True):
            moving = [i for i, (m, n) in enumerate(zip(a, b, strict=False)) if m != n]
            if len(a) != len(b) or not moving:
                continue
            others = a[: moving[0]] if symbol in axes.left else a[moving[0] + 1 :]
            for where, at_large, at_small in spots:
                if (sum(a), sum(b)) == (at_large, at_small) and any(others):
                    side = "right" if symbol in axes.left else "left"
                    raise InputError(
                        f"The graph concatenates along {where}, so that the padding of {symbol!r} would lie in the "
                        f"middle of it. Pad {symbol!r} on the other side: Buckets(side={{{symbol!r}: {side!r}}})."
                    )

    def _beside(self, symbol: str) -> Lengths:
        """The padded lengths with one less of `symbol`; the call's own of it if the graph does not accept that."""
        beside = {**self.padded, symbol: self.padded[symbol] - 1}
        return beside if self.at(beside) is not None else {**self.padded, symbol: self.lengths[symbol]}

    def _trace(self, lengths: Lengths) -> tuple[dict[str, tuple[int, ...]], list[tuple[int, ...]]] | None:
        """The outputs' shapes, and for each concatenation the sizes along its axis."""
        key = tuple(lengths[s] for s in self.grown)
        if key not in self._traces:
            try:
                self._traces[key] = self._traced(lengths)
            except (GraphBreakError, LoweringError):
                self._traces[key] = None
        return self._traces[key]

    def _traced(self, lengths: Lengths) -> tuple[dict[str, tuple[int, ...]], list[tuple[int, ...]]]:
        model, axes = self._compiled.model, self._compiled._axes
        values = {v.name: v for v in model.graph.inputs}
        given, arguments = {}, {}
        for name, x in self._held.items():
            if name in self._known or not _is_array(x):
                given[values[name]] = self._known.get(name, x)
                continue
            shape = axes.shape(name, x.shape, lengths)
            if x.dtype == object:  # strings
                given[values[name]] = np.full(shape, "", object)
            else:
                arguments[values[name]] = jax.ShapeDtypeStruct(shape, axes.specs[name].dtype)
        shapes = {}

        def run(params: dict[str, Any], buffers: dict[str, Any], arrays: list[Any], key: Any) -> list[Any]:
            held = {**given, **dict(zip(arguments, arrays, strict=True))}
            results = model.evaluate(held, params, buffers, key, self._compiled._wanted)
            shapes.update({name: np.shape(x) for name, x in results.items() if _is_array(x)})
            return [x for x in results.values() if isinstance(x, jax.Array)]

        key = jax.eval_shape(lambda: jax.random.key(0)) if model.is_random else None
        with exact_dtypes():
            closed = jax.make_jaxpr(run)(model.shapes["param"], model.shapes["buffer"], list(arguments.values()), key)
        equations = [operation.equation for operation in preparation.flatten(closed).operations]
        concatenations = [
            tuple(v.aval.shape[equation.params["dimension"]] for v in equation.invars)
            for equation in equations
            if equation.primitive is lax.concatenate_p
        ]
        return shapes, concatenations


# -- sizes as expressions

_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: Fraction,
    ast.Mod: operator.mod,
}
_FUNCTIONS = {"floor": math.floor, "ceil": math.ceil, "ceiling": math.ceil, "max": max, "min": min}


@dataclass(frozen=True)
class _Dimension:
    """The size of an axis as an expression of symbols."""

    text: str
    symbols: frozenset[str]
    tree: ast.expr = field(compare=False, repr=False)

    @staticmethod
    def parse(text: str, symbols: Iterable[str] | None) -> _Dimension | None:
        """The expression that `text` is of `symbols`, or of any where they are None; None if it is a mere name of
        none of these, or nothing of the kind."""
        if symbols is not None and text in symbols:
            return _Dimension(text, frozenset([text]), ast.Name(text))
        try:
            tree = ast.parse(text.strip(), mode="eval").body
            names = frozenset(_names(tree))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        if isinstance(tree, ast.Name) or not names or (symbols is not None and not names <= set(symbols)):
            return None
        return _Dimension(text, names, tree)

    def __call__(self, lengths: Lengths) -> int:
        try:
            size = Fraction(_evaluate(self.tree, lengths))
        except ZeroDivisionError as error:
            raise InputError(f"{self.text!r} divides by zero. Declare that axis in Buckets(axes=...).") from error
        if size.denominator != 1:
            raise InputError(f"{self.text!r} is {size}, which is no size. Declare that axis in Buckets(axes=...).")
        return int(size)

    def interleaves(self, symbol: str, lengths: Lengths) -> bool:
        """Whether the size is a product of `symbol` and another, so that no end of the axis holds its padding."""
        for other in self.symbols - {symbol}:
            step = lambda s, o: self({**lengths, symbol: lengths[symbol] + s, other: lengths[other] + o})  # noqa: B023
            if lengths[other] != 1 and step(1, 1) - step(1, 0) != step(0, 1) - step(0, 0):
                return True
        return False


def _names(tree: ast.AST) -> Iterable[str]:
    """The symbols of an expression; `ValueError` if it holds anything but arithmetic."""
    match tree:
        case ast.Name(id=name):
            yield name
        case ast.Constant(value=int()):
            pass
        case ast.BinOp(left=left, right=right) if type(tree.op) in _OPERATIONS:
            yield from _names(left)
            yield from _names(right)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            yield from _names(operand)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if args and name.lower() in _FUNCTIONS:
            for argument in args:
                yield from _names(argument)
        case _:
            raise ValueError(ast.dump(tree))


def _evaluate(tree: ast.AST, lengths: Lengths) -> Any:
    match tree:
        case ast.Name(id=name):
            return lengths[name]
        case ast.Constant(value=value):
            return value
        case ast.BinOp(left=left, right=right):
            return _OPERATIONS[type(tree.op)](_evaluate(left, lengths), _evaluate(right, lengths))
        case ast.UnaryOp(operand=operand):
            return -_evaluate(operand, lengths)
        case ast.Call(func=ast.Name(id=name), args=args):
            return _FUNCTIONS[name.lower()](*(_evaluate(argument, lengths) for argument in args))
        case _:
            raise AssertionError(tree)


def _spell(lengths: Lengths, symbols: Iterable[str]) -> str:
    return ", ".join(f"{s}={lengths[s]}" for s in symbols)


def _checked_sizes(symbol: str, sizes: Any) -> list[int]:
    is_list = isinstance(sizes, Iterable) and not isinstance(sizes, (str, Mapping))
    sizes = list(sizes) if is_list else []
    if not sizes or any(isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 0 for n in sizes):
        raise InputError(f"The buckets of {symbol!r} are no lengths. Give a list such as [32, 128, 512].")
    return sorted({int(n) for n in sizes})


def _checked_side(side: str | Mapping[str, str], symbol: str, symbols: Iterable[str]) -> str:
    sides = side if isinstance(side, Mapping) else dict.fromkeys(symbols, side)
    odd = sorted(sides.keys() - set(symbols)) + [s for s in sides.values() if s not in ("left", "right")]
    if odd:
        raise InputError(f"The side has {odd[0]!r}. Give 'right' or 'left', or a dict of them by {', '.join(symbols)}.")
    return sides.get(symbol, "right")


# -- arrays


def _is_array(x: Any) -> bool:
    return isinstance(x, (np.ndarray, jax.Array))


def _read(held: Mapping[str, Any], names: frozenset[str]) -> dict[str, np.ndarray]:
    """The contents of those inputs, where no transform hides them."""
    read = {name: contents(x) for name, x in held.items() if name in names}
    return {name: x for name, x in read.items() if x is not None}


def _is_small(x: Any) -> bool:
    return _is_array(x) and x.ndim <= 1 and x.size <= SMALL and x.dtype != object and not is_float(x)


def _pad(x: Any, widths: Sequence[tuple[int, int]], value: Any) -> Any:
    """`x` with so many elements of `value`, or copies of its own where that is None, before and behind it along each
    axis; itself if there are none."""
    if not any(map(any, widths)):
        return x

    def pad(array: np.ndarray) -> np.ndarray:
        if value is None:
            return np.pad(array, widths, mode="edge")
        padded = np.full([n + a + b for n, (a, b) in zip(array.shape, widths, strict=True)], value, array.dtype)
        padded[tuple(slice(a, a + n) for n, (a, _) in zip(array.shape, widths, strict=True))] = array
        return padded

    if isinstance(x, np.ndarray):
        return pad(x)
    if _is_on_host(x):
        return _like(x, pad(np.asarray(x)))
    if value is None:
        return jax.numpy.pad(x, widths, mode="edge")
    return lax.pad(x, np.asarray(value, x.dtype), [(*width, 0) for width in widths])


def _crop(x: Any, windows: Sequence[tuple[int, int]]) -> Any:
    """The part of `x` from start to stop along each axis; itself if that is all."""
    if all((start, stop) == (0, n) for n, (start, stop) in zip(x.shape, windows, strict=True)):
        return x
    window = tuple(slice(start, stop) for start, stop in windows)
    if isinstance(x, np.ndarray):
        return x[window]
    x64 = jax.config.jax_enable_x64
    with exact_dtypes():
        if _is_on_host(x):
            return _like(x, np.ascontiguousarray(np.asarray(x)[window]))
        crop = lambda x: lax.slice(x, *zip(*windows, strict=True))
        return transposed_exactly(crop, x) if not x64 and differentiated([x]) else crop(x)


def _is_on_host(x: jax.Array) -> bool:
    """Whether NumPy can look at it where it is, so that no kernel need be compiled for each length."""
    return not isinstance(x, Tracer) and len(x.devices()) == 1 and next(iter(x.devices())).platform == "cpu"


def _like(x: jax.Array, array: np.ndarray) -> jax.Array:
    """`array` where `x` is."""
    return jax.device_put(array, x.sharding if x.committed else None)
