"""What a compiled model did: its segments, and each break with the reason for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from transmuter.lowering.evaluation import describe, operator_name, origin
from transmuter.segments.segment import Segment


@dataclass(frozen=True)
class BreakReport:
    """A graph break.

    Attributes:
        node: The node's name (or its first output's).
        operator: `domain::Name`.
        operand: The operand whose contents it needs.
        origin: The values that lead to that operand, itself first.
        runs, seconds, host_bytes: How often it ran, how long that took, and how many bytes of operands were read.
    """

    node: str
    operator: str
    operand: str
    origin: tuple[str, ...]
    runs: int = field(default=0, compare=False)
    seconds: float = field(default=0.0, compare=False)
    host_bytes: int = field(default=0, compare=False)


@dataclass(frozen=True)
class SegmentReport:
    """A segment: its place in a run, its signature, how many nodes it evaluates, how often the cache had it, how often
    it ran and how long that took (until JAX had taken the work on), what it cost, and the breaks after it."""

    depth: int
    signature: str
    nodes: int
    hits: int
    calls: int
    seconds: float
    trace_seconds: float
    compile_seconds: float
    breaks: tuple[BreakReport, ...]


@dataclass(frozen=True)
class Explanation:
    """The segments of a compiled model; `str` of it is a report to read."""

    segments: tuple[SegmentReport, ...]

    @property
    def breaks(self) -> tuple[BreakReport, ...]:
        """Every break, once, with what it took after all segments together."""
        found: dict[BreakReport, BreakReport] = {}
        for b in (b for segment in self.segments for b in segment.breaks):
            a = found.setdefault(b, replace(b, runs=0, seconds=0.0, host_bytes=0))
            runs, seconds, size = a.runs + b.runs, a.seconds + b.seconds, a.host_bytes + b.host_bytes
            found[b] = replace(b, runs=runs, seconds=seconds, host_bytes=size)
        return tuple(found.values())

    def __str__(self) -> str:
        if not self.segments:
            return "Nothing is compiled yet: call the compiled model first."
        lines = []
        for s in self.segments:
            lines.append(
                f"segment {s.depth} for {s.signature}: {s.nodes} nodes, {s.calls} calls, "
                f"traced in {s.trace_seconds:.2f} s, compiled in {s.compile_seconds:.2f} s"
            )
            for b in s.breaks:
                lines.append(f"  break at {b.node} ({b.operator}): needs the contents of {b.operand}")
                lines += [f"    <- {value}" for value in b.origin]
        return "\n".join(lines)


def explain(segments: Iterable[Segment]) -> Explanation:
    """Reports on compiled segments."""
    return Explanation(tuple(map(report, segments)))


def report(segment: Segment) -> SegmentReport:
    """Reports on one segment."""
    return SegmentReport(
        segment.stage.depth,
        segment.labels["signature"],
        segment.nodes,
        segment.hits,
        segment.tally.runs,
        segment.tally.seconds,
        segment.trace_seconds,
        segment.compile_seconds,
        tuple(_break_report(segment, needed) for needed in segment.breaks),
    )


def _break_report(segment: Segment, needed: Any) -> BreakReport:
    node, tally = needed.node, segment.break_tallies[needed.node]
    operand = node.inputs[needed.position] if needed.position < len(node.inputs) else None
    return BreakReport(
        node.name or node.outputs[0].name or describe(node),
        operator_name(node),
        needed.operand,
        tuple(origin(operand)) if operand is not None else (),
        tally.runs,
        tally.seconds,
        tally.host_bytes,
    )
