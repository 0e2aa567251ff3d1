"""Processes that work in turns, so that whatever else the machine does disturbs all of them alike."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Self


class Process:
    """A process that does its work once for each line that it reads, and writes what that took as JSON. Use it as a
    context.

    Attributes:
        rounds: What it wrote of each round.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str] | None = None):
        """
        Args:
            arguments: Of Python.
            environment: The whole one; None is that of this process.
        """
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=environment,
        )
        self.rounds: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.communicate()  # closes its input, which ends it

    def work(self) -> None:
        """Has it work once, and waits for that."""
        process = self._process
        with suppress(BrokenPipeError):  # it has ended, as its empty line tells
            process.stdin.write("\n")
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(process.args)} ended with status {process.wait()}")
        self.rounds.append(json.loads(line))
