"""The options that all tasks on text share, and how a task function opens a repository with them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from transmuter.errors import ModelError
from transmuter.model import Model
from transmuter.serving.batching import TokenBatches, positive_sizes, quantizes_dynamically
from transmuter.serving.runtime import Serving, Task
from transmuter.serving.worker import Batches

if TYPE_CHECKING:
    from transmuter.serving.repository import Repository
    from transmuter.serving.tokenizer import Tokenizer

SEQUENCE_LENGTHS = (32, 128, 512)


class Options(TypedDict, total=False):
    """Options of every task on text.

    Attributes:
        batch_size: How many rows run at once at most (1). Batches are compiled for that number, a quarter of it, a
            sixteenth, and so on to 1; several numbers are taken as they are.
        sequence_length: The length, or lengths, that rows of tokens are padded to: (32, 128, 512), as far as the model
            goes. Longer texts are truncated. None pads nothing, and compiles each length when it first comes: so it is
            by default for graphs that quantise while they run, whose results padding would move.
        variant: Which of the repository's ONNX files: `"fp32"`, `"fp16"`, `"q8"`, `"q4"` and so on.
        revision: Branch, tag or commit of a Hub repository.
        cache_dir: Where downloads are kept; None is the Hub's own cache.
        offline: Only take what has been downloaded.
        compute_type: As in `transmuter.load`.
        model: A `transmuter.Model` to take instead of the repository's ONNX file.
        tokenizer: A `Tokenizer` to take instead of the repository's.
        batch_timeout: How many seconds a batch of a started serving waits for further rows (0.002).
        max_queue: How many rows may wait in a started serving (1024).
    """

    batch_size: int | Sequence[int]
    sequence_length: int | Sequence[int] | None
    variant: str | None
    revision: str | None
    cache_dir: str | os.PathLike[str] | None
    offline: bool
    compute_type: str | None
    model: Model | None
    tokenizer: Tokenizer | None
    batch_timeout: float
    max_queue: int


class Opened(NamedTuple):
    """A repository, and what a task on text takes from it."""

    repository: Repository
    model: Model
    tokenizer: Tokenizer


def open_text(source: str | os.PathLike[str] | Repository, options: Options, variant: str = "fp32") -> Opened:
    """Opens a repository and loads its model and tokenizer.

    Args:
        source: A folder, the name of a Hub repository, or one that is open.
        options: Those of the task function.
        variant: The task's default.

    Raises:
        HubError: A file could not be had.
        ModelError: The repository's content is unusable.
        TypeError: There is no such option.
    """
    from transmuter.serving.repository import Repository
    from transmuter.serving.tokenizer import Tokenizer
    from transmuter.serving.vocabulary import embedding_rows

    unknown = sorted(options.keys() - Options.__annotations__.keys())
    if unknown:
        known = ", ".join(Options.__annotations__)
        raise TypeError(f"There is no option {unknown[0]!r}. Those of every task are {known}.")
    where = {name: options[name] for name in ("revision", "cache_dir", "offline") if name in options}
    repository = Repository.open(source, **where)
    tokenizer = options.get("tokenizer") or Tokenizer.load(repository)
    model = options.get("model")
    if model is None:
        kind = {"compute_type": options["compute_type"]} if "compute_type" in options else {}
        model = repository.model(variant=options.get("variant"), default=variant, **kind)
    return Opened(repository, model, tokenizer.fitted(embedding_rows(model)))


def limit_of(opened: Opened) -> int | None:
    """The most tokens that the model takes; None if neither tokenizer nor configuration limits them."""
    declared = opened.repository.config.get("max_position_embeddings")
    if declared is not None and (not isinstance(declared, int) or isinstance(declared, bool) or declared < 1):
        raise ModelError(
            f"max_position_embeddings in config.json is {declared!r}, but must be a positive number. Correct it there."
        )
    limits = [limit for limit in (declared, opened.tokenizer.max_length) if limit is not None]
    return min(limits) if limits else None


def padded_lengths(
    model: Model, options: Options, default: Sequence[int], limit: int | None
) -> tuple[tuple[int, ...] | None, int | None]:
    """The lengths that rows are padded to, None if they are not, and the most tokens of a row, None without a limit.

    Args:
        model: Whose rows.
        options: Those of the task function.
        default: The task's own lengths.
        limit: The most tokens that the model takes.

    Raises:
        ValueError: `sequence_length` is neither a positive number nor some of them.
    """
    lengths = options.get("sequence_length", None if quantizes_dynamically(model) else default)
    if lengths is None:
        return None, max(default) if limit is None else limit
    lengths = positive_sizes("sequence_length", lengths)
    return lengths if limit is None else tuple(min(length, limit) for length in lengths), limit


def token_batches(
    opened: Opened,
    options: Options,
    *,
    sequence_lengths: Sequence[int] = SEQUENCE_LENGTHS,
    max_length: int | None = None,
    outputs: Sequence[str] | None = None,
    pad_values: Mapping[str, int | float] | None = None,
) -> TokenBatches:
    """`TokenBatches` of the options.

    Args:
        opened: From `open_text`.
        options: Those of the task function.
        sequence_lengths: The task's default.
        max_length: The most tokens of a row, where that is less than the model's limit.
        outputs: Which outputs, or internal values, the task needs; None is all.
        pad_values: By input, besides that of `input_ids`, which is the tokenizer's.
    """
    limits = [limit for limit in (max_length, limit_of(opened)) if limit is not None]
    lengths, limit = padded_lengths(opened.model, options, sequence_lengths, min(limits, default=None))
    return TokenBatches(
        opened.model,
        batch_size=options.get("batch_size", 1),
        sequence_lengths=lengths,
        pad_values={"input_ids": opened.tokenizer.pad_id, **(pad_values or {})},
        outputs=outputs,
        max_length=limit,
    )


def served(task: Task, batches: Batches, options: Options, *, name: str) -> Serving:
    """A `Serving` of the options."""
    wanted = {key: options[key] for key in ("batch_timeout", "max_queue") if key in options}
    return Serving(task, batches, name=name, **wanted)


__all__ = [
    "SEQUENCE_LENGTHS",
    "Opened",
    "Options",
    "limit_of",
    "open_text",
    "padded_lengths",
    "served",
    "token_batches",
]
