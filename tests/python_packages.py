"""Small Python packages with ONNX files, and pip made to find no others."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from building import info, model_of
from onnx import helper, numpy_helper

WEIGHT = np.arange(12, dtype=np.float32).reshape(3, 4)


def model_bytes(location: str | None = None) -> bytes:
    """A product with a weight, which lies in a file beside the model if a location is given."""
    weight = numpy_helper.from_array(WEIGHT, "w")
    proto = model_of([helper.make_node("MatMul", ["x", "w"], ["y"])], [info("x")], [info("y", None)], [weight])
    if location is not None:
        tensor = proto.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=location)
    return proto.SerializeToString()


def wheel(folder: Path, files: dict[str, bytes]) -> Path:
    """A wheel of tiny-model 1.0."""
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    about = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nLicense-Expression: MIT\nSummary: A naïve model\n"
    marks = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    inside = {"METADATA": about.encode(), "WHEEL": marks.encode(), "RECORD": b""}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**files, **{f"tiny_model-1.0.dist-info/{n}": d for n, d in inside.items()}}.items():
            archive.writestr(name, data)
    return path


def find_packages_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes pip take packages from a folder alone."""
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(folder), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
