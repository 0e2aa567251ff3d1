"""The domain com.microsoft.nchwc: what ONNX Runtime writes into a file that it saves after optimising it for a CPU.

There, a tensor is stored in blocks of 8 or 16 channels, as wide as the vectors of that CPU, and its channels are filled
up with zeros to whole blocks. Here it is a plain tensor whose channels come second: ReorderInput, which would block it,
has nothing to do, and all that is left of the layout is the order in which the file has the weights of Conv.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from numpy._core._multiarray_umath import __cpu_features__

from transmuter.lowering import convolution, image, pooling
from transmuter.lowering.arrays import Array
from transmuter.lowering.registry import operator

_DOMAIN = "com.microsoft.nchwc"

BLOCK = 8 if __cpu_features__.get("AVX2") and not __cpu_features__.get("AVX512F") else 16
"""How many channels make up a block where shapes do not tell: as many as on this machine's CPU, for ONNX Runtime's
files fit machines of the kind that they were saved on."""


@operator(domain=_DOMAIN)
def ReorderInput(X, *, channels_last=0):
    return jnp.moveaxis(X, -1, 1) if channels_last else X


@operator(domain=_DOMAIN)
def ReorderOutput(X, *, channels=0, channels_last=0):
    y = X[:, : channels or None]
    return jnp.moveaxis(y, 1, -1) if channels_last else y


def _inputs_in_blocks(shape: tuple[int, ...], channels: int, group: int, block: int) -> bool | None:
    """Whether a weight of this shape, for an input of so many channels, has its inputs in blocks as its outputs are;
    None where it cannot be one for blocks of this size."""
    outputs, inputs = shape[:2]
    if outputs % block:
        return None
    if group > 1:
        if inputs == 1 and outputs == group:
            return False
        return True if inputs % block == 0 and outputs // group % block == 0 else None
    if channels < block:
        return False if inputs == channels else None
    return True if inputs % block == 0 and inputs - channels < block else None


def _in_order(weight: Array, channels: int, group: int) -> Array:
    """A weight whose elements lie in blocks, in the order that its shape says, and without the inputs that fill up."""
    fitting = [b for b in (8, 16) if _inputs_in_blocks(weight.shape, channels, group, b) is not None]
    if not fitting:
        raise ValueError(f"a weight of shape {weight.shape} for {channels} channels is in blocks of neither 8 nor 16")
    block = BLOCK if BLOCK in fitting else fitting[0]
    outputs, inputs, *kernel = weight.shape
    rows = block if _inputs_in_blocks(weight.shape, channels, group, block) else 1
    weight = jnp.reshape(weight, (outputs // block, inputs // rows, *kernel, rows, block))
    weight = jnp.moveaxis(weight, (-1, -2), (1, 3))
    return jnp.reshape(weight, (outputs, inputs, *kernel))[:, : channels if group == 1 else None]


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
        X,
        _in_order(W, X.shape[1], group),
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
def Upsample(X, *, scales, coordinate_transformation_mode="asymmetric", mode="nearest") -> jax.Array:
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
