"""Measured figures beside the bars that they have to meet: the rows of every benchmark, as a table and as JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

_HEAD = f"{'':<36}{'ours':>10}{'theirs':>10} {'':<4}{'figure':>9}{'must':>8}{'aim':>8}"


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        name: What was measured.
        ours: Transmuter's measure, in `unit`.
        theirs: The peer's (ONNX Runtime's, unless the name says otherwise), where there is one.
        unit: Of both.
        figure: What the bars are for: a ratio of the two, or our measure by itself. The lower, the better.
        must: The bar; None for a figure that is only reported.
        aim: The bar beyond that one.
        max_abs_error: The largest absolute difference of the results, where they were compared.
    """

    name: str
    ours: float
    theirs: float | None
    unit: str
    figure: float
    must: float | None = None
    aim: float | None = None
    max_abs_error: float | None = None

    @property
    def misses(self) -> bool:
        """Whether it is beyond its bar."""
        return self.must is not None and not self.figure <= self.must

    def __str__(self) -> str:
        numbers = (self.ours, self.theirs, self.figure, self.must, self.aim)
        ours, theirs, figure, must, aim = ("" if x is None else f"{x:.2f}" for x in numbers)
        measures = f"{self.name:<36}{ours:>10}{theirs:>10} {self.unit:<4}"
        return f"{measures}{figure:>9}{must:>8}{aim:>8}{'  MISSED' if self.misses else ''}"


def geometric_mean(rows: Sequence[Row], *, must: float, aim: float) -> Row:
    """The geometric mean of the figures of some rows, as a row."""
    mean = math.exp(sum(math.log(row.figure) for row in rows) / len(rows))
    return Row(f"geometric mean of {len(rows)}", mean, None, "", mean, must, aim)


def report(rows: Iterable[Row], path: str | None = None) -> int:
    """Prints rows as they come, and writes them as JSON where a path is given. Returns how many miss their bars."""
    print(f"load average at the start {os.getloadavg()[0]:.1f}, which should be near 0")
    print(_HEAD, flush=True)
    found = []
    for row in rows:
        print(row, flush=True)
        found.append(row)
    if path:
        with open(path, "w") as stream:
            json.dump([asdict(row) | {"misses": row.misses} for row in found], stream, indent=2)
            stream.write("\n")
    missed = [row.name for row in found if row.misses]
    barred = sum(row.must is not None for row in found)
    print(f"missed: {', '.join(missed)}" if missed else f"all {barred} bars are met")
    return len(missed)
