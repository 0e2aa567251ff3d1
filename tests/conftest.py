"""Makes the test folder's own modules importable, and finds the material that some tests use."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True, print_blob=True)
if os.environ.get("CI"):  # elsewhere, each run draws anew
    settings.load_profile("ci")

sys.path.insert(0, str(Path(__file__).parent))

MATERIAL = Path(os.environ.get("TRANSMUTER_MATERIAL", Path(__file__).parents[2] / "shared"))


@pytest.fixture(scope="session")
def material() -> Path:
    """The folder of recorded models, which is no part of this repository."""
    if not (MATERIAL / "zoo" / "zoo.json").exists():
        pytest.skip(f"no recorded models at {MATERIAL} (set TRANSMUTER_MATERIAL)")
    return MATERIAL
