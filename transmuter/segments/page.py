"""An explanation as one HTML page that stands by itself: no script, nothing from elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape

from transmuter.lowering.reasons import shortened
from transmuter.segments.explanation import (
    BreakReport,
    CutReport,
    Explanation,
    SegmentReport,
    brief,
    cost,
    count,
    printable,
    spell_seconds,
)

_COLOURS = 9
"""The most frequent operators have colours of their own; the others share one."""

_STYLE = """
:root { color-scheme: light dark; --ground: #f6f7f9; --card: #fff; --text: #1b2330; --soft: #5c6779; --line: #d5dae2;
  --break: #b4540a; --break-ground: #fff4e6; --cut: #1c62a8; --cut-ground: #eaf3fd; --tint: 52%; }
@media (prefers-color-scheme: dark) { :root { --ground: #12161d; --card: #1b212b; --text: #e6eaf0; --soft: #9aa6b8;
  --line: #343d4b; --break: #f0a35c; --break-ground: #2b2118; --cut: #7db6ef; --cut-ground: #182432; --tint: 60%; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem; background: var(--ground); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 0; } h3 { font-size: 1rem; margin: 0 0 .4rem; }
h1, h2, h3, p, code, td, li { overflow-wrap: anywhere; }
p { margin: .35rem 0; } a { color: inherit; }
code { font: .86em ui-monospace, monospace; unicode-bidi: isolate; }
.soft { color: var(--soft); }
.tiles { display: flex; flex-wrap: wrap; gap: .6rem; margin: 1rem 0; padding: 0; list-style: none; }
.tiles li { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .4rem .9rem; }
.tiles b { display: block; font-size: 1.25rem; }
.map { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .6rem;
  margin-bottom: 1.2rem; }
.map svg { display: block; } .map text { fill: var(--text); font: 13px system-ui, sans-serif; text-anchor: middle; }
.map .small { fill: var(--soft); font-size: 11px; } .map .box { fill: var(--ground); stroke: var(--soft); }
.map .gap { fill: var(--break-ground); stroke: var(--break); } .map .edge { stroke: var(--soft); stroke-width: 1.5; }
.segment { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: 1rem; }
.segment + .segment { margin-top: .6rem; }
.head { display: flex; flex-wrap: wrap; gap: .2rem 1rem; align-items: baseline; }
.bar { display: flex; height: .9rem; margin: .7rem 0; border-radius: .3rem; overflow: hidden; gap: 1px; }
.bar span { min-width: 2px; }
.operators { display: flex; flex-wrap: wrap; gap: .4rem; align-items: flex-start; }
.operators details { border: 1px solid var(--line); border-radius: .4rem; padding: .1rem .5rem; max-width: 100%; }
.operators details[open] { flex-basis: 100%; }
.operators ul { columns: 16rem; max-height: 22rem; overflow-y: auto; margin: .3rem 0; padding-left: 1.1rem; }
summary { cursor: pointer; } summary b { font-weight: 600; }
.swatch { display: inline-block; width: .7rem; height: .7rem; border-radius: .15rem; margin-right: .35rem; }
.table { overflow-x: auto; margin-top: .8rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: right; padding: .2rem .6rem; border-top: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; border-top: 0; }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 14rem; }
.between { border-left: 2px solid var(--line); margin-left: 2rem; padding: .7rem 0 .7rem 1.2rem; display: grid;
  gap: .6rem; }
.break, .cut { border-left: 4px solid var(--break); background: var(--break-ground); border-radius: .4rem;
  padding: .7rem 1rem; }
.cut { border-color: var(--cut); background: var(--cut-ground); }
.break h3 { color: var(--break); } .cut h3 { color: var(--cut); }
.chain { display: flex; flex-wrap: wrap; gap: .15rem .3rem; list-style: none; margin: .4rem 0; padding: 0; }
.chain li:not(:last-child)::after { content: " \\2192"; color: var(--soft); }
.chain code { background: var(--card); border: 1px solid var(--line); border-radius: .3rem; padding: 0 .3rem; }
"""


def page(explanation: Explanation) -> str:
    """The page. Every name in it is escaped."""
    colours = _colours(explanation)
    depths = _by_depth(explanation.segments)
    title = _text(f"{explanation.model}: segments and breaks")
    body = [
        f"<h1>{_text(explanation.model)}</h1>",
        '<p class="soft">What it was compiled to: segments, which XLA runs, and the graph breaks between them.</p>',
        _tiles(explanation),
        _map(depths),
        *(_depth(depth, segments, colours, len(depths)) for depth, segments in depths.items()),
    ]
    if not depths:
        body.append("<p>Nothing is compiled yet: call the compiled model first.</p>")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}{_palette()}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _by_depth(segments: Iterable[SegmentReport]) -> dict[int, list[SegmentReport]]:
    found: dict[int, list[SegmentReport]] = {}
    for segment in segments:
        found.setdefault(segment.depth, []).append(segment)
    return dict(sorted(found.items()))


def _tiles(explanation: Explanation) -> str:
    totals = explanation.totals
    shown = {
        "segments" if totals["depths"] != 1 else "segment": totals["depths"],
        "signatures" if totals["segments"] != 1 else "signature": totals["segments"],
        "breaks" if totals["breaks"] != 1 else "break": totals["breaks"],
        "to trace": spell_seconds(totals["trace_seconds"]),
        "to compile": spell_seconds(totals["compile_seconds"]),
        "in segments": spell_seconds(totals["segment_seconds"]),
        "in breaks": spell_seconds(totals["break_seconds"]),
        "bytes to the host": f"{totals['host_bytes']:,}",
    }
    return f'<ul class="tiles">{"".join(f"<li><b>{value}</b>{name}</li>" for name, value in shown.items())}</ul>'


def _map(depths: dict[int, list[SegmentReport]]) -> str:
    """The whole graph in a row: a box for each segment, as wide as it has nodes, and a diamond for what follows."""
    most = max((max(s.nodes for s in segments) for segments in depths.values()), default=0)
    parts, x = [], 10
    for depth, segments in depths.items():
        nodes = max(s.nodes for s in segments)
        width = 90 + round(150 * nodes / max(most, 1))
        centre = x + width / 2
        parts.append(
            f'<a href="#segment-{depth}"><rect class="box" x="{x}" y="12" width="{width}" height="56" rx="8"/>'
            f'<text x="{centre}" y="37">Segment {depth}</text>'
            f'<text class="small" x="{centre}" y="55">{_text(count(nodes, "node"))}</text></a>'
        )
        x += width
        breaks = Explanation(tuple(segments)).breaks
        if breaks:
            operators = Counter(b.operator.rpartition("::")[2] for b in breaks)
            label = ", ".join(name if n == 1 else f"{n} {name}" for name, n in operators.most_common(2))
            label += ", ..." if len(operators) > 2 else ""
            gap = max(70, 8 * len(label))
            middle = x + gap / 2
            is_last = depth == max(depths)
            parts.append(
                f'<path class="edge" d="M{x} 40 H{middle if is_last else x + gap}"/><a href="#breaks-{depth}">'
                f'<path class="gap" d="M{middle - 13} 40 L{middle} 27 L{middle + 13} 40 L{middle} 53 Z"/>'
                f'<text class="small" x="{middle}" y="44">{len(breaks)}</text>'
                f'<text class="small" x="{middle}" y="78">{_text(label)}</text></a>'
            )
            x += gap
    opening = f'<svg width="{x + 10}" height="86" role="img" aria-label="Segments and breaks">'
    return f'<div class="map">{opening}{"".join(parts)}</svg></div>'


def _depth(depth: int, segments: Sequence[SegmentReport], colours: dict[str, int], depths: int) -> str:
    """What runs at one depth: the signatures of the same nodes in one box, and what follows these."""
    same: dict[object, list[SegmentReport]] = {}
    for segment in segments:
        same.setdefault((tuple(segment.operators.items()), segment.breaks, segment.results), []).append(segment)
    boxes = [_segment(depth, group, colours) for group in same.values()]
    breaks = Explanation(tuple(segments)).breaks
    largest = sorted((cut for segment in segments for cut in segment.cuts), key=lambda cut: cut.bound)
    cuts = list({cut.value: cut for cut in largest}.values())
    between = [_break(b) for b in breaks]
    if cuts:
        between.append(_cuts(cuts, segments))
    handed_on = max(segment.handed_on for segment in segments)
    if depth + 1 < depths and handed_on:
        between.append(f'<p class="soft">{count(handed_on, "array")} handed on to later segments, on the device</p>')
    after = f'<div class="between" id="breaks-{depth}">{"".join(between)}</div>' if between else ""
    return f'<section id="segment-{depth}">{"".join(boxes)}</section>{after}'


def _segment(depth: int, group: Sequence[SegmentReport], colours: dict[str, int]) -> str:
    first = group[0]
    bar = "".join(
        f'<span class="c{colours[name]}" style="flex-grow:{len(nodes)}" title="{_text(name)} {len(nodes)}"></span>'
        for name, nodes in first.operators.items()
    )
    operators = "".join(
        f'<details><summary><span class="swatch c{colours[name]}"></span><b>{_text(name)}</b> {len(nodes):,}</summary>'
        f"<ul>{''.join(f'<li><code>{_text(node)}</code></li>' for node in nodes)}</ul></details>"
        for name, nodes in first.operators.items()
    )
    results = ", ".join(f"<code>{_text(name)}</code>" for name in first.results)
    rows = "".join(_row(segment) for segment in group)
    return (
        f'<div class="segment"><div class="head"><h2>Segment {depth}</h2><span class="soft">'
        f"{count(first.nodes, 'node')}{f', computes {results}' if results else ''}</span></div>"
        f'<div class="bar">{bar}</div><div class="operators">{operators}</div><div class="table"><table><thead><tr>'
        "<th>Signature</th><th>calls</th><th>in all</th><th>each</th><th>traced in</th><th>compiled in</th>"
        f"</tr></thead><tbody>{rows}</tbody></table></div></div>"
    )


def _row(s: SegmentReport) -> str:
    each = spell_seconds(s.seconds / s.calls) if s.calls else "-"
    cells = (s.calls, spell_seconds(s.seconds), each, spell_seconds(s.trace_seconds), spell_seconds(s.compile_seconds))
    short, whole = brief(s.signature), f"<code>{_text(s.signature)}</code>"
    if short != s.signature:
        whole = f"<details><summary><code>{_text(short)}</code></summary>{whole}</details>"
    return f"<tr><td>{whole}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _break(b: BreakReport) -> str:
    decided = ", ".join(f"<code>{_text(name)}</code>" for name in b.inputs)
    return (
        f'<div class="break"><h3>Break at <code>{_text(b.node)}</code> ({_text(b.operator)})</h3>'
        f"<p>{f'{_text(b.within)} in it ' if b.within else 'It '}{_text(b.what)}.</p>{_chain(b.origin)}"
        + (f'<p class="soft">Decided by the inputs {decided}</p>' if len(b.inputs) > 1 else "")
        + f"<p>{_text(_sentence(cost(b.runs, b.seconds, b.host_bytes)))}</p>"
        f"<p><b>To remove it:</b> {_text(b.advice)}</p></div>"
    )


def _cuts(cuts: Sequence[CutReport], segments: Sequence[SegmentReport]) -> str:
    runs = sum(s.cut_runs for s in segments)
    took = cost(runs, sum(s.cut_seconds for s in segments), sum(s.cut_bytes for s in segments))
    items = "".join(
        f"<p><code>{_text(cut.value)}</code>, at most {cut.bound:,} along one axis</p>{_chain(cut.origin)}"
        for cut in cuts
    )
    return (
        f'<div class="cut"><h3>Cut after the segment: {count(len(cuts), "value")}</h3>'
        f"<p>Only the run knows how long they are. {_text(_sentence(took))}</p>{items}</div>"
    )


def _chain(origin: Sequence[str]) -> str:
    """From the input to the operand; all of a long chain unfolds."""
    short = shortened(origin)
    drawn = _steps(short)
    if len(short) == len(origin):
        return drawn
    return f"{drawn}<details><summary>All {len(origin)} values</summary>{_steps(origin)}</details>"


def _steps(chain: Sequence[str]) -> str:
    return f'<ol class="chain">{"".join(f"<li><code>{_text(step)}</code></li>" for step in reversed(chain))}</ol>'


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _text(text: str) -> str:
    """Text that HTML shows as it is."""
    return escape(printable(text))


def _colours(explanation: Explanation) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for segment in explanation.segments:
        for name, nodes in segment.operators.items():
            totals[name] = max(totals[name], len(nodes))
    return {name: min(rank, _COLOURS) for rank, (name, _) in enumerate(totals.most_common())}


def _palette() -> str:
    hues = [212, 28, 150, 340, 265, 55, 185, 100, 305]
    own = "".join(f".c{i} {{ background: hsl({hue} 55% var(--tint)); }}\n" for i, hue in enumerate(hues))
    return f"{own}.c{_COLOURS} {{ background: var(--soft); }}\n"
