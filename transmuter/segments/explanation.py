"""What a compiled model did: its segments, and each break with the reason for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from transmuter.lowering.evaluation import Break, describe, label, operator_name
from transmuter.lowering.reasons import Reason, shortened
from transmuter.segments.segment import Segment


@dataclass(frozen=True)
class BreakReport:
    """A graph break.

    Attributes:
        node: The node's name (or its first output's).
        operator: `domain::Name`.
        within: Where the need arises in a graph of the node (a loop's body, a branch): which node of it has it, as
            messages call it.
        operand: The operand that it needs.
        what: What it needs of that, as in "needs the contents of its operand 'shape'".
        origin: The values that lead to that operand, itself first, back to an input.
        inputs: All inputs that decide the contents.
        advice: What would remove the break.
        runs, seconds, host_bytes: How often it ran, how long that took, and how many bytes of operands were read.
    """

    node: str
    operator: str
    within: str
    operand: str
    what: str
    origin: tuple[str, ...]
    inputs: tuple[str, ...]
    advice: str = field(compare=False)
    runs: int = field(default=0, compare=False)
    seconds: float = field(default=0.0, compare=False)
    host_bytes: int = field(default=0, compare=False)

    @property
    def title(self) -> str:
        """Where it is and what it needs, in a line."""
        inner = f"{self.within} in it " if self.within else ""
        return f"{self.node} ({self.operator}): {inner}{self.what}"


@dataclass(frozen=True)
class CutReport:
    """A value that is computed at its largest size, `bound` along one axis, and cut after the segment: its name, what
    leads to its length, and what would avoid the cut."""

    value: str
    bound: int
    origin: tuple[str, ...]
    advice: str


@dataclass(frozen=True)
class SegmentReport:
    """A segment of the graph, compiled for one signature.

    Attributes:
        depth: Its place in a run: 0 runs first, 1 what follows its breaks, and so on.
        signature: What it was compiled for.
        nodes: How many nodes it evaluates, those of inlined branches included.
        hits: How often the cache had it.
        calls, seconds: How often it ran, and how long that took until JAX had taken the work on.
        trace_seconds, compile_seconds: What building it took.
        breaks: The breaks after it.
        cuts: The values of which padding is cut off after it.
        cut_runs, cut_seconds, cut_bytes: How often that was done, how long it took, and how many bytes were read.
        handed_on: How many arrays it hands on to later segments, on the device.
        results: The requested outputs that it computes.
        operators: The operators of its nodes, most frequent first, with the names of these.
    """

    depth: int
    signature: str
    nodes: int
    hits: int
    calls: int
    seconds: float
    trace_seconds: float
    compile_seconds: float
    breaks: tuple[BreakReport, ...]
    cuts: tuple[CutReport, ...] = ()
    cut_runs: int = 0
    cut_seconds: float = 0.0
    cut_bytes: int = 0
    handed_on: int = 0
    results: tuple[str, ...] = ()
    operators: Mapping[str, tuple[str, ...]] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class Explanation:
    """The segments of a compiled model; `str` of it is a report to read, `html()` a page to look at."""

    segments: tuple[SegmentReport, ...]
    model: str = "model"

    @property
    def breaks(self) -> tuple[BreakReport, ...]:
        """Every break, once, with what it took after all segments together."""
        found: dict[BreakReport, BreakReport] = {}
        for b in (b for segment in self.segments for b in segment.breaks):
            a = found.setdefault(b, replace(b, runs=0, seconds=0.0, host_bytes=0))
            runs, seconds, size = a.runs + b.runs, a.seconds + b.seconds, a.host_bytes + b.host_bytes
            found[b] = replace(b, runs=runs, seconds=seconds, host_bytes=size)
        return tuple(found.values())

    @property
    def totals(self) -> dict[str, Any]:
        """Sums over all segments, by name."""
        return {
            "depths": len({s.depth for s in self.segments}),
            "segments": len(self.segments),
            "breaks": len(self.breaks),
            "trace_seconds": sum(s.trace_seconds for s in self.segments),
            "compile_seconds": sum(s.compile_seconds for s in self.segments),
            "segment_seconds": sum(s.seconds for s in self.segments),
            "break_seconds": sum(b.seconds for b in self.breaks),
            "host_bytes": sum(b.host_bytes for b in self.breaks) + sum(s.cut_bytes for s in self.segments),
        }

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON has it."""
        return {
            "model": self.model,
            "totals": self.totals,
            "segments": [asdict(s) for s in self.segments],
            "breaks": [asdict(b) for b in self.breaks],
        }

    def html(self) -> str:
        """The report as a page of its own: the graph as segments and breaks. It loads nothing from elsewhere."""
        from transmuter.segments.page import page

        return page(self)

    def __str__(self) -> str:
        if not self.segments:
            return "Nothing is compiled yet: call the compiled model first."
        totals, told = self.totals, set()
        lines = [
            f"{self.model}: {count(totals['depths'], 'segment')} ({count(totals['segments'], 'signature')}), "
            f"{count(totals['breaks'], 'break')}"
        ]
        for s in self.segments:
            lines.append(
                f"segment {s.depth} for {brief(s.signature)}: {count(s.nodes, 'node')}, {count(s.calls, 'call')} in "
                f"{spell_seconds(s.seconds)}, traced in {spell_seconds(s.trace_seconds)}, "
                f"compiled in {spell_seconds(s.compile_seconds)}"
            )
            for b in s.breaks:
                lines.append(f"  break at {b.title}")
                if b not in told:
                    lines += [f"    <- {value}" for value in shortened(b.origin)]
                lines.append(f"    {cost(b.runs, b.seconds, b.host_bytes)}")
                if b not in told:
                    lines.append(f"    to remove it: {b.advice}")
                told.add(b)
            if s.cuts:
                names = ", ".join(f"{c.value} (at most {c.bound})" for c in s.cuts)
                lines.append(f"  cut after the segment: {count(len(s.cuts), 'value')}: {names}")
                lines.append(f"    {cost(s.cut_runs, s.cut_seconds, s.cut_bytes)}")
                chains = [c.origin for c in s.cuts if c.origin not in told]
                lines += [f"    {' <- '.join(shortened(chain))}" for chain in chains]
                told.update(chains)
        return "\n".join(map(printable, lines))


def printable(text: str) -> str:
    """A text in which characters that move others about (controls, directions of writing) are spelt out."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def brief(text: str, most: int = 200) -> str:
    """A text of which the middle is left out if it is long."""
    return text if len(text) <= most else f"{text[: most * 2 // 3]} ... {text[-most // 3 :]}"


def cost(runs: int, seconds: float, size: int) -> str:
    """What breaks or cuts took, in words."""
    if not runs:
        return "not run yet"
    mean = "" if runs == 1 else f" ({spell_seconds(seconds / runs)} each)"
    return f"ran {count(runs, 'time')} in {spell_seconds(seconds)}{mean}, {count(size, 'byte')} read to the host"


def spell_seconds(seconds: float) -> str:
    """A duration in the unit that suits it."""
    return (
        f"{seconds:.2f} s"
        if seconds >= 1
        else f"{seconds * 1e3:.1f} ms"
        if seconds >= 1e-4
        else f"{seconds * 1e6:.0f} µs"
    )


def count(number: int, what: str) -> str:
    """A number of things, in words."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def explain(segments: Iterable[Segment], model: str = "model") -> Explanation:
    """Reports on compiled segments."""
    return Explanation(tuple(map(report, segments)), model)


def report(segment: Segment) -> SegmentReport:
    """Reports on one segment."""
    tally = segment.cut_tally
    return SegmentReport(
        segment.stage.depth,
        segment.labels["signature"],
        segment.nodes,
        segment.hits,
        segment.tally.runs,
        segment.tally.seconds,
        segment.trace_seconds,
        segment.compile_seconds,
        tuple(_break_report(segment, needed, segment.reasons[needed.node]) for needed in segment.breaks),
        tuple(CutReport(v.name or "", n, reason.origin, reason.advice) for v, (n, reason) in segment.cuts.items()),
        tally.runs,
        tally.seconds,
        tally.host_bytes,
        len(segment.carried),
        (*segment.known_outputs, *segment.emitted),
        segment.operators,
    )


def _break_report(segment: Segment, needed: Break, reason: Reason) -> BreakReport:
    node, tally = needed.node, segment.break_tallies[needed.node]
    return BreakReport(
        label(node) if node.outputs else describe(node),
        operator_name(node),
        reason.node if reason.within else "",
        reason.operand,
        reason.what,
        reason.origin,
        reason.inputs,
        reason.advice,
        tally.runs,
        tally.seconds,
        tally.host_bytes,
    )
