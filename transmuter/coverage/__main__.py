"""The command line of the coverage matrix: `python -m transmuter.coverage`."""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NoReturn

import numpy as np

from transmuter.coverage import catalogue, divergence, printing, running, selection, sources
from transmuter.coverage import inputs as made_inputs
from transmuter.coverage.catalogue import Entry
from transmuter.coverage.running import Limits, Results
from transmuter.errors import CoverageError, TransmuterError

_CACHE = "TRANSMUTER_COVERAGE_CACHE"
_GIB = 1 << 30


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"coverage: {message} ({self.prog} --help tells more)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        The exit status: 0, 1 if a model does not work or something broke, 2 after an error, which is told in one line.
    """
    parser = _Parser(prog="python -m transmuter.coverage", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (_add_select, _add_record, _add_run, _add_print, _add_diverge):
        add(commands)
    options = parser.parse_args(arguments)
    try:
        return options.do(options)
    except (TransmuterError, OSError) as error:
        print(f"coverage: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("coverage: interrupted; the same command goes on from here", file=sys.stderr)
        return 130


def _cache() -> Path:
    """Where downloads and references are kept."""
    named = os.environ.get(_CACHE)
    return (
        Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "transmuter/coverage"
    )


def _command(commands: argparse._SubParsersAction, name: str, about: str, do: Callable) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
    command.add_argument("--json", action="store_true", help="print JSON instead of text")
    command.set_defaults(do=do)
    return command


def _takes_models(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", nargs="*", help="names or patterns (bert*); none is all")
    command.add_argument("--models", type=Path, default=Path("coverage/models.toml"), help="the list of models")
    _takes_sources(command)


def _takes_sources(command: argparse.ArgumentParser) -> None:
    command.add_argument("--cache", type=Path, default=_cache(), help=f"downloads and references; or ${_CACHE}")
    command.add_argument("--local", type=Path, help="the folder that local:// paths start from")
    command.add_argument("--offline", action="store_true", help="use what was downloaded before")
    command.add_argument("--no-progress", dest="progress", action="store_false", default=None, help="show no bar")


def _takes_limits(command: argparse.ArgumentParser) -> None:
    command.add_argument("--seconds", type=float, default=600.0, help="time for one model (600)")
    command.add_argument("--memory", type=float, default=8.0, metavar="GIB", help="memory of one model's process (8)")
    command.add_argument("--jobs", type=int, default=1, help="models at a time (1)")
    command.add_argument("--again", action="store_true", help="also those that are done")


def _entries(options: argparse.Namespace) -> list[Entry]:
    """The entries that are asked for; local ones only where their folder is given."""
    entries = catalogue.read(options.models)
    if options.model:
        return _named(entries, options.model, options)
    if options.local is not None:
        return entries
    found = [entry for entry in entries if not entry.source.startswith("local://")]
    if left := len(entries) - len(found):
        print(f"coverage: {left} models lie in a local folder, which --local names; they are left out", file=sys.stderr)
    return found


def _named(entries: Sequence[Entry], patterns: Sequence[str], options: argparse.Namespace) -> list[Entry]:
    """The entries whose names fit a pattern.

    Raises:
        CoverageError: None fits one of them.
    """
    for pattern in patterns:
        if not any(fnmatchcase(entry.name, pattern) for entry in entries):
            near = difflib.get_close_matches(pattern, [entry.name for entry in entries], 1)
            advice = f"Is it {near[0]!r}?" if near else "Look for its name there."
            raise CoverageError(f"{options.models} has no model {pattern!r}. {advice}")
    return [entry for entry in entries if any(fnmatchcase(entry.name, pattern) for pattern in patterns)]


def _locate(options: argparse.Namespace) -> running.Locate:
    return functools.partial(
        sources.locate,
        cache=options.cache / "downloads",
        local=options.local,
        offline=options.offline,
        progress=options.progress,
    )


# ---- select --------------------------------------------------------------------------------------------------------


def _add_select(commands: argparse._SubParsersAction) -> None:
    command = _command(commands, "select", "find models, and add those that are new to the list", _select)
    command.add_argument("--models", type=Path, default=Path("coverage/models.toml"), help="the list to add to")
    command.add_argument("--task", nargs="+", default=[], help="of the Hub: take its most downloaded ONNX repositories")
    command.add_argument("--most", type=int, default=5, help="how many of each task (5)")
    command.add_argument("--folder", nargs="+", type=Path, default=[], help="folders of repositories")
    command.add_argument("--package", nargs="+", default=[], help="Python packages, as name==version")
    command.add_argument(
        "--case", nargs="+", default=[], help="patterns of cases of ONNX's backend suite (test_conv_*)"
    )
    _takes_sources(command)


def _select(options: argparse.Namespace) -> int:
    found = selection.select(
        options.models,
        tasks=options.task,
        most=options.most,
        folders=options.folder,
        local=options.local,
        packages=options.package,
        cases=options.case,
        cache=options.cache / "downloads",
        offline=options.offline,
        progress=options.progress,
    )
    names = [entry.name for entry in found.added]
    if options.json:
        print(json.dumps({"added": names, "known": found.known}))
    else:
        print("\n".join([*names, f"{len(names)} models added to {options.models}; {found.known} were there"]))
    return 0


# ---- record, run ---------------------------------------------------------------------------------------------------


def _add_record(commands: argparse._SubParsersAction) -> None:
    command = _command(commands, "record", "record ONNX Runtime's outputs for made-up inputs", _record)
    _takes_models(command)
    _takes_limits(command)


def _record(options: argparse.Namespace) -> int:
    entries = _entries(options)
    failures = running.record(
        entries,
        _locate(options),
        options.cache / "references",
        limits=_limits(options),
        jobs=options.jobs,
        again=options.again,
        progress=options.progress,
    )
    if options.json:
        print(json.dumps({"recorded": len(entries) - len(failures), "failures": failures}, indent=1))
    else:
        for name, why in failures.items():
            print(f"{name}: {why}")
        print(f"{len(entries) - len(failures)} of {len(entries)} models are recorded in {options.cache / 'references'}")
    return int(bool(failures))


def _limits(options: argparse.Namespace) -> Limits:
    if options.seconds <= 0 or options.memory <= 0 or options.jobs < 1:
        raise CoverageError("--seconds, --memory and --jobs must be positive. Leave them out for the defaults.")
    return Limits(options.seconds, int(options.memory * _GIB))


def _add_run(commands: argparse._SubParsersAction) -> None:
    command = _command(commands, "run", "run the models, eager and compiled, and compare with the references", _run)
    _takes_models(command)
    _takes_limits(command)
    command.add_argument("--results", type=Path, default=Path("coverage/results.json"), help="where rows are kept")
    command.add_argument(
        "--compute-type",
        choices=("float32", "own"),
        default="float32",
        help="compute half precision in float32 (the default), or as the graph says",
    )


def _run(options: argparse.Namespace) -> int:
    compute_type = None if options.compute_type == "own" else options.compute_type
    entries = _entries(options)
    is_whole = not options.model and options.local is not None
    results = Results.at(options.results, compute_type=compute_type, is_new=options.again and is_whole)
    if options.again:
        for entry in entries:
            results.rows.pop(entry.name, None)
    running.run(
        entries,
        _locate(options),
        options.cache / "references",
        results,
        limits=_limits(options),
        compute_type=compute_type,
        jobs=options.jobs,
        progress=options.progress,
    )
    return _shown(results, options)


def _shown(results: Results, options: argparse.Namespace) -> int:
    rows = printing.ordered(results)
    if options.json:
        print(json.dumps({"about": results.about, "models": rows}, indent=1, default=str))
    else:
        print(printing.table(results))
    return int(not all(printing.is_good(row) for row in rows))


# ---- print ---------------------------------------------------------------------------------------------------------


def _add_print(commands: argparse._SubParsersAction) -> None:
    command = _command(commands, "print", "show the matrix, or compare two runs", _print)
    command.add_argument("results", type=Path, nargs="?", default=Path("coverage/results.json"), help="of `run`")
    command.add_argument("--markdown", type=Path, metavar="FILE", help="write a Markdown page")
    command.add_argument("--html", type=Path, metavar="FILE", help="write an HTML page that stands by itself")
    command.add_argument("--against", type=Path, metavar="RESULTS", help="tell what changed since these results")


def _print(options: argparse.Namespace) -> int:
    results = running.read(options.results)
    if options.against is not None:
        report, is_good = printing.compared(running.read(options.against), results)
        print(json.dumps({"report": report.splitlines(), "broke": not is_good}) if options.json else report)
        return int(not is_good)
    if options.markdown is not None:
        options.markdown.write_text(printing.markdown(results))
    if options.html is not None:
        from transmuter.coverage.page import page

        options.html.write_text(page(results))
    if options.markdown is None and options.html is None:
        return _shown(results, options)
    print(printing.summary(results))
    return 0


# ---- diverge -------------------------------------------------------------------------------------------------------


def _add_diverge(commands: argparse._SubParsersAction) -> None:
    command = _command(commands, "diverge", "find the first node whose output differs from ONNX Runtime's", _diverge)
    command.add_argument("model", help="a name in the list, or an ONNX file")
    command.add_argument("--case", type=int, default=0, help="which of its recorded shapes (0)")
    command.add_argument("--inputs", type=Path, metavar="FILE.npz", help="inputs by name, instead of made-up ones")
    command.add_argument("--write", type=Path, metavar="FOLDER", help="write the node with its inputs as a model there")
    command.add_argument("--chunk", type=float, default=128.0, metavar="MIB", help="values to hold at a time (128)")
    command.add_argument("--compute-type", choices=("float32", "own"), default="float32", help="as for `run`")
    command.add_argument("--models", type=Path, default=Path("coverage/models.toml"), help="the list of models")
    _takes_sources(command)


def _diverge(options: argparse.Namespace) -> int:
    path, entry = Path(options.model), None
    if path.suffix != ".onnx":
        [entry] = _named(catalogue.read(options.models), [options.model], options)[:1]
        path = _locate(options)(entry)
    given = entry or Entry(re.sub(r"[^A-Za-z0-9._-]", "-", path.stem) or "model", str(path))
    if options.inputs is not None:
        with np.load(options.inputs, allow_pickle=False) as arrays:
            inputs = dict(arrays)
    else:
        inputs = made_inputs.of_case(path, given, options.case)
    found = divergence.diverge(
        path,
        inputs,
        compute_type=None if options.compute_type == "own" else options.compute_type,
        absolute=given.absolute,
        relative=given.relative,
        chunk_bytes=int(options.chunk * (1 << 20)),
        progress=options.progress,
    )
    print(json.dumps(found.to_json(), indent=1) if options.json else found)
    if options.write is not None:
        found.write(options.write)
        print(f"written to {options.write}", file=sys.stderr)
    return int(found.found is not None)


if __name__ == "__main__":
    sys.exit(main())
