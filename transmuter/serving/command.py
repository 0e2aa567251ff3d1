"""`transmuter task NAME REPO [TEXT ...]`: every task from the command line, one line of JSON for each result.

Options are those of the task's function: their names, kinds and descriptions are read off it.
"""

from __future__ import annotations

import argparse
import collections.abc
import inspect
import itertools
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from transmuter import serving
from transmuter.errors import InputError
from transmuter.serving import options as shared

_ABOUT = {
    "fill_mask": "A text with the tokenizer's mask token",
    "question_answering": "A question, and the context that has the answer",
    "text_classification": "A text",
    "text_embedding": "A text",
    "text_ranking": "A query, and the documents to rank",
    "token_classification": "A text",
    "zero_shot_classification": "A text (and --labels)",
    "zero_shot_entity_recognition": "A text (and --labels)",
}
"""What the texts of a command are; each is an input unless `_FIELDS` has the task."""
_FIELDS = {
    "question_answering": ("question", "context"),
    "text_ranking": ("query", "documents"),
}
"""The fields of inputs that are no text: all texts of a command are one of them."""
_SIMPLE = {int, float, bool, str, type(None)}


def run(arguments: Sequence[str], parser_class: type[argparse.ArgumentParser]) -> Iterator[str]:
    """Runs a task on the texts of a command, or of standard input.

    Args:
        arguments: What comes after `transmuter task`.
        parser_class: What tells of wrong arguments.

    Yields:
        A line of JSON for each input.

    Raises:
        TransmuterError: Whatever the task raises; an `InputError` of a malformed line.
    """
    names = [name.replace("_", "-") for name in serving.TASKS]
    first = parser_class(
        prog="transmuter task",
        description="Run a task on texts, or on the lines of standard input. transmuter task NAME --help tells its "
        f"options. Tasks: {', '.join(names)}.",
        usage="transmuter task NAME REPO [TEXT ...]",
    )
    first.add_argument("name", choices=names, metavar="NAME")
    if not arguments or arguments[0].startswith("-"):
        first.parse_args(list(arguments))
    name = first.parse_args(list(arguments[:1])).name.replace("-", "_")
    task = getattr(serving, name)
    parser = parser_class(
        prog=f"transmuter task {arguments[0]}",
        description=f"{inspect.getdoc(task).splitlines()[0]} Each result is a line of JSON.",
    )
    parser.add_argument("repository", metavar="REPO", help="a folder, or org/repo on the Hub")
    several = f"An object of JSON gives the fields: {', '.join(_FIELDS[name])}. " if name in _FIELDS else ""
    about = f"{_ABOUT[name]}. {several}Without any, each line of standard input is an input."
    parser.add_argument("texts", metavar="TEXT", nargs="*", help=about)
    for option, kind, help in _options(task):
        _add_option(parser, option, kind, help)
    given = vars(parser.parse_intermixed_args(list(arguments[1:])))
    source, texts = given.pop("repository"), given.pop("texts")
    return _results(name, task(source, **given), texts)


def _results(name: str, run: Any, texts: Sequence[str]) -> Iterator[str]:
    if texts:
        inputs: Iterable[Any] = _of_texts(name, texts)
    else:
        inputs = (_of_line(name, line) for line in map(str.rstrip, sys.stdin or ()) if line)
    inputs = iter(inputs)
    # as many at once as the serving batches: a line that comes alone is not kept waiting for long
    while some := list(itertools.islice(inputs, run.batches.batch_size)):
        for result in run(some):
            yield json.dumps(result, ensure_ascii=False, default=_plain)


def _of_texts(name: str, texts: Sequence[str]) -> list[Any]:
    """The inputs that a command's texts are."""
    if name not in _FIELDS or all(text.lstrip().startswith("{") for text in texts):
        return [_of_line(name, text) for text in texts]
    if len(texts) < 2 or (name == "question_answering" and len(texts) != 2):
        raise InputError(f"{_ABOUT[name]}: {len(texts)} texts are given. Give both, or an object of JSON.")
    if name == "question_answering":
        return [dict(zip(_FIELDS[name], texts))]
    return [{"query": texts[0], "documents": list(texts[1:])}]


def _of_line(name: str, line: str) -> Any:
    """The input that a line is: an object of JSON where it is one (with `text`, where the task takes texts)."""
    if line.lstrip().startswith("{"):
        try:
            held = json.loads(line)
        except (ValueError, RecursionError) as error:
            if name in _FIELDS:
                raise InputError(f"A line is no object of JSON: {error}. Write {_example(name)}.") from error
        else:
            if name in _FIELDS or "text" in held:
                return held
    if name in _FIELDS:
        raise InputError(f"A line is no object of JSON. Write {_example(name)}.")
    return line


def _example(name: str) -> str:
    values = {"documents": ["...", "..."]}
    return json.dumps({field: values.get(field, "...") for field in _FIELDS[name]})


def _plain(value: Any) -> Any:
    """What JSON has for an array."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"a result holds a {type(value).__name__}")


# ---- options -------------------------------------------------------------------------------------------------------


def _options(task: Callable[..., Any]) -> Iterator[tuple[str, set[Any], str]]:
    """The options of a task that a command can give: their names, kinds, and descriptions."""
    own = _described(inspect.getdoc(task) or "", "Args")
    common = _described(inspect.getdoc(shared.Options) or "", "Attributes")
    annotations = {
        name: (p.annotation, vars(sys.modules[task.__module__]), own)
        for name, p in inspect.signature(task).parameters.items()
        if name != "source" and p.kind is not p.VAR_KEYWORD
    }
    for name, annotation in shared.Options.__annotations__.items():
        annotations[name] = (annotation, vars(shared), common)
    for name, (annotation, scope, descriptions) in annotations.items():
        kinds = _kinds(annotation, scope)
        if kinds & {int, float, bool, str, "list"}:
            yield name, kinds, descriptions.get(name, "")


def _kinds(annotation: Any, scope: dict[str, Any]) -> set[Any]:
    """The types that an option may have: simple ones, `"list"`, and strings of a `Literal`."""
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, scope)
        except NameError:  # of what is imported for type checkers alone: no option of a command
            return set()
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return set().union(*(_kinds(part, scope) for part in typing.get_args(annotation)))
    if origin is typing.Literal:
        return {str}
    if origin is collections.abc.Sequence:
        return {"list", *(kind for kind in _kinds(typing.get_args(annotation)[0], scope) if kind is not str)}
    return {annotation} & _SIMPLE


def _add_option(parser: argparse.ArgumentParser, name: str, kinds: set[Any], help: str) -> None:
    flag = "--" + name.replace("_", "-")
    help = help.replace("%", "%%")
    if bool in kinds:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=help)
        return

    def parsed(text: str) -> Any:
        if "list" in kinds and ("," in text or not kinds & {int, float, str}):
            return [single(part.strip()) for part in text.split(",")]
        return single(text)

    def single(text: str) -> Any:
        if text.lower() == "none" and type(None) in kinds and (str not in kinds or kinds & {int, float}):
            return None
        for kind in (int, float):
            if kind in kinds:
                try:
                    return kind(text)
                except ValueError:
                    pass
        if str not in kinds and "list" not in kinds:
            raise argparse.ArgumentTypeError(f"{text!r} is no number")
        if kinds & {int, float} and str not in kinds:
            raise argparse.ArgumentTypeError(f"{text!r} is no number, and no list of them with commas")
        return text

    metavar = "A,B,..." if "list" in kinds else next((k.__name__.upper() for k in (int, float) if k in kinds), "NAME")
    parser.add_argument(flag, type=parsed, default=argparse.SUPPRESS, metavar=metavar, help=help)


def _described(doc: str, section: str) -> dict[str, str]:
    """The descriptions of names in a section of a docstring."""
    found = re.search(rf"^{section}:\n(.*?)(?=^\S|\Z)", doc, re.DOTALL | re.MULTILINE)
    described: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \S)", found[1]) if found else ():
        names, colon, text = entry.strip().partition(": ")
        if colon:
            described.update(dict.fromkeys(names.split(", "), " ".join(text.replace("`", "").split())))
    return described
