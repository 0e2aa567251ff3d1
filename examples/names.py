"""First names and surnames that the package arabic-name-romanizer ships: data for two examples."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import arabic_name_romanizer
import numpy as np

RESOURCES = Path(arabic_name_romanizer.__file__).parent / "resources"
"""The package's ONNX files, its alphabet, and its database of names."""

Batch = dict[str, np.ndarray]


def select(query: str) -> list[tuple[Any, ...]]:
    """Rows of the table `units` of single names: `arabic_key`, `latin`, `country`, `count` (of people), ..."""
    with closing(sqlite3.connect(f"{(RESOURCES / 'names.sqlite3').as_uri()}?mode=ro", uri=True)) as database:
        return database.execute(query).fetchall()


def shuffled(rows: list[Any]) -> list[Any]:
    """Rows in an order that is random, but always the same."""
    return random.Random(0).sample(rows, len(rows))


def batches(rows: list[Any], size: int, as_batch: Callable[[list[Any]], Batch]) -> Callable[[int], Iterator[Batch]]:
    """What `train.fit` takes: a function of the epoch's number that gives its batches of so many rows, shuffled."""

    def of_epoch(epoch: int) -> Iterator[Batch]:
        order = random.Random(epoch).sample(rows, len(rows))
        for start in range(0, len(order) - size + 1, size):
            yield as_batch(order[start : start + size])

    return of_epoch
