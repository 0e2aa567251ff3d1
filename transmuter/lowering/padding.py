"""Arrays whose length only the run knows, at their largest size: NonZero and its like without a graph break.

Where a transform hides contents, an operator of `BOUNDED` gives a `Padded` array: all that there could be, of which the
first `length` along one axis count. `Shape` of it holds a `Length` there, an integer of which only the bound is known,
and shape arithmetic carries that on as it carries the symbolic dimensions of `jax.export`. What follows works on the
padding too, if an operator has a rule here: it keeps elements apart along that axis (`_APART`), or it masks the padding
out (a sum, a scatter). One that has none raises `NeedsLength`, and the array is cut at a graph break, for which the
host reads one number.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx_ir as ir

from transmuter.errors import GraphBreakError
from transmuter.lowering import elementwise
from transmuter.lowering.arrays import canonical, cast, contents, dims, is_float, is_known, traced
from transmuter.lowering.indexing import corners_of, overlaps
from transmuter.lowering.registry import Lowering, registered

LIMIT = 4096
"""Elements up to which padding is computed rather than cut at a break, where a break is possible."""


_MOST_DIMENSIONS = 8


class NeedsLength(Exception):
    """An operator cannot work on padding, or an integer is needed where only its bound is known."""


@dataclass(frozen=True)
class Length:
    """An integer among dimensions of which the value is traced, and the bound known if it is the length of something.
    Those of one `source` are equal."""

    bound: int | None
    value: jax.Array = field(compare=False)
    source: Any

    def dimension_as_value(self) -> jax.Array:
        return self.value

    def __add__(self, other: Any) -> Any:
        return self._combined("+", other)

    def __mul__(self, other: Any) -> Any:
        return self._combined("*", other)

    __radd__, __rmul__ = __add__, __mul__

    def max(self, other: Any) -> Any:
        return self._combined("max", other)

    def min(self, other: Any) -> Any:
        return self._combined("min", other)

    rmax, rmin = max, min  # what jax.core.max_dim and min_dim call

    def _combined(self, sign: str, other: Any) -> Any:
        number, value = (other.bound, other.value) if isinstance(other, Length) else (other, other)
        if self.bound is None or not isinstance(number, (int, np.integer)) or number < 0:
            raise NeedsLength
        if not isinstance(other, Length):
            if number == {"+": 0, "*": 1, "max": 0}.get(sign) or (sign == "min" and number >= self.bound):
                return self
            if number == 0:
                return 0
        source = (self.source, sign, other.source if isinstance(other, Length) else int(other))
        of_bounds, of_values = _OF_LENGTHS[sign]
        return Length(of_bounds(self.bound, int(number)), of_values(self.value, value), source)

    def __eq__(self, other: Any) -> bool:
        if isinstance(other, Length):
            if self.source == other.source:
                return True
        elif isinstance(other, (int, np.integer)) and self.bound is not None and not 0 <= other <= self.bound:
            return False
        raise NeedsLength

    def __ne__(self, other: Any) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.bound)

    def __ge__(self, other: Any) -> bool:
        return not self < other

    def __gt__(self, other: Any) -> bool:
        return self != other and self >= other

    def __lt__(self, other: Any) -> bool:
        if isinstance(other, (int, np.integer)) and self.bound is not None:
            if other <= 0:
                return False
            if other > self.bound:
                return True
        raise NeedsLength

    def __le__(self, other: Any) -> bool:
        return self == other or self < other

    def __index__(self) -> int:
        raise NeedsLength

    __int__ = __float__ = __bool__ = __neg__ = __abs__ = __invert__ = __index__

    def _refused(self, other: Any) -> Any:
        raise NeedsLength

    __sub__ = __rsub__ = __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __mod__ = __rmod__ = _refused
    __pow__ = __rpow__ = __divmod__ = __rdivmod__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _refused
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _refused


_OF_LENGTHS = {
    "+": (operator.add, operator.add),
    "*": (operator.mul, operator.mul),
    "max": (max, jnp.maximum),
    "min": (min, jnp.minimum),
}


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array", "length"], meta_fields=["axis", "source"])
@dataclass(frozen=True, eq=False)
class Padded:
    """The first `length` elements of `array` along `axis`, and padding. Those of one `source` have the same length."""

    array: jax.Array
    length: jax.Array
    axis: int
    source: Any

    @property
    def ndim(self) -> int:
        return self.array.ndim

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    @property
    def bound(self) -> int:
        return self.array.shape[self.axis]

    @property
    def dimension(self) -> Length:
        """The length as a dimension."""
        return Length(self.bound, self.length, self.source)

    @property
    def shape(self) -> tuple[Any, ...]:
        dimensions: list[Any] = list(self.array.shape)
        dimensions[self.axis] = self.dimension
        return tuple(dimensions)

    def with_array(self, array: jax.Array, axis: int | None = None) -> Padded:
        return replace(self, array=array, axis=self.axis if axis is None else axis)

    def filled(self, value: Any) -> jax.Array:
        """The array with `value` for padding."""
        position = jax.lax.broadcasted_iota(self.length.dtype, self.array.shape, self.axis)
        return jnp.where(position < self.length, self.array, jnp.asarray(value, self.array.dtype))

    def benign(self) -> Padded:
        """With the last element that counts for padding, or 0.5 if none does, without a gradient: another one might
        have none in what follows (the square root of 0), and 0 times that is NaN."""
        if not is_float(self) or self.bound == 0:
            return self
        last = jnp.take(self.array, jnp.maximum(self.length - 1, 0)[None], self.axis, mode="clip")
        half = jnp.asarray(0.5, self.dtype)
        return self.with_array(self.filled(jax.lax.stop_gradient(jnp.where(self.length > 0, last, half))))


class _Same:
    """Equal to another for the same array: what a length was counted in."""

    def __init__(self, array: jax.Array, *more: Any):
        self._array, self._more = array, more

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._array is other._array and self._more == other._more

    def __hash__(self) -> int:
        return id(self._array)


def has_length(value: Any) -> bool:
    """Whether a known value holds a `Length`."""
    return isinstance(value, np.ndarray) and value.dtype == object and any(isinstance(v, Length) for v in value.flat)


def partly_known(inputs: Sequence[Any]) -> np.ndarray | None:
    """A concatenation of known and traced dimensions as a known vector; None for arrays that are no dimensions."""
    total = 0
    for x in inputs:
        if np.ndim(x) != 1 or np.dtype(x.dtype) not in (np.dtype(object), canonical(np.int64), np.dtype(np.int64)):
            return None
        total += np.size(x)
    if total > _MOST_DIMENSIONS or not any(isinstance(x, np.ndarray) and x.size for x in inputs):
        return None
    entries: list[Any] = []
    for x in inputs:
        if isinstance(x, np.ndarray):
            entries += list(x) if x.dtype == object else x.tolist()
        else:
            entries += [Length(None, x[i], (_Same(x), i)) for i in range(x.shape[0])]
    vector = np.empty(total, object)
    vector[:] = entries
    return vector


def is_open(value: Any) -> bool:
    """Whether only the run knows the length of a value, or a dimension that it holds."""
    return isinstance(value, Padded) or has_length(value)


def cut(values: dict[Any, Any]) -> dict[Any, Any]:
    """Values (by graph value or name) with their padding cut off, for which all lengths are read at once.

    Raises:
        GraphBreakError: `vmap` hides one.
    """
    found = {key: value for key, value in values.items() if isinstance(value, Padded)}
    lengths = [contents(value.length) for value in found.values()]
    for key, length in zip(found, lengths, strict=True):
        if length is None:
            raise GraphBreakError(
                f"How long {getattr(key, 'name', key)!r} is depends on contents, which a JAX transform around the call "
                "(vmap) hides. Call the compiled model for each element outside of that transform."
            )
    whole = {
        key: jax.lax.slice_in_dim(value.array, 0, int(length), axis=value.axis)
        for (key, value), length in zip(found.items(), lengths, strict=True)
    }
    return {key: whole.get(key, value) for key, value in values.items()}


# ---- where padding comes from --------------------------------------------------------------------------------------

RATHER_KNOWN = {"Slice"}
"""Those of `BOUNDED` that do better with what small inputs hold as a part of the signature, where that will do."""
BOUNDED: dict[tuple[str, str], Callable[..., Any]] = {}
"""Operators whose result is as long as contents say, as functions that give it padded."""


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    BOUNDED["", function.__name__] = function
    return function


@_bounded
def NonZero(x: jax.Array) -> Padded:
    if x.ndim == 0:
        raise NeedsLength
    places = jnp.nonzero(x, size=x.size, fill_value=0)
    return Padded(cast(jnp.stack(places), np.int64), _count(cast(x, bool)), 1, _Same(x))


@_bounded
def Slice(data: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Padded:
    """One axis of which a bound is not known; a step of 1."""
    data, count = traced(data), np.shape(starts)[0]
    axes = np.arange(count) if axes is None else axes
    if not isinstance(axes, np.ndarray) or count != 1 or (steps is not None and contents(steps) != 1):
        raise NeedsLength
    (axis,) = (int(a) % data.ndim for a in axes)
    size = data.shape[axis]
    start, end = (jnp.reshape(cast(traced(x), np.int64), ()) for x in (starts, ends))
    start, end = (jnp.clip(jnp.where(x < 0, x + size, x), 0, size) for x in (start, end))
    places = jnp.arange(size, dtype=start.dtype) + start
    length = jnp.maximum(end - start, 0)
    return Padded(jnp.take(data, places, axis, mode="clip"), length, axis, _Same(start, object())).benign()


@_bounded
def Compress(x: jax.Array, condition: jax.Array, *, axis: int | None) -> Padded:
    x, axis = (jnp.reshape(traced(x), -1), 0) if axis is None else (traced(x), axis % x.ndim)
    condition = condition[: x.shape[axis]]
    (places,) = jnp.nonzero(condition, size=condition.size, fill_value=0)
    return Padded(jnp.take(x, places, axis, mode="clip"), _count(condition), axis, _Same(condition)).benign()


@_bounded
def Unique(x: jax.Array, *, axis: int | None, sorted: int) -> tuple[Any, ...]:
    x, axis = (jnp.reshape(x, -1), 0) if axis is None else (x, axis % x.ndim)
    if x.shape[axis] == 0:
        raise NeedsLength
    size = x.shape[axis]
    # the elements are taken from x itself, so that gradients flow
    _, first, inverse, counts = jnp.unique(
        x, size=size, axis=axis, return_index=True, return_inverse=True, return_counts=True, fill_value=None
    )
    length, inverse = _count(counts > 0), jnp.reshape(inverse, -1)
    if not sorted:
        order = jnp.argsort(jnp.where(counts > 0, first, size))
        first, counts = first[order], counts[order]
        inverse = jnp.argsort(order)[inverse]
    source = _Same(x, axis)
    wanted = Padded(jnp.take(x, first, axis, mode="clip"), length, axis, source).benign()
    first, counts = (Padded(cast(v, np.int64), length, 0, source) for v in (first, counts))
    return wanted, first, cast(inverse, np.int64), counts


@_bounded
def NonMaxSuppression(
    boxes: Any,
    scores: jax.Array,
    max_output_boxes_per_class: Any = None,
    iou_threshold: Any = None,
    score_threshold: Any = None,
    *,
    center_point_box: int,
) -> Padded:
    batch, classes, count = scores.shape
    boxes, scores = traced(boxes), traced(scores)
    most, overlap = (
        jnp.zeros((), kind) if x is None else jnp.reshape(traced(x), ())
        for x, kind in ((max_output_boxes_per_class, canonical(np.int64)), (iou_threshold, np.float32))
    )
    corners = corners_of(boxes, center_point_box)
    clashes = overlaps([x[:, :, None] for x in corners], [x[:, None] for x in corners]) > overlap
    allowed = scores == scores if score_threshold is None else scores > jnp.reshape(traced(score_threshold), ())

    def chosen(clashes: jax.Array, scores: jax.Array, allowed: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The boxes of one class in order of preference, and which of them are kept."""

        def step(state: tuple[jax.Array, jax.Array], box: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            kept, number = state
            stays = allowed[box] & (number < most) & ~jnp.any(clashes[box] & kept)
            return (kept.at[box].set(stays), number + cast(stays, number.dtype)), stays

        order = jnp.argsort(-scores, stable=True)
        return order, jax.lax.scan(step, (jnp.zeros(count, bool), jnp.zeros((), most.dtype)), order)[1]

    order, stays = jax.vmap(jax.vmap(chosen, (None, 0, 0)))(clashes, scores, allowed)
    places = [jax.lax.broadcasted_iota(order.dtype, order.shape, axis) for axis in (0, 1)]
    found = jnp.stack((*places, order), axis=-1).reshape(-1, 3)
    held = contents(most)
    bound = batch * classes * (count if held is None else min(count, max(int(held), 0)))
    (rows,) = jnp.nonzero(jnp.reshape(stays, -1), size=bound, fill_value=0)
    return Padded(cast(found[rows], np.int64), _count(stays), 0, _Same(scores, object()))


def _count(mask: jax.Array) -> jax.Array:
    return jnp.sum(mask, dtype=canonical(np.int64))


# ---- rules: what may work on padding -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """The lowering itself, on operands that have no padding to know of."""

    name: str
    function: Callable[[list[Any]], tuple[Any, ...]]

    def __call__(self, operands: Sequence[Any]) -> tuple[Any, ...]:
        return self.function(list(operands))


Rule = Callable[[list[Any], dict[str, Any], Call], Any]
_RULES: dict[tuple[str, str], Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        _RULES.update({("", name): function for name in names})
        return function

    return register


def apply(
    lowering: Lowering,
    operands: list[Any],
    attributes: dict[str, Any],
    function: Callable[[list[Any]], tuple[Any, ...]],
) -> tuple[Any, ...]:
    """The results of an operator of which an operand is `Padded`, or has a `Length` in it.

    Raises:
        NeedsLength: It has no rule, or the rule does not hold here.
    """
    call = Call(lowering.name, function)
    rule = _RULES.get((lowering.domain, lowering.name))
    if rule is None and (lowering.domain, lowering.name) in _elementwise():
        rule = _broadcast
    hidden = jax.Array if lowering.name == "NonZero" else (jax.Array, Padded)
    known = (lowering.operand(i) in lowering.known and isinstance(o, hidden) for i, o in enumerate(operands))
    if rule is not None and any(known):  # a rule may look at these
        raise NeedsLength
    if rule is None:
        if any(isinstance(o, Padded) for o in operands):
            raise NeedsLength
        return call(operands)  # arithmetic of dimensions
    result = rule(operands, attributes, call)
    return result if isinstance(result, tuple) else (result,)


@functools.cache
def _elementwise() -> frozenset[tuple[str, str]]:
    return frozenset((v.domain, v.name) for v in registered() if v.function.__module__ == elementwise.__name__)


def _plain(operands: Sequence[Any]) -> list[Any]:
    return [o.array if isinstance(o, Padded) else o for o in operands]


def _of(operands: Sequence[Any]) -> Padded:
    """The padded one among `operands`; all have one length."""
    found = [o for o in operands if isinstance(o, Padded)]
    if not found or any(o.source != found[0].source or o.bound != found[0].bound for o in found):
        raise NeedsLength
    return found[0]


def _first(operands: Sequence[Any]) -> Padded:
    """The first operand, if it is padded."""
    if not isinstance(operands[0], Padded):
        raise NeedsLength
    return operands[0]


def _broadcast(operands: list[Any], attributes: dict[str, Any], call: Call) -> Any:
    """Elementwise with broadcasting: the others have no such axis, or one of size 1."""
    if not any(isinstance(o, Padded) for o in operands):
        return call(operands)
    if attributes.get("broadcast") or (call.name == "PRelu" and "consumed_inputs" in attributes):
        raise NeedsLength  # old versions align a vector elsewhere
    one = _of(operands)
    from_end = one.axis - one.ndim
    for o in operands:
        if isinstance(o, Padded):
            if o.axis - o.ndim != from_end:
                raise NeedsLength
        elif o is not None and np.ndim(o) >= -from_end and np.shape(o)[from_end] != 1:
            raise NeedsLength
    return tuple(one.with_array(y, y.ndim + from_end) for y in call(_plain(operands)))


@_rule("Cast")
def _cast(operands: list[Any], attributes: dict[str, Any], call: Call) -> Any:
    if has_length(operands[0]) and attributes["to"] not in (ir.DataType.INT64, "INT64"):
        raise NeedsLength  # dimensions are int64
    return _broadcast(operands, attributes, call)


@_rule("CastLike")
def _cast_like(operands: list[Any], attributes: dict[str, Any], call: Call) -> Any:
    """Only the dtype of the second operand counts."""
    one = operands[0]
    if has_length(one):
        raise NeedsLength
    results = call(_plain(operands))
    return one.with_array(*results) if isinstance(one, Padded) else results


_Axes = Callable[[list[Any], dict[str, Any], int], Any]


def _from(axis: int, rank: int) -> range:
    return range(axis % rank if rank else 0, rank)


_APART: dict[str, _Axes] = {
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), lambda o, a, rank: _from(a["axis"], rank)),
    **dict.fromkeys(
        ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"),
        lambda o, a, rank: _from(a["axis"], rank),
    ),
    "LpNormalization": lambda o, a, rank: [a["axis"]],
    "CumSum": lambda o, a, rank: dims(o[1]),
    "Split": lambda o, a, rank: [a["axis"]],
    "TopK": lambda o, a, rank: [a["axis"]],
    "Trilu": lambda o, a, rank: [rank - 2, rank - 1],
    "Pad": lambda o, a, rank: range(rank) if len(o) > 3 else _padded_axes(dims(o[1]) if len(o) > 1 else a["pads"]),
    **dict.fromkeys(
        (
            *("Conv", "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"),
            *("InstanceNormalization", "GroupNormalization"),
        ),
        lambda o, a, rank: range(1, rank),
    ),
    "BatchNormalization": lambda o, a, rank: range(0 if a.get("training_mode") else 1, rank),
    "Resize": lambda o, a, rank: _resized_axes(o, a, rank),
}
"""Operators with results of the rank of their first operand, and the axes along which these mix its elements."""


def _padded_axes(pads: Sequence[int]) -> list[int]:
    half = len(pads) // 2
    return [i for i in range(half) if pads[i] or pads[half + i]]


def _resized_axes(operands: list[Any], attributes: dict[str, Any], rank: int) -> Sequence[int]:
    """Those of which the length changes, or may; a region of interest counts on the others, too."""
    mode, axes = attributes.get("coordinate_transformation_mode"), attributes.get("axes")
    axes = range(rank) if axes is None or mode == "tf_crop_and_resize" else axes
    scales = operands[1 if mode is None else 2] if mode is None or len(operands) > 2 else None
    if mode == "tf_crop_and_resize" or scales is None or np.size(scales) != len(axes):
        return axes
    return [axis for axis, scale in zip(axes, scales, strict=True) if scale != 1]


@_rule(*_APART)
def _apart(operands: list[Any], attributes: dict[str, Any], call: Call) -> Any:
    one = operands[0]
    if not isinstance(one, Padded) or any(isinstance(o, Padded) or has_length(o) for o in operands[1:]):
        raise NeedsLength
    mixed = _APART[call.name](operands, attributes, one.ndim)
    if one.axis in {axis % one.ndim for axis in mixed}:
        raise NeedsLength
    results = call(_plain(operands))
    if any(y.ndim != one.ndim or y.shape[one.axis] != one.bound for y in results):  # statistics of a batch
        raise NeedsLength
    return tuple(one.with_array(y) for y in results)


@_rule("Identity")
def _identity(operands: list[Any], attributes: dict[str, Any], call: Call) -> Any:
    return operands[0]


@_rule("Shape", "Size")
def _shape(operands: list[Any], attributes: dict[str, Any], call: Call) -> Any:
    return call(operands)  # they only look at `shape`


@_rule("Transpose")
def _transpose(operands: list[Any], attributes: dict[str, Any], call: Call) -> Any:
    one = _first(operands)
    order = attributes["perm"] or tuple(reversed(range(one.ndim)))
    return one.with_array(*call([one.array]), axis=list(order).index(one.axis))


@_rule("Squeeze", "Unsqueeze")
def _reranked(operands: list[Any], attributes: dict[str, Any], call: Call) -> Any:
    if not isinstance(operands[0], Padded):
        return call(operands)
    one, axes = operands[0], attributes.get("axes")
    if len(operands) > 1 and operands[1] is not None:
        axes = dims(operands[1])
    if axes is None:  # whether the axis goes too depends on its length
        raise NeedsLength
    (y,) = call([one.array, *operands[1:]])
    if call.name == "Unsqueeze":
        added = {axis % y.ndim for axis in axes}
        return one.with_array(y, [i for i in range(y.ndim) if i not in added][one.axis])
    gone = {axis % one.ndim for axis in axes}
    if one.axis in gone:
        raise NeedsLength
    return one.with_array(y, one.axis - sum(axis < one.axis for axis in gone))


@_rule("Reshape")
def _reshape(operands: list[Any], attributes: dict[str, Any], call: Call) -> Any:
    data, shape = operands[0], list(dims(operands[1]) if len(operands) > 1 else attributes["shape"])
    if not attributes.get("allowzero"):
        shape = [data.shape[i] if isinstance(d, int) and d == 0 else d for i, d in enumerate(shape)]
    if not isinstance(data, Padded):
        if not any(isinstance(d, Length) for d in shape):
            return call(operands)
        # the other dimensions determine the one that is not known
        if sum(isinstance(d, Length) for d in shape) > 1 or any(isinstance(d, int) and d < 0 for d in shape):
            raise NeedsLength
        return call([data, np.array([-1 if isinstance(d, Length) else d for d in shape], np.int64)])
    own = data.dimension
    before, after = math.prod(data.array.shape[: data.axis]), math.prod(data.array.shape[data.axis + 1 :])
    numbers = [d for d in shape if isinstance(d, int)]
    if -1 in numbers and any(isinstance(d, Length) and d.source == own.source for d in shape):
        others = math.prod(d for d in numbers if d != -1)
        left = before * after // others if others and before * after % others == 0 else 0
        shape = [left if isinstance(d, int) and d == -1 else d for d in shape]
    for axis, dimension in enumerate(shape):
        rest = [*shape[:axis], *shape[axis + 1 :]]
        if not all(isinstance(d, int) and d > 0 for d in rest) or math.prod(shape[:axis]) != before:
            continue
        kept = math.prod(shape[axis + 1 :])
        if after % kept == 0:  # the axis takes in what follows it
            merged = own * (after // kept)
        elif kept % after == 0 and isinstance(own.source, tuple) and own.source[1:] == ("*", kept // after):
            factor = kept // after  # and gives it back
            merged = Length(own.bound // factor, own.value // factor, own.source[0])
        else:
            continue
        if isinstance(dimension, Length) and dimension.source != merged.source:
            continue
        if isinstance(dimension, int) and dimension != -1:
            continue
        target = np.array([*shape[:axis], merged.bound, *shape[axis + 1 :]], np.int64)
        (y,) = call([data.array, target])
        return Padded(y, merged.value, axis, merged.source)
    if data.axis == 0 and len(shape) == data.ndim + 1 and shape[1] == -1 and shape[2:] == list(data.shape[1:]):
        return _rows(data, shape[0])
    raise NeedsLength


def _rows(data: Padded, count: Any) -> Padded:
    """The elements in `count` rows of equal length; a row starts where only the run knows."""
    if not isinstance(count, int) or count < 1:
        raise NeedsLength
    length = data.length // count
    within = jnp.arange(data.bound // count, dtype=length.dtype)
    places = jnp.arange(count, dtype=length.dtype)[:, None] * length + within
    return Padded(jnp.take(data.array, places, 0, mode="clip"), length, 1, (data.source, "/", count))


@_rule("Flatten")
def _flatten(operands: list[Any], attributes: dict[str, Any], call: Call) -> Any:
    one = _first(operands)
    axis = attributes["axis"] + (one.ndim if attributes["axis"] < 0 else 0)
    if one.axis != 0 or axis == 0:
        raise NeedsLength
    (y,) = call([one.array])
    length = one.dimension * math.prod(one.array.shape[1:axis])
    return Padded(y, length.value, 0, length.source)


def _place(shape: Sequence[Any]) -> tuple[int, Length]:
    """Where the one `Length` of a shape is, and itself."""
    found = [(i, d) for i, d in enumerate(shape) if isinstance(d, Length)]
    if len(found) != 1 or found[0][1].bound is None:
        raise NeedsLength
    return found[0]


def _bounds(shape: Sequence[Any]) -> np.ndarray:
    if any(isinstance(d, Length) and d.bound is None for d in shape):
        raise NeedsLength
    return np.array([d.bound if isinstance(d, Length) else d for d in shape], np.int64)


@_rule("Expand")
def _expand(operands: list[Any], attributes: dict[str, Any], call: Call) -> Any:
    x, shape = operands[0], dims(operands[1])
    if isinstance(x, Padded):
        (y,) = call([x.array, _bounds(shape)])
        from_end = x.axis - x.ndim
        wanted = shape[from_end] if len(shape) >= -from_end else 1
        if isinstance(wanted, Length):
            if wanted.source != x.source:
                raise NeedsLength
        elif wanted != 1:
            raise NeedsLength
        if sum(isinstance(d, Length) for d in shape) > isinstance(wanted, Length):
            raise NeedsLength
        return x.with_array(y, y.ndim + from_end)
    own = (1,) * (len(shape) - np.ndim(x)) + np.shape(x)[-len(shape) or np.ndim(x) :]
    shape = tuple(o if isinstance(d, Length) and o != 1 else d for o, d in zip(own, shape, strict=True))
    if not any(isinstance(d, Length) for d in shape):  # what `x` has there is what it must be
        return call([x, np.array(shape, np.int64)])
    at, length = _place(shape)
    from_end = at - len(shape)
    (y,) = call([x, _bounds(shape)])
    return Padded(traced(y), length.value, y.ndim + from_end, length.source)


@_rule("ConstantOfShape")
def _constant(operands: list[Any], attributes: dict[str, Any], call: Call) -> Any:
    at, length = _place(dims(operands[0]))
    (y,) = call([_bounds(dims(operands[0]))])
    return Padded(traced(y), length.value, at, length.source)


@_rule("Range")
def _range(operands: list[Any], attributes: dict[str, Any], call: Call) -> Any:
    start, limit, step = (dims(o)[0] if has_length(o) or np.ndim(o) == 0 else None for o in operands)
    if not isinstance(limit, Length) or limit.bound is None or start != 0 or step != 1:
        raise NeedsLength
    (y,) = call([operands[0], np.array(limit.bound, np.int64), operands[2]])
    return Padded(jnp.minimum(y, cast(jnp.maximum(limit.value - 1, 0), y.dtype)), limit.value, 0, limit.source)


@_rule("Slice")
def _slice(operands: list[Any], attributes: dict[str, Any], call: Call) -> Any:
    """Along other axes, or all of its own."""
    one = operands[0]
    if not isinstance(one, Padded):
        return call(operands)
    given = [None if o is None else list(dims(o)) for o in operands[1:]]
    if not given:
        given = [attributes.get(name) for name in ("starts", "ends", "axes")]
    starts, ends, axes, steps = [*given, *[None] * (4 - len(given))]
    axes = list(range(len(starts))) if axes is None else [axis % one.ndim for axis in axes]
    steps = [1] * len(axes) if steps is None else list(steps)
    kept = []
    for i, (axis, start, end, step) in enumerate(zip(axes, starts, ends, steps, strict=True)):
        if axis != one.axis:
            kept.append(i)
        elif start != 0 or step != 1 or not (_covers(end, one)):
            raise NeedsLength
    if not kept:
        return one
    chosen = [np.array([v[i] for i in kept], np.int64) for v in (starts, ends, axes, steps)]
    if len(operands) > 1:
        return one.with_array(*call([one.array, *chosen]))
    raise NeedsLength


def _covers(end: Any, one: Padded) -> bool:
    return end.source == one.source if isinstance(end, Length) else end >= one.bound


@_rule("Concat")
def _concat(operands: list[Any], attributes: dict[str, Any], call: Call) -> Any:
    if not any(isinstance(o, Padded) for o in operands):
        dimensions = None if is_known(operands) else partly_known(operands)
        return call(operands) if dimensions is None else dimensions
    one = _of(operands)
    axis = attributes["axis"] % one.ndim
    if axis == one.axis or not all(isinstance(o, Padded) and o.axis == one.axis for o in operands):
        raise NeedsLength
    return one.with_array(*call(_plain(operands)))


@_rule("Gather")
def _gather(operands: list[Any], attributes: dict[str, Any], call: Call) -> Any:
    """An index past the end reads padding, as a hidden one out of range reads the nearest element."""
    data, indices = operands
    if has_length(data) or has_length(indices):
        if any(isinstance(o, Padded) for o in operands):
            raise NeedsLength
        return call(operands)
    axis = attributes["axis"] % data.ndim
    if isinstance(data, Padded) and isinstance(indices, Padded):
        raise NeedsLength
    if isinstance(data, Padded) and axis == data.axis:  # -1 is the last element that counts
        number = cast(traced(indices), data.length.dtype)
        (y,) = call([data.array, jnp.where(number < 0, number + data.length, number)])
        return y
    (y,) = call(_plain(operands))
    if isinstance(indices, Padded):
        return indices.with_array(y, axis + indices.axis).benign()
    return data.with_array(y, data.axis if data.axis < axis else data.axis + np.ndim(indices) - 1)


@_rule("GatherElements")
def _gather_elements(operands: list[Any], attributes: dict[str, Any], call: Call) -> Any:
    data, indices = operands
    if not isinstance(indices, Padded) or attributes["axis"] % indices.ndim == indices.axis:
        raise NeedsLength
    if isinstance(data, Padded) and (data.axis != indices.axis or data.source != indices.source):
        raise NeedsLength
    if np.shape(_plain([data])[0])[indices.axis] < indices.bound:  # padding would have nothing to read
        raise NeedsLength
    return indices.with_array(*call(_plain(operands))).benign()


@_rule("GatherND")
def _gather_nd(operands: list[Any], attributes: dict[str, Any], call: Call) -> Any:
    data, indices = operands
    batch = attributes.get("batch_dims") or 0
    if isinstance(data, Padded) or not isinstance(indices, Padded) or not batch <= indices.axis < indices.ndim - 1:
        raise NeedsLength
    return indices.with_array(*call(_plain(operands))).benign()


@_rule("ScatterND", "ScatterElements", "Scatter")
def _scatter(operands: list[Any], attributes: dict[str, Any], call: Call) -> Any:
    """Updates at padding have a place outside of the data, where they are dropped."""
    data, indices, updates = operands
    if not isinstance(indices, Padded) or attributes.get("reduction", "none") == "mul":
        raise NeedsLength
    of_tuples = call.name == "ScatterND"
    if indices.axis == indices.ndim - 1 and of_tuples:
        raise NeedsLength
    if not isinstance(updates, Padded):
        raise NeedsLength
    if updates.axis != indices.axis or updates.source != indices.source or updates.bound != indices.bound:
        raise NeedsLength
    sizes = np.shape(_plain([data])[0])
    outside = sizes[0] if of_tuples else sizes[attributes["axis"] % len(sizes)]
    if isinstance(data, Padded) and not (of_tuples or data.axis != attributes["axis"] % data.ndim):
        raise NeedsLength
    if isinstance(data, Padded) and data.axis < indices.array.shape[-1]:  # -1 is the last element that counts
        number = indices.array[..., data.axis]
        number = jnp.where(number < 0, number + cast(data.length, number.dtype), number)
        indices = indices.with_array(indices.array.at[..., data.axis].set(number))
    (y,) = call([*_plain([data]), indices.filled(outside), updates.array])
    return data.with_array(y) if isinstance(data, Padded) else y


@_rule("MatMul")
def _matmul(operands: list[Any], attributes: dict[str, Any], call: Call) -> Any:
    """Rows of the first factor, columns of the second, or a batch of both."""
    a, b = operands
    one = _of(operands)
    (y,) = call(_plain(operands))
    from_end = one.axis - one.ndim
    if isinstance(a, Padded) and isinstance(b, Padded):
        if from_end > -3 or b.axis - b.ndim != from_end:
            raise NeedsLength
    elif isinstance(a, Padded):
        if from_end == -1 or (from_end < -2 and np.ndim(b) >= -from_end and np.shape(b)[from_end] != 1):
            raise NeedsLength
        from_end += np.ndim(b) == 1
    elif from_end == -2 or b.ndim == 1 or (from_end < -2 and np.ndim(a) >= -from_end and np.shape(a)[from_end] != 1):
        raise NeedsLength
    else:
        from_end += np.ndim(a) == 1 and from_end < -2
    return one.with_array(y, y.ndim + from_end)


@_rule("Gemm")
def _gemm(operands: list[Any], attributes: dict[str, Any], call: Call) -> Any:
    one, c = operands[0], operands[2] if len(operands) > 2 else None
    if not isinstance(one, Padded) or one.axis != 0 or attributes["transA"] or is_open(operands[1]) or is_open(c):
        raise NeedsLength
    if c is not None and np.ndim(c) == 2 and c.shape[0] != 1:
        raise NeedsLength
    return one.with_array(*call(_plain(operands)))


def _lowest(kind: np.dtype) -> Any:
    return -jnp.inf if jnp.issubdtype(kind, jnp.floating) else False if kind == np.bool_ else np.iinfo(kind).min


def _highest(kind: np.dtype) -> Any:
    return jnp.inf if jnp.issubdtype(kind, jnp.floating) else True if kind == np.bool_ else np.iinfo(kind).max


_NEUTRAL: dict[str, Callable[[np.dtype], Any]] = {
    **dict.fromkeys(("ReduceSum", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceMean"), lambda kind: 0),
    "ReduceProd": lambda kind: 1,
    "ReduceMax": _lowest,
    "ReduceMin": _highest,
    "ReduceLogSum": lambda kind: 0,
    "ReduceLogSumExp": _lowest,
}
"""What a reduction leaves out by itself."""


@_rule(*_NEUTRAL)
def _reduced(operands: list[Any], attributes: dict[str, Any], call: Call) -> Any:
    if not isinstance(operands[0], Padded):
        return call(operands)
    one, axes = operands[0], attributes.get("axes")
    if len(operands) > 1 and operands[1] is not None:
        axes = dims(operands[1])
    if not axes:
        axes = () if attributes.get("noop_with_empty_axes") else tuple(range(one.ndim))
    gone = {axis % one.ndim for axis in axes}
    if one.axis not in gone:
        (y,) = call(_plain(operands))
        return one.with_array(y, one.axis if attributes["keepdims"] else one.axis - sum(a < one.axis for a in gone))
    filled = one.filled(_NEUTRAL[call.name](one.dtype))
    if call.name != "ReduceMean":
        return call([filled, *operands[1:]])
    if not is_float(one):
        raise NeedsLength
    (y,) = call([elementwise.widened(filled), *operands[1:]])  # the bound may be too much for a half
    return cast(y * (one.bound / cast(jnp.maximum(one.length, 1), y.dtype)), one.dtype)


@_rule("ArgMax", "ArgMin")
def _arg(operands: list[Any], attributes: dict[str, Any], call: Call) -> Any:
    one = _first(operands)
    axis = attributes["axis"] % one.ndim
    if axis == one.axis:
        raise NeedsLength
    (y,) = call(_plain(operands))
    return one.with_array(y, one.axis if attributes["keepdims"] or one.axis < axis else one.axis - 1)


@_rule("NonZero")
def _nonzero(operands: list[Any], attributes: dict[str, Any], call: Call) -> Any:
    return NonZero(_first(operands).filled(0))
