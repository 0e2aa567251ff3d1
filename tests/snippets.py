"""Runs the Python snippets of a Markdown page, one after the other."""

from __future__ import annotations

import re
from pathlib import Path


def run_snippets(page: Path, names: dict[str, object]) -> None:
    """`names` is what they have in common; errors point at lines of the page."""
    text = page.read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) > 5
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], str(page), "exec"), names)
