"""Convolutions by the CPU's kernels: weights are packed beforehand, and gradients are computed as what they are.

JAX spells the gradients of a convolution as other convolutions: that of the input by a turned kernel, with zeros
between the elements where there were strides; that of the kernel by a kernel that is as large as the output.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from transmuter import native
from transmuter.lowering.convolution import DEPTHWISE
from transmuter.lowering.named import has_name
from transmuter.lowering.platform import has_kernels
from transmuter.native import Convolution, steps_of
from transmuter.segments.preparation import Operation, Ref
from transmuter.segments.rewriting import Operand, Replacement, View

_FEWEST_CHANNELS = 16
"""So many channels a depthwise convolution has for the kernel to have vectors of them."""
_FEWEST = 1 << 16
"""So many multiplications a convolution has for a call of the kernel to pay."""


def packed_kernels(view: View) -> Iterator[Replacement]:
    """A rule: the kernel of a convolution is packed once, where it is a weight."""
    if not has_kernels():
        return
    for op in view.trace.operations:
        input, kernel = op.operands if _is_convolution(view, op) else (None, None)
        if kernel in view.weights and input not in view.weights:
            how = _forward(view, op, steps_of(view.aval(kernel).shape))
            if how is not None:
                function = partial(_with_packed, how, _spec(op).rhs_spec, view.aval(op.results[0]).shape)
                yield Replacement(op.results, function, op.operands)


def convolutions(view: View) -> Iterator[Replacement]:
    """A rule for what is differentiated no more: convolutions, and those that are gradients of others."""
    for op in view.trace.operations:
        if _is_convolution(view, op) and (found := _found(view, op)) is not None:
            how, kernel, result = found
            function = partial(_computed, how, view.aval(result).shape)
            yield Replacement([result], function, [op.operands[0], kernel])


def depthwise_convolutions(view: View) -> Iterator[Replacement]:
    """A rule for what is differentiated no more: each channel is convolved with a kernel of its own."""
    for op in view.trace.operations:
        if not has_name(op.equation, DEPTHWISE):
            continue
        by = op.equation.params["by"]
        input, kernel = map(view.aval, op.operands)
        channels, shape = input.shape[-1], view.aval(op.results[0]).shape
        is_plain = {input.dtype, kernel.dtype} == {np.dtype(np.float32)} and set(by.stretch) == {1}
        is_plain &= all(isinstance(n, int) for n in (*input.shape, *shape, *itertools.chain(*by.padding)))
        if is_plain and len(by.size) <= 2 and channels >= _FEWEST_CHANNELS and 0 not in (*input.shape, *shape):
            *spatial, step = steps_of(kernel.shape)
            how = Convolution(
                wanted="output",
                batch=input.shape[0],
                groups=channels,
                channels=1,
                features=1,
                input=input.shape[1:-1],
                output=shape[1:-1],
                kernel=by.size,
                strides=by.strides,
                dilations=by.dilations,
                low=tuple(low for low, _ in by.padding),
                steps=(*spatial, 0, step),
            )
            yield Replacement(op.results, partial(_computed, how, shape), op.operands)


def _found(view: View, op: Operation) -> tuple[Convolution, Operand, Ref] | None:
    """What a convolution is, what it takes as its second operand, and the value that it computes."""
    kernel, result = op.operands[1], op.results[0]
    end, steps = _end(view, op)
    if (how := _kernel_gradient(view, op, steps)) is not None:
        return how, kernel, end
    if (turned := view.producer(kernel, "rev")) is not None:
        source, steps = _source(view, turned.operands[0])
        if (how := _input_gradient(view, op, turned, steps)) is not None:
            return how, source, result
    source, steps = _source(view, kernel)
    how = _forward(view, op, steps)
    return None if how is None else (how, source, result)


def _is_convolution(view: View, op: Operation) -> bool:
    """Whether it is a convolution of float32 that is large enough for a call."""
    if op.equation.primitive.name != "conv_general_dilated" or op.equation.params["batch_group_count"] != 1:
        return False
    avals = [view.aval(value) for value in (*op.operands, *op.results)]
    if {aval.dtype for aval in avals} != {np.dtype(np.float32)}:
        return False
    left, right, result = (aval.shape for aval in avals)
    if len(left) not in (3, 4) or not all(isinstance(n, int) and n > 0 for n in (*left, *right, *result)):
        return False
    features = right[_spec(op).rhs_spec[0]]
    return math.prod(result) * math.prod(right) // features >= _FEWEST


def _spec(op: Operation) -> Any:
    return op.equation.params["dimension_numbers"]


def _forward(view: View, op: Operation, steps: Sequence[int]) -> Convolution | None:
    """How an operation is a convolution with channels last, whose kernel has these steps along its dimensions."""
    params, spec = op.equation.params, _spec(op)
    if set(params["lhs_dilation"]) != {1} or not _has_channels_last(spec):
        return None
    input, kernel, output = (view.aval(value).shape for value in (*op.operands, *op.results))
    groups = params["feature_group_count"]
    features, channels, *spatial = spec.rhs_spec
    return Convolution(
        wanted="output",
        batch=input[0],
        groups=groups,
        channels=kernel[channels],
        features=kernel[features] // groups,
        input=input[1:-1],
        output=output[1:-1],
        kernel=tuple(kernel[i] for i in spatial),
        strides=params["window_strides"],
        dilations=params["rhs_dilation"],
        low=tuple(low for low, _ in params["padding"]),
        steps=tuple(steps[i] for i in (*spatial, channels, features)),
    )


def _input_gradient(view: View, op: Operation, turned: Operation, steps: Sequence[int]) -> Convolution | None:
    """How it is the gradient of an input, if it is, of a kernel that is turned."""
    params, spec = op.equation.params, _spec(op)
    channels, features, *spatial = spec.rhs_spec
    is_turned = set(turned.equation.params["dimensions"]) == set(spatial)
    is_plain = {*params["window_strides"], params["feature_group_count"]} == {1}
    if not (is_turned and is_plain and _has_channels_last(spec)):
        return None
    output, kernel, input = (view.aval(value).shape for value in (*op.operands, *op.results))
    sizes, dilations = tuple(kernel[i] for i in spatial), params["rhs_dilation"]
    return Convolution(
        wanted="input",
        batch=input[0],
        groups=1,
        channels=kernel[channels],
        features=kernel[features],
        input=input[1:-1],
        output=output[1:-1],
        kernel=sizes,
        strides=params["lhs_dilation"],
        dilations=dilations,
        low=tuple((k - 1) * d - low for k, d, (low, _) in zip(sizes, dilations, params["padding"])),
        steps=tuple(steps[i] for i in (*spatial, channels, features)),
    )


def _kernel_gradient(view: View, op: Operation, steps: Sequence[int]) -> Convolution | None:
    """How it is the gradient of a kernel, if it is; `steps` are those of the result's dimensions."""
    params, spec = op.equation.params, _spec(op)
    input, output, kernel = (view.aval(value).shape for value in (*op.operands, *op.results))
    by_position = (len(input) - 1, 0, *range(1, len(input) - 1))
    is_plain = {*params["lhs_dilation"], params["feature_group_count"]} == {1}
    if not (is_plain and spec.lhs_spec == spec.rhs_spec == by_position):
        return None
    channels, features, *spatial = spec.out_spec
    return Convolution(
        wanted="kernel",
        batch=input[0],
        groups=1,
        channels=input[-1],
        features=output[-1],
        input=input[1:-1],
        output=output[1:-1],
        kernel=tuple(kernel[i] for i in spatial),
        strides=params["rhs_dilation"],
        dilations=params["window_strides"],
        low=tuple(low for low, _ in params["padding"]),
        steps=tuple(steps[i] for i in (*spatial, channels, features)),
    )


def _has_channels_last(spec: Any) -> bool:
    rank = len(spec.lhs_spec)
    return spec.lhs_spec == spec.out_spec == (0, rank - 1, *range(1, rank - 1))


def _source(view: View, operand: Operand) -> tuple[Operand, list[int]]:
    """What a kernel is a transpose of, and its steps in that."""
    source, order = view.source(operand)
    steps = steps_of(view.aval(source).shape)
    return source, [steps[i] for i in order]


def _end(view: View, op: Operation) -> tuple[Ref, list[int]]:
    """What a result is transposed to, if it is for nothing else, and its steps in that."""
    end, order = view.end(op.results[0])
    steps = steps_of(view.aval(end).shape)
    return end, [steps[order.index(i)] for i in range(len(order))]


def _with_packed(
    how: Convolution, spec: Sequence[int], shape: Sequence[int], input: jax.Array, kernel: jax.Array
) -> list[jax.Array]:
    features, channels, *spatial = spec
    panels = native.packed_kernel(jax.lax.transpose(kernel, (*spatial, channels, features)), how.groups)
    return [native.convolution(input, panels, replace(how, is_packed=True, steps=(0,) * len(how.steps)), shape)]


def _computed(how: Convolution, shape: Sequence[int], first: jax.Array, second: jax.Array) -> list[jax.Array]:
    return [native.convolution(first, second, how, shape)]
