"""Experimental operators of ai.onnx, withdrawn before opset 10, which early exporters wrote and ONNX Runtime knows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from transmuter.lowering.arrays import dims
from transmuter.lowering.registry import operator
from transmuter.lowering.shape import Slice_10

# ---- element by element --------------------------------------------------------------------------------------------


@operator()
def Affine(X, *, alpha=1.0, beta=0.0):
    return X * alpha + beta


@operator()
def Scale(input, *, scale=1.0):
    return input * scale


@operator()
def ScaledTanh(input, *, alpha, beta):
    return alpha * jnp.tanh(beta * input)


@operator()
def ParametricSoftplus(X, *, alpha, beta):
    return alpha * jax.nn.softplus(beta * X)


@operator()
def ImageScaler(input, *, scale=1.0, bias):
    return input * scale + np.array(bias, input.dtype)[:, None, None]


# ---- shapes --------------------------------------------------------------------------------------------------------


@operator()
def Crop(input, *, border, scale=None):
    left, top, right, bottom = border
    height, width = scale or (input.shape[2] - top - bottom, input.shape[3] - left - right)
    if top + height > input.shape[2] or left + width > input.shape[3] or min(height, width) <= 0:
        raise ValueError(f"a crop of {height} x {width} at ({top}, {left}) does not fit the image")
    return input[:, :, top : top + height, left : left + width]


@operator(known=("starts", "ends", "axes"))
def DynamicSlice(data, starts, ends, axes=None):
    return Slice_10(data, starts, ends, axes)


@operator(known=("input",), differentiable=False)
def GivenTensorFill(input=None, *, values, shape=None, extra_shape=(), input_as_shape=0):
    """As in Caffe2, where it comes from: the shape is the attribute, or the shape or the contents of the operand
    followed by `extra_shape`."""
    if (input is None) == (shape is None):
        raise ValueError("the shape is to be given by either the operand or the attribute")
    if input is not None:
        shape = (*(dims(input) if input_as_shape else input.shape), *extra_shape)
    return np.array(values, np.float32 if input is None else input.dtype).reshape(shape)


# ---- recurrence ----------------------------------------------------------------------------------------------------


@operator()
def GRUUnit(hidden_prev, gates, seq_lengths, t, *, drop_states=0):
    """As in Caffe2, where it comes from: the first third of the gates is not used, since the output gate already
    contains what it lets through."""
    _, update, output = jnp.split(gates, 3, axis=-1)
    kept = jax.nn.sigmoid(update)
    hidden = kept * hidden_prev + (1 - kept) * jnp.tanh(output)
    past = jnp.zeros_like(hidden) if drop_states else hidden_prev
    return jnp.where(t.reshape(()) < seq_lengths[:, None], hidden, past)
