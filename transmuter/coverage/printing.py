"""The matrix as a table for the terminal, as Markdown, and the comparison of two runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from transmuter.coverage.running import Results, Row
from transmuter.coverage.verdicts import Verdict

_GROUPS = {"task": "Task", "architecture": "Architecture"}
_MARKS = {Verdict.MATCH: "✓", Verdict.NOISE: "≈"}


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{1e3 * value:.1f}"


def worst(row: Row, key: str) -> float | None:
    """The largest value of all cases and modes; of an agreement, the smallest."""
    found = [case[key] for mode in ("eager", "compiled") for case in row.get(mode, ()) if case[key] is not None]
    return (min if key == "argmax" else max)(found, default=None)


def seconds(row: Row) -> float | None:
    """What one compiled call takes, at the largest shape."""
    return max((case["seconds"] for case in row.get("compiled", ()) if case["seconds"] is not None), default=None)


COLUMNS: Mapping[str, Callable[[Row], str]] = {
    "model": lambda row: row["name"],
    "task": lambda row: row.get("task", ""),
    "architecture": lambda row: row.get("architecture", ""),
    "verdict": lambda row: f"{_MARKS.get(row['verdict'], '✗')} {row['verdict']}",
    "abs. error": lambda row: _number(worst(row, "absolute")),
    "rms error": lambda row: _number(worst(row, "rms")),
    "argmax": lambda row: "" if worst(row, "argmax") is None else f"{worst(row, 'argmax'):.0%}",
    "segments": lambda row: str(row.get("segments", "")),
    "breaks": lambda row: str(len(row["breaks"])) if "breaks" in row else "",
    "compile, s": lambda row: f"{row['trace_seconds'] + row['compile_seconds']:.1f}" if "trace_seconds" in row else "",
    "call, ms": lambda row: _milliseconds(seconds(row)),
    "peak, MB": lambda row: f"{row['peak_bytes'] / 1e6:.0f}" if "peak_bytes" in row else "",
    "gradient": lambda row: row.get("gradient", "").split(":")[0],
}
"""What the matrix shows of a model. Numbers are the largest of both modes and all shapes."""


def is_good(row: Row) -> bool:
    """Whether the model works."""
    return Verdict(row["verdict"]).is_good


def ordered(results: Results) -> list[Row]:
    """The rows, by task and name."""
    return sorted(results.rows.values(), key=lambda row: (row.get("task", ""), row["name"]))


def totals(rows: Iterable[Row], key: str | None = None) -> dict[str, dict[str, int]]:
    """How many rows have which verdict, in all or for each value of `key`."""
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        group = found.setdefault("all" if key is None else row.get(key) or "other", {})
        group[row["verdict"]] = group.get(row["verdict"], 0) + 1
    return dict(sorted(found.items()))


def summary(results: Results) -> str:
    """One line: how many models work, and how the others fail."""
    counts = totals(results.rows.values()).get("all", {})
    good = sum(counts.get(verdict, 0) for verdict in Verdict if verdict.is_good)
    parts = [f"{counts[verdict]} {verdict}" for verdict in Verdict if verdict in counts]
    return f"{good} of {len(results.rows)} models work: {', '.join(parts) or 'none was run'}"


def table(results: Results) -> str:
    """The matrix for a terminal."""
    cells = [list(COLUMNS)] + [[show(row) for show in COLUMNS.values()] for row in ordered(results)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], "", *_troubles(results), summary(results)])


def _troubles(results: Results) -> list[str]:
    """A line for each model that does not work, and an empty one."""
    lines = [f"{row['name']}: {row['why']}" for row in ordered(results) if not is_good(row)]
    return [*lines, ""] if lines else []


# ---- Markdown ------------------------------------------------------------------------------------------------------


def markdown(results: Results) -> str:
    """The matrix as a page, with totals by task and architecture, and what is to say of single models."""
    rows = ordered(results)
    parts = [
        "# Coverage matrix",
        f"{summary(results)}. [How verdicts are reached](../docs/coverage.md).",
        ", ".join(f"{key} {value}" for key, value in results.about.items()),
        _markdown_table(list(COLUMNS), [[show(row) for show in COLUMNS.values()] for row in rows]),
    ]
    for key, title in _GROUPS.items():
        counts = totals(rows, key)
        verdicts = [v for v in Verdict if any(v in count for count in counts.values())]
        lines = [[group, *(str(count.get(v, "")) for v in verdicts)] for group, count in counts.items()]
        parts += [f"## {title}s", _markdown_table([title.lower(), *verdicts], lines)]
    parts += ["## Breaks and differences", _notes(rows)]
    return "\n\n".join(parts) + "\n"


def _markdown_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    cells = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in cells)


def _notes(rows: Iterable[Row]) -> str:
    lines = []
    for row in rows:
        if row["verdict"] != Verdict.MATCH:
            lines.append(f"- **{row['name']}**, {row['verdict']}: {row['why']}." + _reason(row))
        lines += [
            f"- **{row['name']}** breaks at {b['node']} ({b['operator']}), which {b['what']}"
            for b in row.get("breaks", ())
        ]
    return "\n".join(lines) or "None."


def _reason(row: Row) -> str:
    return f" {row['reason']}" if row.get("reason") else ""


# ---- two runs ------------------------------------------------------------------------------------------------------


def compared(old: Results, new: Results) -> tuple[str, bool]:
    """What became better, what broke, and what came or went. Returns the report, and whether nothing broke."""
    order = list(Verdict)
    groups: dict[str, list[str]] = {"broke": [], "better": [], "slower or larger": [], "new": [], "gone": []}
    for name in sorted({*old.rows, *new.rows}):
        before, after = old.rows.get(name), new.rows.get(name)
        if before is None or after is None:
            kind, row = ("new", after) if before is None else ("gone", before)
            groups[kind].append(f"{name}: {row['verdict']}")
            continue
        was, now = Verdict(before["verdict"]), Verdict(after["verdict"])
        if was is not now:
            kind = "better" if order.index(now) < order.index(was) else "broke"
            groups[kind].append(f"{name}: {was} → {now} ({after['why'] or before['why']})")
        elif len(before.get("breaks", ())) != len(after.get("breaks", ())):
            more = len(after.get("breaks", ())) > len(before.get("breaks", ()))
            counts = f"{len(before.get('breaks', ()))} → {len(after.get('breaks', ()))} breaks"
            groups["broke" if more else "better"].append(f"{name}: {counts}")
        groups["slower or larger"] += _grown(name, before, after)
    parts = [f"{title}:\n" + "\n".join(f"  {line}" for line in lines) for title, lines in groups.items() if lines]
    return "\n".join([*parts, f"{summary(old)}\n{summary(new)}"]), not groups["broke"]


def _grown(name: str, before: Row, after: Row) -> list[str]:
    """What has become twice as large, of what is large enough to tell."""
    figures: dict[str, tuple[Any, Any, float, str]] = {
        "a call": (seconds(before), seconds(after), 0.01, "s"),
        "compiling": (before.get("compile_seconds"), after.get("compile_seconds"), 1.0, "s"),
        "peak memory": (before.get("peak_bytes"), after.get("peak_bytes"), 200e6, "bytes"),
    }
    return [
        f"{name}: {what} {was:.3g} → {now:.3g} {unit}"
        for what, (was, now, least, unit) in figures.items()
        if was and now and now > 2 * was and now > least
    ]
