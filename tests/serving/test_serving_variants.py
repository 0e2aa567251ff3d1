"""Which ONNX file of a repository is taken."""

from __future__ import annotations

from typing import Any

import pytest

from transmuter import ModelError
from transmuter.serving import variants

FILES = [
    "config.json",
    "onnx/model.onnx",
    "onnx/model_fp16.onnx",
    "onnx/model_q4.onnx",
    "onnx/model_q8.onnx",
    "onnx/model_quantized.onnx",
    "onnx/model_O3.onnx",
    "onnx/decoder_model_merged.onnx",
    "onnx/decoder_model_merged_q4.onnx",
]


def _dtype(value: Any) -> dict[str, Any]:
    return {"transformers.js_config": {"dtype": value}}


@pytest.mark.parametrize(
    ("stem", "options", "file"),
    [
        ("model", {}, "onnx/model.onnx"),
        ("model", {"variant": "fp16"}, "onnx/model_fp16.onnx"),
        ("model", {"variant": "q8"}, "onnx/model_quantized.onnx"),
        ("model", {"variant": "quantized"}, "onnx/model_quantized.onnx"),
        ("model", {"variant": "O3"}, "onnx/model_O3.onnx"),
        ("model", {"variant": "onnx/model_q8.onnx"}, "onnx/model_q8.onnx"),
        ("model", {"variant": "fp16", "config": _dtype("q4")}, "onnx/model_fp16.onnx"),
        ("model", {"config": _dtype("q4")}, "onnx/model_q4.onnx"),
        ("model", {"config": _dtype({"model": "q4", "decoder_model_merged": "fp32"})}, "onnx/model_q4.onnx"),
        ("model", {"config": _dtype({"decoder_model_merged": "q4"})}, "onnx/model.onnx"),
        ("model", {"config": _dtype("auto")}, "onnx/model.onnx"),
        ("model", {"config": _dtype("bnb4")}, "onnx/model.onnx"),  # which there is not
        ("model", {"config": _dtype("fp16"), "default": "q4"}, "onnx/model_fp16.onnx"),
        ("model", {"default": "q4"}, "onnx/model_q4.onnx"),
        ("model", {"default": "bnb4"}, "onnx/model.onnx"),
        ("decoder_model_merged", {"default": "q4"}, "onnx/decoder_model_merged_q4.onnx"),
        ("decoder_model_merged", {"variant": {"model": "q4"}}, "onnx/decoder_model_merged.onnx"),
        ("decoder_model_merged", {"variant": {"decoder_model_merged": "q4"}}, "onnx/decoder_model_merged_q4.onnx"),
    ],
)
def test_the_order(stem: str, options: dict[str, Any], file: str) -> None:
    assert variants.choose(FILES, stem, **options) == file


def test_what_is_left_is_taken() -> None:
    assert variants.choose(["onnx/model_q4.onnx", "onnx/model_uint8.onnx"]) == "onnx/model_uint8.onnx"
    assert variants.choose(["onnx/model_q8.onnx"]) == "onnx/model_q8.onnx"
    assert variants.choose(["model.onnx", "model_fp16.onnx"], variant="fp16") == "model_fp16.onnx"
    assert variants.choose(["model.onnx", "onnx/model.onnx"]) == "onnx/model.onnx"
    assert variants.choose(["text_encoder/model.onnx"], "text_encoder/model") == "text_encoder/model.onnx"


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        (FILES, {"variant": "q4f16"}, r"no variant 'q4f16' of model\.onnx: it has onnx/model\.onnx, onnx/model_fp16"),
        (FILES, {"variant": "onnx/none.onnx"}, "no variant"),
        (["config.json"], {}, r"no model\.onnx in the repository, nor a variant of it: it has no ONNX file"),
        (["onnx/encoder_model.onnx"], {}, r"it has onnx/encoder_model\.onnx"),
        # another model's file is no variant
        (["onnx/model_merged.onnx"], {}, r"no model\.onnx"),
        (FILES, {"config": _dtype(8)}, "'dtype' in config.json's 'transformers.js_config' is a int"),
        (FILES, {"config": _dtype({"model": ["q4"]})}, "'dtype' in config.json's 'transformers.js_config' is a list"),
        (FILES, {"config": {"transformers.js_config": [1]}}, "'transformers.js_config' in config.json is a list"),
    ],
)
def test_what_is_not_there(files: list[str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        variants.choose(files, **options)
