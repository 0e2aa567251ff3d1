"""The domain com.microsoft.nchwc: what ONNX Runtime writes into a file that it saves after optimising it for a CPU.

There, a tensor is stored in blocks of 8 or 16 channels, as wide as the vectors of that CPU, and its channels are filled
up with zeros to whole blocks. Here its channels are filled up, too, but it is a plain tensor otherwise, with channels
second. All that is left of the layout is the order in which the file has the weights of Conv.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy._core._multiarray_umath import __cpu_features__

from transmuter.lowering import convolution, image, pooling
from transmuter.lowering.arrays import Array
from transmuter.lowering.registry import operator

_DOMAIN = "com.microsoft.nchwc"

BLOCK = 8 if __cpu_features__.get("AVX2") and not __cpu_features__.get("AVX512F") else 16
"""How many channels make up a block where shapes do not tell: as many as on this machine's CPU, for ONNX Runtime's
files fit machines of the kind that they were saved on."""


def _filled(x: Array, channels: int) -> Array:
    """`x` with so many channels: with zeros behind them, or without the last, which are zeros."""
    if x.shape[1] == channels:
        return x
    if abs(x.shape[1] - channels) >= 16:
        raise ValueError(f"{x.shape[1]} channels are not {channels}, filled up to whole blocks")
    return lax.pad(x, np.zeros((), x.dtype), [(0, channels - x.shape[1] if i == 1 else 0, 0) for i in range(x.ndim)])


@operator(domain=_DOMAIN)
def ReorderInput(X, *, channels_last=0):
    x = jnp.moveaxis(X, -1, 1) if channels_last else X
    return _filled(x, -(-x.shape[1] // BLOCK) * BLOCK)


@operator(domain=_DOMAIN)
def ReorderOutput(X, *, channels=0, channels_last=0):
    y = _filled(X, channels or X.shape[1])
    return jnp.moveaxis(y, 1, -1) if channels_last else y


def _blocks(shape: tuple[int, ...], group: int, block: int) -> tuple[int, int] | None:
    """How many outputs and inputs make up a block in a weight of this shape; None if it has no blocks of `block`.

    Inputs are not in blocks where each group has one, or where the input of the convolution is a plain tensor.
    """
    outputs, inputs = shape[:2]
    if outputs // (1 if inputs == 1 else group) % block:
        return None
    if (inputs == 1 and outputs == group) or (group == 1 and inputs < block):
        return block, 1
    return None if inputs % block else (block, block)


def _in_order(weight: Array, group: int) -> Array:
    """A weight whose elements lie in blocks, in the order that its shape says."""
    likeliest_first = sorted((8, 16), key=lambda block: block != BLOCK)
    fitting = [blocks for block in likeliest_first if (blocks := _blocks(weight.shape, group, block))]
    if not fitting:
        raise ValueError(f"a weight of shape {weight.shape} in {group} groups is in blocks of neither 8 nor 16")
    columns, rows = fitting[0]
    outputs, inputs, *kernel = weight.shape
    weight = jnp.reshape(weight, (outputs // columns, inputs // rows, *kernel, rows, columns))
    return jnp.reshape(jnp.moveaxis(weight, (-1, -2), (1, 3)), (outputs, inputs, *kernel))


@operator(domain=_DOMAIN)
def Conv(
    X,
    W,
    B=None,
    Sum=None,
    *,
    activation=None,
    activation_params=None,
    auto_pad="NOTSET",
    dilations=None,
    group=1,
    kernel_shape=None,
    pads=None,
    strides=None,
):
    return convolution.FusedConv(
        _filled(X, W.shape[1] * group),
        _in_order(W, group),
        B,
        Sum,
        activation=activation,
        activation_params=activation_params,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
    )


@operator(domain=_DOMAIN)
def MaxPool(
    X, *, kernel_shape, auto_pad="NOTSET", ceil_mode=0, dilations=None, pads=None, storage_order=0, strides=None
):
    return pooling.MaxPool(
        X,
        auto_pad=auto_pad,
        ceil_mode=ceil_mode,
        dilations=dilations,
        kernel_shape=kernel_shape,
        pads=pads,
        storage_order=storage_order,
        strides=strides,
        output_count=1,
    )


@operator(domain=_DOMAIN)
def AveragePool(
    X, *, kernel_shape, auto_pad="NOTSET", ceil_mode=0, count_include_pad=0, dilations=None, pads=None, strides=None
):
    return pooling.AveragePool(
        X,
        auto_pad=auto_pad,
        ceil_mode=ceil_mode,
        count_include_pad=count_include_pad,
        dilations=dilations,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
    )


operator(domain=_DOMAIN)(pooling.GlobalMaxPool)
operator(domain=_DOMAIN)(pooling.GlobalAveragePool)


@operator(domain=_DOMAIN)
def Upsample(X, *, scales, coordinate_transformation_mode="asymmetric", mode="nearest"):
    return image.Resize_11(
        X,
        scales=np.asarray(scales, np.float32),
        coordinate_transformation_mode=coordinate_transformation_mode,
        cubic_coeff_a=-0.75,
        exclude_outside=0,
        extrapolation_value=0,
        mode=mode,
        nearest_mode="floor",
    )
