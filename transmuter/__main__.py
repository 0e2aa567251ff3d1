"""The command line: `transmuter` or `python -m transmuter`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import transmuter


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status (2 where a model could not be read)."""
    parser = argparse.ArgumentParser(prog="transmuter", description="Runs ONNX models as JAX functions.")
    parser.add_argument("--version", action="version", version=f"transmuter {transmuter.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="show a model's inputs, outputs, operators and weights")
    inspect.add_argument("file", help="an ONNX file, or hf://org/repo[@revision]/path.onnx")
    options = parser.parse_args(arguments)
    try:
        print(transmuter.load(options.file))
    except transmuter.TransmuterError as error:
        print(f"transmuter: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
