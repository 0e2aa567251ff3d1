"""What is compiled, and not transformed any more: with kernels of our own instead of XLA's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from transmuter.lowering.platform import has_kernels
from transmuter.segments.convolutions import convolutions, depthwise_convolutions
from transmuter.segments.integers import dynamic_quantization
from transmuter.segments.preparation import Trace
from transmuter.segments.rewriting import Replacement, Rule, View, opened, rewriting, rewritten, within
from transmuter.segments.strided_products import strided_products

_CALLED = {"custom_jvp_call", "custom_vjp_call", "named"}
"""Functions with a derivative of their own, which nobody asks for any more, or a name, which no rule has asked for."""
_WITH_BODIES = {"scan", "while", "cond", "remat2"}


def with_kernels(trace: Trace) -> Trace:
    """A trace that computes the same by kernels of our own, where they are there and faster; it has no derivative."""
    return rewritten(trace, (), _RULES) if has_kernels() else trace


def calling_kernels(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that computes the same by kernels of our own; it has no derivative."""
    return rewriting(function, *_RULES) if has_kernels() else function


def called_on_weights(view: View) -> Iterator[Replacement]:
    """A rule: `_called` of weights alone, which are prepared by operations that can be written down (`records`)."""
    for op in view.trace.operations:
        if op.equation.primitive.name in _CALLED and view.weights.issuperset(op.results):
            yield opened(op)


def _called(view: View) -> Iterator[Replacement]:
    """A rule: the operations of functions that have a derivative of their own, or a name."""
    for op in view.trace.operations:
        if op.equation.primitive.name in _CALLED:
            yield opened(op)


def _inside(view: View) -> Iterator[Replacement]:
    """A rule: kernels in loops, branches, and what is computed again."""
    for op in view.trace.operations:
        if op.equation.primitive.name in _WITH_BODIES:
            yield within(op, *_RULES)


_RULES: tuple[Rule, ...] = (
    dynamic_quantization,
    depthwise_convolutions,
    _called,
    _inside,
    convolutions,
    strided_products,
)
