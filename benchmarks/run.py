"""Runs every benchmark, each in a process of its own, and says which bars are missed.

    python benchmarks/run.py --json results.json

Exits with 1 where a bar is missed. Run it on an idle machine; it takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPTS = ("inference", "start", "memory", "calls")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=SCRIPTS, nargs="+", default=SCRIPTS, help="run these alone")
    parser.add_argument("--json", metavar="FILE", help="also write all rows to this file")
    arguments = parser.parse_args()
    rows, failed = [], []
    with tempfile.TemporaryDirectory() as folder:
        for script in arguments.only:
            print(f"\n== {script}", flush=True)
            path = Path(folder, f"{script}.json")
            done = subprocess.run(
                [sys.executable, Path(__file__).with_name(f"{script}.py"), "--json", path], check=False
            )
            if not path.exists():
                failed.append(f"{script} (exit status {done.returncode})")
                continue
            rows += [{"benchmark": script, **row} for row in json.loads(path.read_text())]
    failed += [f"{row['benchmark']}: {row['name']}" for row in rows if row["misses"]]
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=2) + "\n")
    barred = sum(row["must"] is not None for row in rows)
    print(f"\n{barred} bars; missed: {', '.join(failed) or 'none'}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
