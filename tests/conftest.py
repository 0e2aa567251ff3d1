"""Makes the test folder's own modules importable, and finds the material that some tests use."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True, print_blob=True)
if os.environ.get("CI"):  # elsewhere, each run draws anew
    settings.load_profile("ci")

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "docs")]

MATERIAL = Path(os.environ.get("TRANSMUTER_MATERIAL", Path(__file__).parents[2] / "shared"))
"""The folder of recorded models, which is no part of this repository; tests that use it skip without it."""
ZOO = MATERIAL / "zoo"
needs_zoo = pytest.mark.skipif(not ZOO.exists(), reason=f"no recorded models at {MATERIAL}")


@pytest.fixture(autouse=True)
def _same_draws(request: pytest.FixtureRequest) -> None:
    """A test draws the same numbers from its module's generators whatever ran before it in its process."""
    for value in vars(request.module).values():
        if isinstance(value, np.random.Generator):
            value.bit_generator.state = np.random.default_rng(0).bit_generator.state
