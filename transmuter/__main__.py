"""The command line: `transmuter` or `python -m transmuter`."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

import transmuter

_FILE = "an ONNX file, or hf://org/repo[@revision]/path.onnx"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"transmuter: {message} ({self.prog} --help tells more)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, or 2 after an error, which is told in one line."""
    parser = _Parser(prog="transmuter", description="Runs ONNX models as JAX functions.")
    parser.add_argument("--version", action="version", version=f"transmuter {transmuter.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_inspect(commands)
    _add_explain(commands)
    _add_task(commands)
    options = parser.parse_args(arguments)
    try:
        result = options.run(options)
        for line in result if isinstance(result, Iterator) else (result,):
            print(line, flush=True)
    except BrokenPipeError:  # whoever reads has had enough, as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor does the end of the process write there
        return 0
    except (transmuter.TransmuterError, OSError, ValueError) as error:
        print(f"transmuter: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return 2
    return 0


def _add_inspect(commands: Any) -> None:
    about = "show a model's inputs, outputs, operators and weights"
    command = commands.add_parser("inspect", help=about, description=f"{about.capitalize()}.")
    command.add_argument("file", help=_FILE)
    command.set_defaults(run=lambda options: transmuter.load(options.file))


def _add_task(commands: Any) -> None:
    about = "run a task on texts, as text-embedding or question-answering"
    # nothing is an option here, so that all goes on to the task's own parser
    command = commands.add_parser("task", help=about, add_help=False, prefix_chars="\0")
    command.add_argument("arguments", nargs=argparse.REMAINDER)
    command.set_defaults(run=_task)


def _task(options: argparse.Namespace) -> Iterator[str]:
    from transmuter.serving import command  # which imports every task, to read their options

    return command.run(options.arguments, _Parser)


# ---- explain -------------------------------------------------------------------------------------------------------


def _add_explain(commands: Any) -> None:
    about = "compile and run a model, and tell its segments and graph breaks"
    command = commands.add_parser(
        "explain",
        help=about,
        description=f"{about.capitalize()}. Inputs that are not given are made up: floats from -1 to 1, integers of 1, "
        "true booleans, strings 'a'.",
    )
    command.add_argument("file", help=_FILE)
    command.add_argument(
        "--inputs",
        nargs="+",
        default=[],
        metavar="GIVEN",
        help="inputs.npz with arrays by input name; NAME=SHAPE, such as input_ids=1x32, for an input (NAME=, with "
        "nothing after it, for a scalar); SYMBOL=SIZE, such as sequence=32, for a symbolic dimension",
    )
    command.add_argument("--size", type=int, default=8, help="the size of other free dimensions (8)")
    command.add_argument("--calls", type=int, default=3, help="how often to run it (3); the first call compiles")
    command.add_argument("--static", nargs="+", default=[], metavar="NAME", help="inputs whose contents are fixed")
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    command.add_argument("--html", type=Path, metavar="OUT.html", help="write the report as a page that stands alone")
    command.set_defaults(run=_explain)


def _explain(options: argparse.Namespace) -> str:
    """The report on a file, as text or JSON."""
    model = transmuter.load(options.file)
    inputs = _inputs(model, options.inputs, options.size)
    compiled = transmuter.compile(model, static_inputs=options.static)
    for _ in range(max(options.calls, 1)):
        compiled(inputs)
    explanation = compiled.explain()
    if options.html is not None:
        options.html.write_text(explanation.html(), encoding="utf-8")
    return json.dumps(explanation.as_dict(), indent=2) if options.json else str(explanation)


def _inputs(model: transmuter.Model, given: Sequence[str], size: int) -> dict[str, Any]:
    """A model's inputs, from what `--inputs` gives and made up for the rest."""
    specs = {**model.inputs, **model.overridable_inputs}
    symbols = {d for spec in specs.values() for d in spec.shape or () if isinstance(d, str)}
    arrays: dict[str, Any] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    sizes: dict[str, int] = {}
    for item in given:
        name, equals, text = item.rpartition("=")
        if not equals:
            arrays.update(_read(item))
        elif not re.fullmatch(r"(\d+(x\d+)*)?", text):
            raise ValueError(f"{item!r} gives no shape. Write {name}=1x32, or {name}= for a scalar.")
        elif name in specs:
            shapes[name] = tuple(map(int, text.split("x"))) if text else ()
        elif name in symbols and text.isdecimal():
            sizes[name] = int(text)
        else:
            known = ", ".join(map(str, specs.values()))
            raise ValueError(f"There is no input and no symbolic dimension {name!r}. The model takes {known}.")
    for name, spec in model.inputs.items():
        if name not in arrays and not spec.kind.startswith("optional"):
            arrays[name] = _made_up(spec, shapes.get(name), sizes, size)
    arrays.update(
        {name: _made_up(specs[name], shape, sizes, size) for name, shape in shapes.items() if name not in arrays}
    )
    return arrays


def _read(path: str) -> Mapping[str, np.ndarray]:
    """The arrays of an .npz file."""
    try:
        held = np.load(path)
        if not isinstance(held, np.lib.npyio.NpzFile):
            raise ValueError("it holds one array without a name")
        with held:
            return dict(held)
    except (ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path!r} cannot be read as .npz: {error}. Give such a file, or NAME=SHAPE.") from error


def _made_up(spec: Any, shape: tuple[int, ...] | None, sizes: Mapping[str, int], size: int) -> Any:
    """Something that an input accepts."""
    if spec.kind != "tensor":
        raise ValueError(
            f"The input {spec} is no tensor. Call the compiled model from Python, and print its explain()."
        )
    if shape is None:
        if spec.shape is None:
            raise ValueError(f"The input {spec} has no shape in the file. Give one: --inputs {spec.name}=1x32.")
        shape = tuple(d if isinstance(d, int) else sizes.get(d, size) for d in spec.shape)
    if spec.dtype == object:
        return np.full(shape, "a", object)
    if spec.dtype.kind in "iub":
        return np.ones(shape, spec.dtype)
    return np.linspace(-1, 1, math.prod(shape)).astype(spec.dtype).reshape(shape)


if __name__ == "__main__":
    sys.exit(main())
