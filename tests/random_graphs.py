"""Small random graphs, valid by construction: shapes that depend on data, nests of If, Loop and Scan with captures,
sequences, functions.

Each tensor is known with its kind and its shape, of which a dimension is a number or a symbol; dimensions of one symbol
are equal, and those whose symbol starts with "p" are not zero. So each step can choose operands that fit. `graphs()`
is the strategy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

ELEMENTS = {"f": TensorProto.FLOAT, "i": TensorProto.INT64, "b": TensorProto.BOOL}
DTYPES = {"f": np.float32, "i": np.int64, "b": np.bool_}
SHAPES = [(), (3,), (4,), (3, 4), (4, 3), (2, 3, 4)]
LARGEST = 100.0
"""Magnitudes are kept below this."""


@dataclass(frozen=True)
class Tensor:
    """A value: float32, int64 or bool, of this shape and of magnitudes up to `high`."""

    name: str
    kind: str
    shape: tuple[int | str, ...]
    high: float = 3.0
    range: tuple[int, int] | None = None
    """Of an integer scalar that may be a dimension: the smallest and the largest that it can be."""
    symbol: int | str = ""
    """That dimension."""


@dataclass(frozen=True)
class RandomGraph:
    """A model and inputs of it: of the same shapes, but other contents."""

    proto: onnx.ModelProto
    feeds: list[dict[str, np.ndarray]]

    def __repr__(self) -> str:
        return f"{onnx.printer.to_text(self.proto)}\n{self.feeds}"


class _Unfit(Exception):
    """No operands are there for this step."""


def _size(shape: Sequence[int | str]) -> float:
    return math.prod(4 if isinstance(d, str) else d for d in shape)


def _is_positive(dimension: int | str) -> bool:
    return dimension.startswith("p") if isinstance(dimension, str) else dimension > 0


def _product(dimensions: Sequence[int | str]) -> int | str:
    symbols = [d for d in dimensions if isinstance(d, str)]
    number = math.prod(d for d in dimensions if isinstance(d, int))
    if not symbols or number == 0:
        return number
    if len(symbols) == 1 and number == 1:
        return symbols[0]
    prefix = "p" if all(map(_is_positive, dimensions)) else "n"
    return f"{prefix}({'*'.join([*sorted(symbols), str(number)])})"


@dataclass
class _Shared:
    """What all blocks of a graph have in common."""

    draw: Callable[[st.SearchStrategy], Any]
    names: Any = field(default_factory=itertools.count)
    functions: list[onnx.FunctionProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)


class Block:
    """A graph, a subgraph or a function's body while it is drawn. It sees the tensors of the blocks around it."""

    def __init__(self, shared: _Shared, seen: Sequence[Tensor], depth: int, *, in_function: bool):
        self.shared, self.tensors, self.depth, self.in_function = shared, list(seen), depth, in_function
        self.nodes: list[onnx.NodeProto] = []
        self.own: set[str] = set()
        self._constants: dict[Any, str] = {}

    # -- drawing

    def any(self, *values: Any) -> Any:
        return self.shared.draw(st.sampled_from(values))

    def number(self, low: int, high: int) -> int:
        return self.shared.draw(st.integers(low, high))

    def pick(self, fits: Callable[[Tensor], Any], kind: str = "") -> Tensor:
        """A tensor that fits; late ones are the simplest."""
        found = [t for t in reversed(self.tensors) if (not kind or t.kind in kind) and fits(t)]
        if not found:
            raise _Unfit
        return found[self.number(0, len(found) - 1)]

    def inner(self, seen: Sequence[Tensor] = (), *, captures: bool = True) -> Block:
        outer = self.tensors if captures else []
        return Block(self.shared, [*outer, *seen], self.depth + 1, in_function=self.in_function or not captures)

    # -- building

    def fresh(self, prefix: str = "t") -> str:
        return f"{prefix}{next(self.shared.names)}"

    def constant(self, value: Any, kind: str = "i") -> str:
        array = np.asarray(value, DTYPES[kind])
        key = (kind, array.shape, array.tobytes())
        if key not in self._constants:
            name = self._constants[key] = self.fresh("c")
            if self.in_function:
                self.nodes.append(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array)))
            else:
                self.shared.initializers.append(numpy_helper.from_array(array, name))
        return self._constants[key]

    def node(self, op: str, *inputs: Tensor | str, outputs: int = 1, **attributes: Any) -> Any:
        """The name of the output of a new node; a list of names where there are several."""
        names = [self.fresh() for _ in range(outputs)]
        given = [x.name if isinstance(x, Tensor) else x for x in inputs]
        self.nodes.append(helper.make_node(op, given, names, **attributes))
        self.own.update(names)
        return names[0] if outputs == 1 else names

    def add(self, name: str, kind: str, shape: Sequence[int | str], high: float = 3.0, **more: Any) -> Tensor:
        tensor = Tensor(name, kind, tuple(shape), 1.0 if kind == "b" else high, **more)
        if high > LARGEST and kind != "b":
            small = self.node("Tanh", name) if kind == "f" else self.node("Mod", name, self.constant(int(LARGEST) - 3))
            tensor = replace(tensor, name=small, high=1.0 if kind == "f" else LARGEST)
        self.tensors.append(tensor)
        return tensor

    def count(self, name: str, low: int, high: int, symbol: int | str = "") -> Tensor:
        symbol = symbol or f"{'p' if low > 0 else 'n'}{name}"
        return self.add(name, "i", (), high, range=(low, high), symbol=symbol)

    def dimension(self, x: Tensor, axis: int) -> Tensor:
        """A dimension of a tensor, as a scalar."""
        shape = self.node("Shape", x)
        name = self.node("Gather", shape, self.constant(axis), axis=0)
        d = x.shape[axis]
        return self.count(name, int(_is_positive(d)), 12 if isinstance(d, str) else d, d)

    def vector(self, *parts: Tensor | int) -> str:
        """Dimensions as a vector."""
        names = []
        for part in parts:
            if isinstance(part, Tensor):
                first = self.constant([0])
                names.append(
                    self.node("Unsqueeze", part, first)
                    if self.number(0, 1)
                    else self.node("Reshape", part, self.constant([1]))
                )
            else:
                names.append(self.constant([part]))
        return names[0] if len(names) == 1 else self.node("Concat", *names, axis=0)

    def a_count(self, most: int = 12) -> Tensor:
        """An integer that may be a dimension: there already, a dimension, or the number of some true elements."""
        way = self.number(0, 3)
        if way == 0:
            x = self.pick(lambda t: t.shape and all(isinstance(d, int) or d[1:2] != "(" for d in t.shape))
            return self.dimension(x, self.number(0, len(x.shape) - 1))
        if way == 1:
            mask = self.a_mask(lambda t: t.shape and all(isinstance(d, int) for d in t.shape))
            ones = self.node("Cast", mask, to=TensorProto.INT64)
            size = int(_size(mask.shape))
            low = self.number(0, 1)
            name = self.node("ReduceSum", ones, keepdims=0)
            if low:
                name = self.node("Max", name, self.constant(low))
            if size > most:
                name = self.node("Min", name, self.constant(most))
            return self.count(name, low, min(size, most))
        return self.pick(lambda t: t.range is not None and t.range[1] <= most)

    def a_mask(self, fits: Callable[[Tensor], Any]) -> Tensor:
        """A bool tensor that fits: there already, or a comparison."""
        if self.number(0, 2) == 0:
            return self.pick(fits, "b")
        x = self.pick(fits, "fi")
        threshold = self.any(0.3, -0.4, 1.7) if x.kind == "f" else self.any(0, 1, 2)
        name = self.node(self.any("Greater", "Less"), x, self.constant(threshold, x.kind))
        return self.add(name, "b", x.shape)

    def a_condition(self) -> Tensor:
        """A bool scalar."""
        way = self.number(0, 3)
        if way == 0:
            return self.a_mask(lambda t: t.shape == ())
        if way == 1:
            count = self.a_count()
            return self.add(self.node("Greater", count, self.constant(self.number(0, 3))), "b", ())
        x = self.pick(lambda t: True, "f")
        total = self.add(self.node("ReduceSum", x, keepdims=0), "f", (), x.high * _size(x.shape))
        return self.add(self.node("Less", total, self.constant(self.any(0.31, -0.7, 2.2), "f")), "b", ())

    def as_output(self, x: Tensor) -> str:
        """The name of a tensor, as one that a node of this block makes."""
        return x.name if x.name in self.own else self.node("Identity", x)

    def as_outputs(self, chosen: Sequence[Tensor], *taken: str) -> list[str]:
        """The same for several, of which each has a name of its own."""
        names = list(taken)
        for t in chosen:
            name = self.as_output(t)
            names.append(self.node("Identity", name) if name in names else name)
        return names[len(taken) :]

    def grow(self, low: int, high: int) -> None:
        """Draws so many steps."""
        for _ in range(self.number(low, high)):
            steps = STEPS if self.depth < 2 else [s for s in STEPS if s not in _NESTS]
            step = self.shared.draw(st.sampled_from(steps))
            try:
                step(self)
            except _Unfit:
                _unary(self)

    def proto(self, name: str, inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[Any]) -> onnx.GraphProto:
        infos = [o if isinstance(o, onnx.ValueInfoProto) else _info(*o) for o in outputs]
        return helper.make_graph(self.nodes, name, list(inputs), infos)


def _info(name: str, kind: str, shape: Any = None) -> onnx.ValueInfoProto:
    shape = None if shape is None else [d if isinstance(d, int) else None for d in shape]
    return helper.make_tensor_value_info(name, ELEMENTS[kind], shape)


# ---- steps: elementwise --------------------------------------------------------------------------------------------


def _unary(b: Block) -> None:
    x = b.pick(lambda t: True)
    if x.kind == "b":
        b.add(b.node("Not", x), "b", x.shape)
    elif x.kind == "i":
        b.add(b.node(b.any("Neg", "Abs", "Sign"), x), "i", x.shape, max(x.high, 1))
    else:
        op = b.any("Tanh", "Neg", "Abs", "Relu", "Sigmoid", "Sin", "Sqrt", "Exp")
        if op in ("Sqrt", "Exp"):
            x = replace(x, name=b.node("Abs" if op == "Sqrt" else "Tanh", x))
        high = {"Tanh": 1.0, "Sigmoid": 1.0, "Sin": 1.0, "Exp": 3.0, "Sqrt": max(1.0, x.high) ** 0.5}.get(op, x.high)
        b.add(b.node(op, x), "f", x.shape, high)


def _fits_beside(x: Tensor) -> Callable[[Tensor], bool]:
    """Whether a tensor broadcasts to the shape of `x`."""

    def fits(t: Tensor) -> bool:
        own = x.shape[len(x.shape) - len(t.shape) :]
        return len(t.shape) <= len(x.shape) and all(a in (1, d) for a, d in zip(t.shape, own))

    return fits


def _binary(b: Block) -> None:
    x = b.pick(lambda t: True, "fi")
    y = b.pick(_fits_beside(x), x.kind)
    op = b.any("Add", "Sub", "Mul", "Max", "Min", "Div" if x.kind == "f" else "Mod")
    high = x.high * y.high if op == "Mul" else x.high + y.high if op in ("Add", "Sub") else max(x.high, y.high)
    if op in ("Div", "Mod"):
        y = replace(y, name=b.node("Add", b.node("Abs", y), b.constant(1, x.kind)))
    pair = (x, y) if op in ("Div", "Mod") or b.number(0, 1) else (y, x)
    b.add(b.node(op, *pair), x.kind, x.shape, high)


def _compare(b: Block) -> None:
    x = b.pick(lambda t: True, "fi")
    y = b.pick(_fits_beside(x), x.kind)
    if x == y:
        raise _Unfit
    op = b.any("Greater", "LessOrEqual", "Less") if x.kind == "f" else b.any("Equal", "Less", "GreaterOrEqual")
    b.add(b.node(op, x, y), "b", x.shape)


def _logic(b: Block) -> None:
    x = b.pick(lambda t: True, "b")
    y = b.pick(_fits_beside(x), "b")
    b.add(b.node(b.any("And", "Or", "Xor"), x, y), "b", x.shape)


def _where(b: Block) -> None:
    x = b.pick(lambda t: True, "fi")
    y = b.pick(_fits_beside(x), x.kind)
    mask = b.a_mask(_fits_beside(x))
    b.add(b.node("Where", mask, *((x, y) if b.number(0, 1) else (y, x))), x.kind, x.shape, max(x.high, y.high))


def _cast(b: Block) -> None:
    x = b.pick(lambda t: True)
    kind = b.any(*(k for k in "fi" if k != x.kind))
    b.add(b.node("Cast", x, to=ELEMENTS[kind]), kind, x.shape, x.high)


# ---- steps: shapes -------------------------------------------------------------------------------------------------


def _with_axis(b: Block, kind: str = "fi", positive: bool = False) -> tuple[Tensor, int]:
    x = b.pick(lambda t: t.shape and (not positive or all(map(_is_positive, t.shape))), kind)
    return x, b.number(0, len(x.shape) - 1)


def _signed(b: Block, axis: int, rank: int) -> int:
    return axis - rank if b.number(0, 1) else axis


def _reduce(b: Block) -> None:
    x, axis = _with_axis(b)
    d, keep, every = x.shape[axis], b.number(0, 1), b.number(0, 3) == 0
    ops = ["ReduceSum", "ReduceSum"]
    if all(map(_is_positive, x.shape)):
        ops += ["ReduceMax", "ReduceMin"] + (["ReduceMean", "ReduceL2", "ReduceLogSumExp"] if x.kind == "f" else [])
    if x.kind == "f":
        ops += ["ReduceL1", "ReduceSumSquare"]
    op = b.any(*ops)
    gone = range(len(x.shape)) if every else [axis]
    size = _size([x.shape[i] for i in gone])
    high = {"ReduceSumSquare": x.high**2 * size, "ReduceMax": x.high, "ReduceMin": x.high, "ReduceMean": x.high}
    axes = [] if every else [b.constant([_signed(b, axis, len(x.shape))])]
    name = b.node(op, x, *axes, keepdims=keep)
    shape = [1 if i in gone else d for i, d in enumerate(x.shape) if keep or i not in gone]
    b.add(name, x.kind, shape, high.get(op, x.high * max(size, 1) + 1))
    del d


def _along(b: Block) -> None:
    """Operators that keep the shape, but mix along an axis."""
    x, axis = _with_axis(b)
    at = _signed(b, axis, len(x.shape))
    op = b.any("CumSum", "Softmax", "LogSoftmax", "Reverse") if x.kind == "f" else b.any("CumSum", "Reverse")
    if op == "CumSum":
        name = b.node("CumSum", x, b.constant(at), reverse=b.number(0, 1))
        b.add(name, x.kind, x.shape, x.high * _size([x.shape[axis]]))
    elif op == "Reverse":
        last, first = b.constant([-1]), b.constant([-(2**31)])
        b.add(b.node("Slice", x, last, first, b.constant([at]), last), x.kind, x.shape, x.high)
    elif not all(map(_is_positive, x.shape)):
        raise _Unfit
    else:
        b.add(b.node(op, x, axis=at), "f", x.shape, 1.0 if op == "Softmax" else 2 * x.high + 3)


def _arg(b: Block) -> None:
    x, axis = _with_axis(b, "f", positive=True)
    keep = b.number(0, 1)
    name = b.node(b.any("ArgMax", "ArgMin"), x, axis=axis, keepdims=keep)
    shape = [1 if i == axis else d for i, d in enumerate(x.shape) if keep or i != axis]
    b.add(name, "i", shape, 12)


def _transpose(b: Block) -> None:
    x = b.pick(lambda t: len(t.shape) > 1)
    order = b.shared.draw(st.permutations(range(len(x.shape))))
    b.add(b.node("Transpose", x, perm=order), x.kind, [x.shape[i] for i in order], x.high)


def _rerank(b: Block) -> None:
    if b.number(0, 1):
        x = b.pick(lambda t: len(t.shape) < 3)
        axis = b.number(0, len(x.shape))
        shape = [*x.shape[:axis], 1, *x.shape[axis:]]
        b.add(b.node("Unsqueeze", x, b.constant([axis])), x.kind, shape, x.high)
    else:
        x = b.pick(lambda t: 1 in t.shape)
        axis = x.shape.index(1)
        shape = [d for i, d in enumerate(x.shape) if i != axis]
        b.add(b.node("Squeeze", x, b.constant([axis])), x.kind, shape, x.high)


def _reshape(b: Block) -> None:
    """Flattens, splits or merges axes, with a shape that is computed."""
    x = b.pick(lambda t: t.shape)
    rank = len(x.shape)
    way = b.any("flat", "merge", "rows", "same", "flatten", "kept")
    if way == "flat":
        b.add(b.node("Reshape", x, b.constant([-1])), x.kind, [_product(x.shape)], x.high)
    elif way == "flatten":
        axis = b.number(0, rank)
        shape = [_product(x.shape[:axis]), _product(x.shape[axis:])]
        b.add(b.node("Flatten", x, axis=axis), x.kind, shape, x.high)
    elif way == "same":
        at = b.number(0, rank - 1)
        parts = [-1 if i == at and all(map(_is_positive, x.shape)) else b.dimension(x, i) for i in range(rank)]
        b.add(b.node("Reshape", x, b.vector(*parts)), x.kind, x.shape, x.high)
    elif way == "kept":
        target = b.constant([0] * (rank - 1) + [1, -1] if all(map(_is_positive, x.shape)) else [0] * rank + [1])
        shape = [*x.shape[:-1], 1, x.shape[-1]] if all(map(_is_positive, x.shape)) else [*x.shape, 1]
        b.add(b.node("Reshape", x, target), x.kind, shape, x.high)
    elif way == "rows":
        known = [d for d in x.shape if isinstance(d, int)]
        symbols = [d for d in x.shape if isinstance(d, str)]
        columns = b.any(2, 3, 4)
        if math.prod(known) % columns or len(symbols) > 1 or not math.prod(known):
            raise _Unfit
        rows = _product([*symbols, math.prod(known) // columns])
        order = [-1, columns] if b.number(0, 1) else [columns, -1]
        shape = [rows, columns] if order[0] == -1 else [columns, rows]
        b.add(b.node("Reshape", x, b.constant(order)), x.kind, shape, x.high)
    else:
        if rank < 2:
            raise _Unfit
        at = b.number(0, rank - 2)
        merged = _product(x.shape[at : at + 2])
        first, second = b.dimension(x, at), b.dimension(x, at + 1)
        name = b.node("Mul", first, second)
        number = Tensor(name, "i", (), 144, (0, 144), merged)
        parts = [*(b.dimension(x, i) for i in range(at)), number, *(b.dimension(x, i) for i in range(at + 2, rank))]
        shape = [*x.shape[:at], merged, *x.shape[at + 2 :]]
        options = {} if all(map(_is_positive, x.shape)) else {"allowzero": 1}
        b.add(b.node("Reshape", x, b.vector(*parts), **options), x.kind, shape, x.high)


def _concat(b: Block) -> None:
    x = b.pick(lambda t: t.shape)
    axis = b.number(0, len(x.shape) - 1)

    def fits(t: Tensor) -> bool:
        others = [i for i in range(len(x.shape)) if i != axis]
        return len(t.shape) == len(x.shape) and all(t.shape[i] == x.shape[i] for i in others)

    y = b.pick(fits, x.kind)
    sizes = (x.shape[axis], y.shape[axis])
    if all(isinstance(d, int) for d in sizes):
        d: int | str = sum(sizes)
    else:
        d = f"{'p' if any(map(_is_positive, sizes)) else 'n'}({'+'.join(map(str, sizes))})"
    name = b.node("Concat", x, y, axis=_signed(b, axis, len(x.shape)))
    b.add(name, x.kind, [d if i == axis else s for i, s in enumerate(x.shape)], max(x.high, y.high))


def _slice(b: Block) -> None:
    x = b.pick(lambda t: any(isinstance(d, int) and d > 1 for d in t.shape))
    axis = b.any(*(i for i, d in enumerate(x.shape) if isinstance(d, int) and d > 1))
    d = x.shape[axis]
    at = b.constant([_signed(b, axis, len(x.shape))])
    if b.number(0, 1):
        start, step = b.number(0, d - 1), b.any(1, 2)
        size: int | str = len(range(start, d, step))
        name = b.node("Slice", x, b.constant([start]), b.constant([2**31 - 1]), at, b.constant([step]))
    else:
        end = b.a_count()
        low, high = end.range
        if b.number(0, 1):  # the first so many
            name = b.node("Slice", x, b.constant([0]), b.vector(end), at)
            size = end.symbol if high <= d else b.fresh("p" if low > 0 else "n")
        else:  # the last so many
            end = b.count(b.node("Max", end, b.constant(1)), 1, max(high, 1))
            name = b.node("Slice", x, b.node("Neg", b.vector(end)), b.constant([2**31 - 1]), at)
            size = b.fresh("p")
    b.add(name, x.kind, [size if i == axis else s for i, s in enumerate(x.shape)], x.high)


def _expand(b: Block) -> None:
    count = b.a_count()
    x = b.pick(lambda t: t.shape == () or (len(t.shape) < 3 and _size(t.shape) < 40))
    if x.shape and x.shape[0] == 1 and b.number(0, 1):
        parts: list[Any] = [count, *([1] * (len(x.shape) - 1))]
        shape = [count.symbol, *x.shape[1:]]
    else:
        parts = [count, *(b.dimension(x, i) for i in range(len(x.shape)))]
        shape = [count.symbol, *x.shape]
    b.add(b.node("Expand", x, b.vector(*parts)), x.kind, shape, x.high)


def _made(b: Block) -> None:
    """Constants and ranges as long as something else."""
    count = b.a_count()
    if b.number(0, 1):
        name = b.node("Range", b.constant(0), count, b.constant(1))
        b.add(name, "i", [count.symbol], 12)
    else:
        kind = b.any("f", "i", "b")
        value = numpy_helper.from_array(np.array([1], DTYPES[kind]))
        more = b.any((), (3,))
        name = b.node("ConstantOfShape", b.vector(count, *more), value=value)
        b.add(name, kind, [count.symbol, *more])


# ---- steps: products, indices --------------------------------------------------------------------------------------


def _matmul(b: Block) -> None:
    x = b.pick(lambda t: t.shape and isinstance(t.shape[-1], int), "f")
    columns = b.any(3, 4)
    weight = np.round(np.sin(np.arange(x.shape[-1] * columns) + 1), 2).reshape(x.shape[-1], columns)
    b.add(b.node("MatMul", x, b.constant(weight, "f")), "f", [*x.shape[:-1], columns], x.high * _size(x.shape[-1:]))


def _gather(b: Block) -> None:
    x = b.pick(lambda t: any(isinstance(d, int) and d > 0 for d in t.shape))
    axis = b.any(*(i for i, d in enumerate(x.shape) if isinstance(d, int) and d > 0))
    index = b.pick(lambda t: len(t.shape) + len(x.shape) < 5, "i")
    index = replace(index, name=b.node("Mod", index, b.constant(x.shape[axis])))
    name = b.node("Gather", x, index, axis=_signed(b, axis, len(x.shape)))
    b.add(name, x.kind, [*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]], x.high)


def _nonzero(b: Block) -> None:
    """The places of true elements, and the elements there."""
    mask = b.a_mask(lambda t: 0 < len(t.shape) < 3 and all(isinstance(d, int) for d in t.shape))
    rank, size = len(mask.shape), int(_size(mask.shape))
    low = b.number(0, 1)
    if low:
        name = b.node("Or", mask, b.constant(np.arange(size).reshape(mask.shape) == size // 2, "b"))
        mask = b.add(name, "b", mask.shape)
    where = b.node("NonZero", mask)
    symbol = f"{'p' if low else 'n'}{where}"
    places = b.add(where, "i", [rank, symbol], 4)
    if rank == 1:
        flat = b.node("Squeeze", places, b.constant([0]))
        flat = b.add(flat, "i", [symbol], 4)
        x = b.pick(lambda t: mask.shape[0] in t.shape)
        axis = x.shape.index(mask.shape[0])
        b.add(
            b.node("Gather", x, flat, axis=axis),
            x.kind,
            [symbol if i == axis else d for i, d in enumerate(x.shape)],
            x.high,
        )
        return
    rows = b.add(b.node("Transpose", places, perm=[1, 0]), "i", [symbol, rank], 4)
    x = b.pick(lambda t: t.shape[:rank] == mask.shape, "fi")
    found = b.add(b.node("GatherND", x, rows), x.kind, [symbol, *x.shape[rank:]], x.high)
    if b.number(0, 1):
        some = b.add(b.node(b.any("Neg", "Abs"), found), x.kind, found.shape, x.high)
        options = {"reduction": "add"} if b.number(0, 1) else {}
        b.add(b.node("ScatterND", x, rows, some, **options), x.kind, x.shape, 2 * x.high)


def _compress(b: Block) -> None:
    x = b.pick(lambda t: any(isinstance(d, int) and d > 1 for d in t.shape))
    axis = b.any(*(i for i, d in enumerate(x.shape) if isinstance(d, int) and d > 1))
    mask = b.a_mask(lambda t: t.shape == (x.shape[axis],))
    name = b.node("Compress", x, mask, axis=axis)
    symbol = f"n{mask.name}"
    b.add(name, x.kind, [symbol if i == axis else d for i, d in enumerate(x.shape)], x.high)


def _unique(b: Block) -> None:
    x = b.pick(lambda t: all(isinstance(d, int) for d in t.shape) and _size(t.shape), "fi")
    y, first, inverse, counts = b.node("Unique", x, outputs=4, sorted=b.number(0, 1))
    symbol, size = f"p{y}", int(_size(x.shape))
    b.add(y, x.kind, [symbol], x.high)
    b.add(first, "i", [symbol], size)
    b.add(inverse, "i", [size], size)
    b.add(counts, "i", [symbol], size)


def _topk(b: Block) -> None:
    x = b.pick(lambda t: any(isinstance(d, int) and d > 0 for d in t.shape), "f")
    axis = b.any(*(i for i, d in enumerate(x.shape) if isinstance(d, int) and d > 0))
    k = b.a_count()
    low, high = k.range
    if high > x.shape[axis]:
        name = b.node("Min", k, b.constant(x.shape[axis]))
        k = b.count(name, min(low, x.shape[axis]), x.shape[axis])
    values, places = b.node("TopK", x, b.vector(k), axis=axis, largest=b.number(0, 1), outputs=2)
    shape = [k.symbol if i == axis else d for i, d in enumerate(x.shape)]
    b.add(values, "f", shape, x.high)
    b.add(places, "i", shape, 12)


def _suppress(b: Block) -> None:
    x = b.pick(lambda t: len(t.shape) == 2 and t.shape[1] == 4 and isinstance(t.shape[0], int) and t.shape[0] > 0, "f")
    boxes = b.node("Unsqueeze", x, b.constant([0]))
    scores = b.node("Transpose", b.node("Tanh", boxes), perm=[0, 2, 1])
    most = b.vector(b.a_count()) if b.number(0, 1) else b.constant([b.number(1, 3)])
    options = [b.constant([0.31], "f"), *([b.constant([0.2], "f")] if b.number(0, 1) else [])]
    chosen = b.node("NonMaxSuppression", boxes, scores, most, *options)
    chosen = b.add(chosen, "i", [f"n{chosen}", 3], 4)
    number = b.add(b.node("Gather", chosen, b.constant(2), axis=1), "i", chosen.shape[:1], 4)
    b.add(b.node("Gather", x, number, axis=0), "f", [number.shape[0], 4], x.high)


# ---- steps: nests --------------------------------------------------------------------------------------------------


def _joined(b: Block, one: Sequence[int | str], other: Sequence[int | str]) -> list[int | str]:
    """The shape of what has one of two shapes."""
    return [d if d == e else b.fresh("p" if _is_positive(d) and _is_positive(e) else "n") for d, e in zip(one, other)]


def _if(b: Block) -> None:
    condition = b.a_condition()
    branches = [b.inner(), b.inner()]
    for branch in branches:
        branch.grow(1, 4)
    pairs = []
    outside = {d for t in b.tensors for d in t.shape}
    for _ in range(b.number(1, 2)):
        one = branches[0].pick(lambda t: True)

        differs = b.number(0, 2) == 0

        def fits(t: Tensor, one: Tensor = one, differs: bool = differs) -> bool:
            return len(t.shape) == len(one.shape) and (differs or t.shape == one.shape)

        try:
            other = branches[1].pick(fits, one.kind)
        except _Unfit:
            value = branches[1].constant(np.zeros((1,) * len(one.shape)), one.kind)
            other = Tensor(value, one.kind, (1,) * len(one.shape))
        pairs.append((one, other))
    names = [branch.as_outputs(chosen) for branch, chosen in zip(branches, zip(*pairs))]
    graphs = [
        branch.proto(b.fresh("g"), [], [(name, t.kind) for name, t in zip(own, chosen)])
        for branch, own, chosen in zip(branches, names, zip(*pairs))
    ]
    outputs = b.node("If", condition, outputs=len(pairs), then_branch=graphs[0], else_branch=graphs[1])
    for name, (one, other) in zip([outputs] if len(pairs) == 1 else outputs, pairs):
        shape = _joined(b, one.shape, other.shape)
        shape = [d if isinstance(d, int) or d in outside else b.fresh(d[0]) for d in shape]
        b.add(name, one.kind, shape, max(one.high, other.high))


def _kept_small(body: Block, x: Tensor, high: float) -> Tensor:
    if x.kind == "b" or x.high <= high:
        return x
    if x.kind == "i":
        return replace(x, name=body.node("Mod", x, body.constant(int(high))))
    limit = body.constant(high, "f")
    return replace(x, name=body.node("Max", body.node("Min", x, limit), body.node("Neg", limit)))


def _loop(b: Block) -> None:
    carried = [b.pick(lambda t: True) for _ in range(b.number(0, 2))]
    carried = [replace(t, range=None, symbol="") for t in carried]
    grows = b.number(0, 5) == 0 and bool(carried) and bool(carried[0].shape)
    shapes = [t.shape for t in carried]
    if grows:
        shapes[0] = (b.fresh("p" if _is_positive(shapes[0][0]) else "n"), *shapes[0][1:])
    variables = [replace(t, name=b.fresh("v"), shape=s, high=max(t.high, 3.0)) for t, s in zip(carried, shapes)]
    i, c = b.fresh("v"), b.fresh("v")
    body = b.inner([Tensor(i, "i", (), 12, (0, 12), f"n{i}"), *variables])
    outside = {d for t in b.tensors for d in t.shape} | {d for s in shapes for d in s[1:]}
    body.grow(1, 5)
    # what ends it
    limit = b.any("number", "count", "count", "none")
    ends = b.any("never", "never", "early", "data")
    ends = "early" if limit == "none" else ends
    if ends == "never":
        going = body.constant(True, "b") if b.number(0, 1) else c
        goes_on = body.node("Identity", going)
    elif ends == "early":
        goes_on = body.node("Less", i, body.constant(b.number(0, 5)))
    else:
        goes_on = body.as_output(body.a_condition())
    least = 0
    most = ""
    if limit == "number":
        least = b.any(0, 1, 3, 9)
        most = b.constant(least)
    elif limit == "count":
        count = b.a_count(10)
        most, least = count.name, count.range[0]
    start = b.constant(True, "b")
    if b.number(0, 3) == 0:
        start, least = b.a_condition().name, 0
    elif ends == "never" and most and b.number(0, 1):
        start = ""
    # what goes on, and what is collected
    results = []
    for position, variable in enumerate(variables):
        if grows and position == 0:
            y = body.pick(
                lambda t, v=variable: len(t.shape) == len(v.shape) and t.shape[1:] == v.shape[1:], variable.kind
            )
            y = replace(y, name=body.node("Concat", variable, y, axis=0))
        else:
            y = body.pick(lambda t, v=variable: t.shape == v.shape, variable.kind)
        results.append(_kept_small(body, y, variable.high))
    least = least or int(limit == "none" and start == b.constant(True, "b"))
    collected = []
    for _ in range(b.number(0, 2)):
        fits = lambda t: len(t.shape) < 3 and all(isinstance(d, int) or (least and d in outside) for d in t.shape)
        collected.append(body.pick(fits))
    if not results and not collected:
        raise _Unfit
    names = body.as_outputs([*results, *collected], goes_on)
    outputs = [(goes_on, "b"), *((name, t.kind) for name, t in zip(names, [*results, *collected]))]
    outputs = [*outputs[: 1 + len(results)]] + [
        (name, kind, t.shape) for (name, kind), t in zip(outputs[1 + len(results) :], collected)
    ]
    inputs = [_info(i, "i", ()), _info(c, "b", ()), *(_info(v.name, v.kind) for v in variables)]
    names = b.node(
        "Loop", most, start, *carried, outputs=len(outputs) - 1, body=body.proto(b.fresh("g"), inputs, outputs)
    )
    names = [names] if isinstance(names, str) else names
    for name, variable, shape in zip(names, variables, shapes):
        if grows and variable is variables[0]:
            shape = (b.fresh(shape[0][0]), *shape[1:])
        b.add(name, variable.kind, shape, variable.high)
    trips = b.fresh("p" if least else "n")
    for name, t in zip(names[len(variables) :], collected):
        b.add(name, t.kind, [trips, *t.shape], t.high)


def _scan(b: Block) -> None:
    fits = lambda t: (
        0 < len(t.shape) < 4 and (isinstance(t.shape[0], int) or _is_positive(t.shape[0])) and t.shape[0] != 0
    )
    x = b.pick(fits)
    scanned = [x, *([b.pick(lambda t: t.shape[:1] == x.shape[:1])] if b.number(0, 1) else [])]
    state = [replace(b.pick(lambda t: True), range=None) for _ in range(b.number(0, 1))]
    variables = [replace(t, name=b.fresh("v"), high=max(t.high, 3.0)) for t in state]
    elements = [replace(t, name=b.fresh("v"), shape=t.shape[1:], range=None) for t in scanned]
    body = b.inner([*variables, *elements])
    outside = {d for t in b.tensors for d in t.shape}
    body.grow(1, 4)
    results = [_kept_small(body, body.pick(lambda t, v=v: t.shape == v.shape, v.kind), v.high) for v in variables]
    fits_output = lambda t: len(t.shape) < 3 and all(isinstance(d, int) or d in outside for d in t.shape)
    collected = [body.pick(fits_output) for _ in range(b.number(0 if results else 1, 1))]
    names = body.as_outputs([*results, *collected])
    outputs = [(name, t.kind, t.shape) for name, t in zip(names, [*results, *collected])]
    inputs = [_info(t.name, t.kind) for t in [*variables, *elements]]
    directions = [b.number(0, 1) for _ in scanned]
    names = b.node(
        "Scan",
        *state,
        *scanned,
        outputs=len(outputs),
        num_scan_inputs=len(scanned),
        scan_input_directions=directions,
        body=body.proto(b.fresh("g"), inputs, outputs),
    )
    names = [names] if isinstance(names, str) else names
    for name, v in zip(names, variables):
        b.add(name, v.kind, v.shape, v.high)
    for name, t in zip(names[len(variables) :], collected):
        b.add(name, t.kind, [x.shape[0], *t.shape], t.high)


def _sequence(b: Block) -> None:
    """A sequence that a loop builds, or that an array is cut into."""
    if b.number(0, 1):
        x = b.pick(lambda t: t.shape and isinstance(t.shape[0], int) and t.shape[0] > 0)
        sequence = b.node("SplitToSequence", x, axis=0, keepdims=0)
        shape, trips = x.shape[1:], x.shape[0]
        element = x
    else:
        count = b.a_count(6)
        name = b.node("Max", count, b.constant(1))
        count = b.count(name, max(count.range[0], 1), max(count.range[1], 1), count.symbol if count.range[0] else "")
        empty = b.fresh("s")
        i, c, s = b.fresh("v"), b.fresh("v"), b.fresh("s")
        body = b.inner([Tensor(i, "i", (), 12, (0, 12), f"n{i}")])
        body.grow(1, 4)
        outside = {d for t in b.tensors for d in t.shape}
        element = body.pick(lambda t: all(isinstance(d, int) or d in outside for d in t.shape) and len(t.shape) < 3)
        b.nodes.append(helper.make_node("SequenceEmpty", [], [empty], dtype=ELEMENTS[element.kind]))
        longer = body.node("SequenceInsert", s, element)
        goes_on = body.node("Identity", c)
        kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(ELEMENTS[element.kind], None))
        inputs = [_info(i, "i", ()), _info(c, "b", ()), helper.make_value_info(s, kind)]
        graph = body.proto(b.fresh("g"), inputs, [(goes_on, "b"), helper.make_value_info(longer, kind)])
        sequence = b.node("Loop", count, b.constant(True, "b"), empty, body=graph)
        shape, trips = element.shape, count.symbol
    way = b.any("joined", "at", "length")
    if way == "joined":
        name = b.node("ConcatFromSequence", sequence, axis=0, new_axis=1)
        b.add(name, element.kind, [trips, *shape], element.high)
    elif way == "at":
        name = b.node("SequenceAt", sequence, b.constant(b.any(0, -1)))
        b.add(name, element.kind, shape, element.high)
    else:
        b.count(b.node("SequenceLength", sequence), 1, 12, trips)


def _function(b: Block) -> None:
    """A local function and a call of it, or two."""
    actuals = [b.pick(lambda t: True, "f"), *(b.pick(lambda t: True) for _ in range(b.number(0, 1)))]
    formals = [replace(t, name=b.fresh("v"), range=None) for t in actuals]
    body = b.inner(formals, captures=False)
    body.grow(2, 5)
    chosen = body.pick(lambda t: t.name in body.own)
    name = b.fresh("F")
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("local", 1)]
    function = helper.make_function("local", name, [t.name for t in formals], [chosen.name], body.nodes, imports)
    b.shared.functions.append(function)
    outside = {d for t in actuals for d in t.shape}
    for _ in range(b.number(1, 2)):
        shape = [d if isinstance(d, int) or d in outside else b.fresh(d[0]) for d in chosen.shape]
        y = b.add(b.node(name, *actuals, domain="local"), chosen.kind, shape, chosen.high)
        if y.kind == actuals[0].kind and y.shape == actuals[0].shape:
            actuals[0] = _kept_small(b, y, formals[0].high)


_NESTS: list[Callable[[Block], None]] = [_if, _loop, _scan, _sequence, _function]
STEPS: list[Callable[[Block], None]] = [
    *(_unary, _binary, _binary, _compare, _logic, _where, _cast),
    *(_reduce, _reduce, _along, _arg, _transpose, _rerank, _reshape, _reshape, _concat, _slice, _expand, _made),
    *(_matmul, _gather, _nonzero, _nonzero, _compress, _unique, _topk, _suppress),
    *(_if, _if, _loop, _loop, _scan, _sequence, _function),
]


@st.composite
def graphs(draw: Any, least: int = 5, most: int = 16) -> RandomGraph:
    """Graphs of so many steps (a step is one to a few nodes), with two or three inputs each."""
    shared = _Shared(draw)
    inputs = [Tensor("n", "i", (), 4, (0, 4), "nn"), Tensor("flag", "b", ()), Tensor("k", "i", (4,), 5)]
    shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3))
    inputs += [Tensor(f"x{j}", "f", shape) for j, shape in enumerate(shapes)]
    block = Block(shared, inputs, 0, in_function=False)
    block.grow(least, most)
    made = [t for t in block.tensors if t.name in block.own]
    chosen = {t.name: t for t in (made[-1 - draw(st.integers(0, min(len(made) - 1, 8)))] for _ in range(3))}
    chosen[made[-1].name] = made[-1]
    graph = block.proto(
        "graph", [_info(t.name, t.kind, t.shape) for t in inputs], [(t.name, t.kind) for t in chosen.values()]
    )
    graph.initializer.extend(shared.initializers)
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("local", 1)]
    proto = helper.make_model(graph, ir_version=9, opset_imports=imports, functions=shared.functions)
    seed = draw(st.integers(0, 2**16))
    return RandomGraph(
        proto, [_contents(inputs, np.random.default_rng([seed, j])) for j in range(draw(st.integers(2, 3)))]
    )


def _contents(inputs: Sequence[Tensor], rng: np.random.Generator) -> dict[str, np.ndarray]:
    made = {
        "f": lambda t: np.clip(np.round(rng.normal(rng.uniform(-1, 1), 1, t.shape), 3), -3, 3),
        "i": lambda t: rng.integers(0, int(t.high) + 1, t.shape),
        "b": lambda t: rng.integers(0, 2, t.shape),
    }
    return {t.name: np.asarray(made[t.kind](t), DTYPES[t.kind]) for t in inputs}
