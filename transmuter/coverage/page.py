"""The matrix as one HTML page that stands by itself: a table to filter and sort, and a part for each model."""

from __future__ import annotations

from html import escape

from transmuter.coverage.printing import COLUMNS, ordered, summary, totals
from transmuter.coverage.running import Results, Row
from transmuter.coverage.verdicts import Verdict

_STYLE = """
:root { color-scheme: light dark; --ground: #f6f7f9; --card: #fff; --text: #1b2330; --soft: #5c6779; --line: #d5dae2;
  --good: #14713b; --odd: #8a5a00; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ground: #12161d; --card: #1b212b; --text: #e6eaf0; --soft: #9aa6b8;
  --line: #343d4b; --good: #6fcf97; --odd: #f0b95c; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 90rem; padding: 1.5rem; background: var(--ground); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; }
.soft { color: var(--soft); }
.tools { display: flex; flex-wrap: wrap; gap: .6rem; margin: 1rem 0; align-items: center; }
input, select { font: inherit; padding: .35rem .6rem; border: 1px solid var(--line); border-radius: .4rem;
  background: var(--card); color: inherit; }
input { min-width: 18rem; }
.wide { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: .6rem; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:nth-child(-n+4), td:nth-child(-n+4) { text-align: left; }
th { position: sticky; top: 0; background: var(--card); }
th button { all: unset; cursor: pointer; font-weight: 600; } th button:focus-visible { outline: 2px solid; }
th[aria-sort=ascending] button::after { content: " ▲"; } th[aria-sort=descending] button::after { content: " ▼"; }
.good { color: var(--good); } .odd { color: var(--odd); } .bad { color: var(--bad); }
a { color: inherit; }
details { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .9rem;
  margin-top: .5rem; }
summary { cursor: pointer; overflow-wrap: anywhere; } details p, details li { overflow-wrap: anywhere; }
code { font: .88em ui-monospace, monospace; }
.groups { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 1rem; align-items: start; }
"""
_SCRIPT = """
const body = document.querySelector('#matrix tbody'), rows = [...body.rows];
const text = document.querySelector('#text'), verdict = document.querySelector('#verdict');
function filter() {
  const words = text.value.toLowerCase().split(/\\s+/).filter(Boolean);
  let shown = 0;
  for (const row of rows) {
    const all = row.textContent.toLowerCase();
    row.hidden = !(words.every(w => all.includes(w)) && (!verdict.value || row.dataset.verdict === verdict.value));
    shown += !row.hidden;
  }
  document.querySelector('#shown').textContent = shown + ' of ' + rows.length + ' shown';
}
text.addEventListener('input', filter);
verdict.addEventListener('change', filter);
document.querySelectorAll('#matrix th').forEach((head, i) => head.firstChild.addEventListener('click', () => {
  const up = head.getAttribute('aria-sort') !== 'ascending';
  document.querySelectorAll('#matrix th').forEach(h => h.removeAttribute('aria-sort'));
  head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
  const key = row => row.cells[i].textContent.trim();
  rows.sort((a, b) => {
    const x = parseFloat(key(a)), y = parseFloat(key(b));
    if (isNaN(x) !== isNaN(y)) return isNaN(x) - isNaN(y);
    const order = isNaN(x) ? key(a).localeCompare(key(b)) : x - y;
    return up ? order : -order;
  });
  body.append(...rows);
}));
addEventListener('hashchange', () => { const d = document.querySelector(location.hash); if (d) d.open = true; });
filter();
"""


def page(results: Results) -> str:
    """The page. Every text in it is escaped; it loads nothing from elsewhere."""
    rows = ordered(results)
    numbers = {row["name"]: i for i, row in enumerate(rows)}
    options = "".join(f"<option>{verdict}</option>" for verdict in totals(rows).get("all", {}))
    about = ", ".join(f"{key} {value}" for key, value in results.about.items())
    heads = "".join(f'<th scope="col"><button type="button">{escape(title)}</button></th>' for title in COLUMNS)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Coverage matrix</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f'<h1>Coverage matrix</h1>\n<p>{escape(summary(results))}</p>\n<p class="soft">{escape(about)}</p>\n'
        '<div class="tools"><input id="text" type="search" placeholder="filter: names, tasks, verdicts" '
        'aria-label="filter">'
        f'<select id="verdict" aria-label="verdict"><option value="">every verdict</option>{options}</select>'
        '<span id="shown" class="soft"></span></div>\n'
        f'<div class="wide"><table id="matrix"><thead><tr>{heads}</tr></thead>\n<tbody>\n'
        + "\n".join(_line(row, numbers[row["name"]]) for row in rows)
        + "\n</tbody></table></div>\n"
        + _groups(rows)
        + "<h2>Models</h2>\n"
        + "\n".join(_details(row, numbers[row["name"]]) for row in rows)
        + f"\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def _class(verdict: str) -> str:
    return {Verdict.MATCH: "good", Verdict.NOISE: "odd"}.get(Verdict(verdict), "bad")


def _line(row: Row, number: int) -> str:
    cells = [escape(show(row)) for show in COLUMNS.values()]
    cells[0] = f'<a href="#m{number}">{cells[0]}</a>'
    places = list(COLUMNS)
    marked = [
        f'<td class="{_class(row["verdict"])}">{cell}</td>' if title == "verdict" else f"<td>{cell}</td>"
        for title, cell in zip(places, cells, strict=True)
    ]
    return f'<tr data-verdict="{escape(row["verdict"])}">{"".join(marked)}</tr>'


def _groups(rows: list[Row]) -> str:
    parts = []
    for key in ("task", "architecture"):
        lines = []
        for group, counts in totals(rows, key).items():
            told = ", ".join(f'<span class="{_class(v)}">{n} {v}</span>' for v, n in counts.items())
            lines.append(f"<tr><td>{escape(group)}</td><td>{told}</td></tr>")
        head = f'<thead><tr><th scope="col">{key}</th><th scope="col">models</th></tr></thead>'
        parts.append(f'<div class="wide"><table>{head}<tbody>{"".join(lines)}</tbody></table></div>')
    return f'<h2>Totals</h2>\n<div class="groups">{"".join(parts)}</div>\n'


def _details(row: Row, number: int) -> str:
    """What there is to say of one model."""
    parts = [f"<p><code>{escape(row.get('source', ''))}</code> {escape(row.get('license', ''))}</p>"]
    parts += [f"<p>{escape(text)}</p>" for text in (row.get("reason", ""), row["why"]) if text]
    if row.get("gradient"):
        parts.append(f"<p>Gradient by the params: {escape(row['gradient'])}</p>")
    if row.get("breaks"):
        parts.append(f"<p>Graph breaks:</p><ul>{''.join(map(_break, row['breaks']))}</ul>")
    if row.get("operators"):
        parts.append(f"<p>Operators: {escape(', '.join(f'{k} {v}' for k, v in row['operators'].items()))}</p>")
    if cases := _cases(row):
        parts.append(f'<div class="wide"><table>{cases}</table></div>')
    title = f'{escape(row["name"])} <span class="{_class(row["verdict"])}">{escape(row["verdict"])}</span>'
    return f'<details id="m{number}"><summary>{title}</summary>{"".join(parts)}</details>'


def _break(told: dict[str, str]) -> str:
    node, operator, what, advice = (escape(told[key]) for key in ("node", "operator", "what", "advice"))
    return f"<li><code>{node}</code> ({operator}) {what} {advice}</li>"


def _cases(row: Row) -> str:
    lines = [
        f"<tr><td>{mode}, shape {i}</td><td>{escape(case['verdict'])}</td>"
        f"<td>{case['absolute']:.2g}</td><td>{case['relative']:.2g}</td><td>{case['rms']:.2g}</td></tr>"
        for mode in ("eager", "compiled")
        for i, case in enumerate(row.get(mode, ()))
    ]
    head = "<tr><th>case</th><th>verdict</th><th>absolute</th><th>relative</th><th>rms</th></tr>"
    return head + "".join(lines) if lines else ""
