"""docs/graph-breaks.md: its snippets run, and say what is true."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "graph-breaks.md"


def test_snippets_run() -> None:
    names: dict[str, object] = {}
    text = PAGE.read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) > 5
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], str(PAGE), "exec"), names)
