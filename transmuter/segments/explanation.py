"""What a compiled model did: its segments, and each break with the reason for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    """

    node: str
    operator: str
    operand: str
    origin: tuple[str, ...]


@dataclass(frozen=True)
class SegmentReport:
    """A segment: its place in a run, its signature, how many nodes it evaluates, what it cost, and the breaks after
    it."""

    depth: int
    signature: str
    nodes: int
    calls: int
    trace_seconds: float
    compile_seconds: float
    breaks: tuple[BreakReport, ...]


@dataclass(frozen=True)
class Explanation:
    """The segments of a compiled model; `str` of it is a report to read."""

    segments: tuple[SegmentReport, ...]

    @property
    def breaks(self) -> tuple[BreakReport, ...]:
        """Every break, once."""
        return tuple(dict.fromkeys(b for segment in self.segments for b in segment.breaks))

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


def explain(segments: Sequence[Segment]) -> Explanation:
    """Reports on compiled segments."""
    return Explanation(
        tuple(
            SegmentReport(
                s.stage.depth,
                spell(s),
                s.nodes,
                s.calls,
                s.trace_seconds,
                s.compile_seconds,
                tuple(map(_report, s.breaks)),
            )
            for s in segments
        )
    )


def _report(needed: Any) -> BreakReport:
    node = needed.node
    operand = node.inputs[needed.position] if needed.position < len(node.inputs) else None
    chain = tuple(origin(operand)) if operand is not None else ()
    return BreakReport(node.name or node.outputs[0].name or describe(node), operator_name(node), needed.operand, chain)


def spell(segment: Segment) -> str:
    """A segment's signature, as `name dtype[shape]` of each argument and the contents of static ones."""
    values = [v for v in segment.stage.arrays if v not in segment.static]
    parts = [f"{v.name} {_spell(x)}" for v, x in zip(values, segment.signature.arguments, strict=True)]
    parts += [f"{v.name} = {x.tolist()}" for v, x in segment.static.items()]
    return ", ".join(parts) or "no arguments"


def _spell(shape: Any) -> str:
    if shape is None:
        return "absent"
    if shape and isinstance(shape[0], tuple) and len(shape) == 2 and not isinstance(shape[1], tuple):
        return f"{shape[1].name}{list(shape[0])}"
    return f"sequence of {len(shape)}"
