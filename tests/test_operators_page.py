"""docs/operators.md is current, and every operator that ONNX Runtime knows is lowered or says why not."""

from __future__ import annotations

import generate_operators as generator
import onnx
import onnxruntime
import pytest


def test_every_operator_has_a_lowering_or_a_reason() -> None:
    assert generator.complaints() == []


def test_the_page_is_current() -> None:
    present = generator.PAGE.read_text()
    if f"onnx {onnx.__version__} and ONNX Runtime {onnxruntime.__version__}" not in present:
        pytest.skip("the page was made from the schemas of other versions of onnx and ONNX Runtime")
    assert generator.page().splitlines() == present.splitlines(), "run python docs/generate_operators.py"


def test_notes_are_escaped_outside_of_code() -> None:
    assert generator._escaped("a_b | `c_d | e` *x*") == r"a\_b \| `c_d \| e` \*x\*"
