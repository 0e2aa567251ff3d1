"""docs/graph-breaks.md: its snippets run, and say what is true."""

from __future__ import annotations

from pathlib import Path

from snippets import run_snippets

PAGE = Path(__file__).parents[1] / "docs" / "graph-breaks.md"


def test_snippets_run() -> None:
    run_snippets(PAGE, {})
