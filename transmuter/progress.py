"""Progress bars, where they are wanted and tqdm is there."""

from __future__ import annotations

import sys
from typing import Any


def bar_class(wanted: bool | None) -> type[Any] | None:
    """The class `tqdm`, or None for no bar.

    Args:
        wanted: Show a bar; None shows it on a terminal, if tqdm is there.

    Raises:
        ImportError: It is wanted, but tqdm is not there.
    """
    if wanted is False or (wanted is None and not sys.stderr.isatty()):
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        if wanted:
            raise
        return None
    return tqdm
