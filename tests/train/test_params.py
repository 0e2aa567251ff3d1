"""Params as safetensors files."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from building import info, model_of
from onnx import helper, numpy_helper

import transmuter
from transmuter import train


def model(dtype: type, width: int = 3) -> transmuter.Model:
    """(x @ /w) * s, in half precision or not."""
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    arrays = {"/w": np.arange(4 * width).reshape(4, width) / 8, "s": np.array(1.5)}
    weights = [numpy_helper.from_array(a.astype(dtype), n) for n, a in arrays.items()]
    nodes = [helper.make_node("MatMul", ["x", "/w"], ["h"]), helper.make_node("Mul", ["h", "s"], ["y"])]
    proto = model_of(nodes, [info("x", ("n", 4), element)], [info("y", ("n", width), element)], weights)
    return transmuter.load(proto, trainable=True)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_params_come_back(tmp_path, dtype):
    original = model(dtype)
    changed = {name: array * 2 for name, array in original.params.items()}
    train.save_params(tmp_path / "all.safetensors", changed)
    train.save_params(tmp_path / "some.safetensors", {"/w": changed["/w"]})
    for file, expected in (("all", changed), ("some", {**original.params, "/w": changed["/w"]})):
        found = train.load_params(tmp_path / f"{file}.safetensors", original)
        assert found.keys() == expected.keys()
        for name, array in found.items():
            assert array.dtype == dtype
            np.testing.assert_array_equal(array, expected[name])


def test_files_that_do_not_fit_are_named(tmp_path):
    train.save_params(tmp_path / "wide", model(np.float32, width=5).params)
    with pytest.raises(transmuter.InputError, match=r"'/w' has the shape \[4, 5\]"):
        train.load_params(tmp_path / "wide", model(np.float32))
    train.save_params(tmp_path / "other", {"v": np.ones(3)})
    with pytest.raises(transmuter.InputError, match="'v' is unknown"):
        train.load_params(tmp_path / "other", model(np.float32))
    (tmp_path / "broken").write_bytes(b"nothing of the kind")
    with pytest.raises(transmuter.ModelError, match="is no safetensors file"):
        train.load_params(tmp_path / "broken", model(np.float32))
