"""Which ONNX file of a repository to run: `model.onnx`, `model_fp16.onnx`, `model_quantized.onnx`, ...

The names and the order are those of transformers.js (`DEFAULT_DTYPE_SUFFIX_MAPPING`, `transformers.js_config.dtype`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transmuter.errors import ModelError

_SUFFIXES: dict[str, tuple[str, ...]] = {
    "fp32": ("",),
    "fp16": ("_fp16",),
    "q8": ("_quantized", "_q8"),
    "int8": ("_int8",),
    "uint8": ("_uint8",),
    "q4": ("_q4",),
    "q4f16": ("_q4f16",),
    "bnb4": ("_bnb4",),
}
"""What follows the stem in a file's name, by variant; the order of those that are taken if no other is there."""


def choose(
    files: Sequence[str],
    stem: str = "model",
    *,
    variant: str | Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
    default: str = "fp32",
) -> str:
    """The file to run: that of `variant`; else of the `dtype` in the configuration's `transformers.js_config`, of the
    task's default, fp32, or any other variant, the first that there is.

    Args:
        files: The repository's files.
        stem: The file's name without variant and `.onnx`, as `"decoder_model_merged"`.
        variant: One of fp32, fp16, q8, int8, uint8, q4, q4f16, bnb4, any other ending of a name (`"O3"` of
            `model_O3.onnx`), or the whole name of a file; or one of those by stem.
        config: The repository's `config.json`.
        default: The variant that the task prefers.

    Returns:
        A name among `files`: in the folder `onnx`, or at the top.

    Raises:
        ModelError: There is no such file, or the configuration's `dtype` is neither a name nor a dict of names.
    """
    if isinstance(variant, Mapping):
        variant = variant.get(stem)
    held = set(files)
    if variant is not None:
        if variant in held and variant.endswith(".onnx"):
            return variant
        found = next(_files(stem, variant, held), None)
        if found is None:
            raise ModelError(
                f"There is no variant {variant!r} of {stem}.onnx: {_told(stem, files)}. Choose another variant."
            )
        return found
    wanted = [default, *_SUFFIXES]
    configured = _configured(stem, config or {})
    if configured is not None:
        wanted.insert(0, configured)
    found = next((file for name in wanted for file in _files(stem, name, held)), None)
    if found is None:
        raise ModelError(
            f"There is no {stem}.onnx in the repository, nor a variant of it: {_told(stem, files)}. "
            "Check that it has an ONNX export of this kind of model."
        )
    return found


def _files(stem: str, variant: str, files: set[str]) -> Iterator[str]:
    """The files of a variant, the one that is preferred first."""
    for suffix in _SUFFIXES.get(variant, (f"_{variant}",)):
        for folder in ("onnx/", ""):
            if (name := f"{folder}{stem}{suffix}.onnx") in files:
                yield name


def _configured(stem: str, config: Mapping[str, Any]) -> str | None:
    """The variant that the repository prefers."""
    settings = config.get("transformers.js_config") or {}
    if not isinstance(settings, Mapping):
        raise ModelError(
            f"'transformers.js_config' in config.json is a {type(settings).__name__}. It must be an object: "
            "correct the file."
        )
    dtype = settings.get("dtype")
    if isinstance(dtype, Mapping):
        dtype = dtype.get(stem)
    if dtype is not None and not isinstance(dtype, str):
        raise ModelError(
            f"'dtype' in config.json's 'transformers.js_config' is a {type(dtype).__name__}. It must be a name, or an "
            "object of names: give the option variant, or correct the file."
        )
    return None if dtype == "auto" else dtype


def _told(stem: str, files: Sequence[str]) -> str:
    """What ONNX files there are, those of the stem if there are any."""
    models = [name for name in files if name.endswith(".onnx")]
    models = [name for name in models if name.rpartition("/")[2].startswith(stem.rpartition("/")[2])] or models
    if not models:
        return "it has no ONNX file"
    return "it has " + ", ".join(models[:12]) + (", ..." if len(models) > 12 else "")
