"""Chat templates: messages → the text that a model was trained on, as `apply_chat_template` of transformers."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from transmuter.errors import InputError, ModelError, TransmuterError
from transmuter.serving.repository import Repository
from transmuter.serving.tokenizer import SpecialTokens

_AMOUNT, _AMOUNT_PER_CHARACTER = 20_000_000, 100
"""What a template may do (about 200,000 steps), and what more for each character of its input."""
_LARGEST_INPUT = 1 << 30
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplate:
    """A Jinja template, or several by name. `load` makes one; any number of threads may use it.

    Templates come from strangers: they run in a sandbox that lets them read nothing but the messages and variables, and
    that ends those that would not come to an end (see `sandbox.py`).

    Attributes:
        sources: The templates by name; `"default"` is what is taken unless another is asked for.
        special_tokens: Variables with the tokenizer's special tokens, as `bos_token`.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        *,
        special_tokens: Mapping[str, Any] | None = None,
        where: str = "The chat template",
    ):
        """
        Args:
            source: The template, or several by name.
            special_tokens: Variables with special tokens.
            where: What errors call it.
        """
        self.sources = {"default": source} if isinstance(source, str) else dict(source)
        self.special_tokens = dict(special_tokens or {})
        self._where = where
        self._compiled: dict[str, Any] = {}

    @classmethod
    def find(cls, repository: Repository | str, folder: str = "") -> ChatTemplate | None:
        """A repository's template, or None: that of `chat_template.jinja` and `additional_chat_templates`, else
        `chat_template` in `tokenizer_config.json` (a string, or a list of named ones), else `chat_template.json`.

        Args:
            repository: The repository, or what `Repository.open` takes.
            folder: The tokenizer's folder in it.

        Raises:
            ModelError: A file is malformed.
            HubError: The Hub does not give a file.
        """
        repository = Repository.open(repository)
        folder = f"{folder.rstrip('/')}/" if folder else ""
        sources: dict[str, Any] = {}
        if f"{folder}chat_template.jinja" in repository:
            sources["default"] = repository.text(f"{folder}chat_template.jinja")
        start, end = f"{folder}additional_chat_templates/", ".jinja"
        for name in repository.files():
            if name.startswith(start) and name.endswith(end):
                sources[name[len(start) : -len(end)]] = repository.text(name)
        for file in (f"{folder}tokenizer_config.json", f"{folder}chat_template.json"):
            if not sources:
                held = repository.json(file, optional=True).get("chat_template")
                sources = _named(held, f"{file} of {repository.name}")
        if not sources:
            return None
        special = SpecialTokens.load(repository, folder)
        variables: dict[str, Any] = dict(special.roles)
        if special.additional:
            variables["additional_special_tokens"] = list(special.additional)
        return cls(sources, special_tokens=variables, where=f"The chat template of {repository.name}")

    @classmethod
    def load(cls, repository: Repository | str, folder: str = "") -> ChatTemplate:
        """As `find`.

        Raises:
            ModelError: There is none, or a file is malformed.
            HubError: The Hub does not give a file.
        """
        found = cls.find(repository, folder)
        if found is None:
            name = Repository.open(repository).name
            raise ModelError(f"{name} has no chat template. Give the model a text instead of messages.")
        return found

    @property
    def source(self) -> str:
        """The text of the default template, or of the only one."""
        return self.sources.get("default") or next(iter(self.sources.values()))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        name: str | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: As `[{"role": "user", "content": "Hello!"}, ...]`.
            tools: JSON schemas of functions that the model may call.
            documents: What the model may quote from, as `[{"title": ..., "text": ...}, ...]`.
            add_generation_prompt: End with the start of the assistant's next message.
            continue_final_message: End within the last message, which the model goes on with.
            name: Which of several templates; None is `tool_use` with tools if there is one, else `default`.
            variables: Whatever else the template reads, as `enable_thinking=False`.

        Raises:
            InputError: The messages are malformed, or the template refuses them.
            ModelError: The template is malformed, fails, does what it may not, or does not come to an end.
        """
        _check(messages, "messages")
        _check(() if tools is None else tools, "tools")
        _check(() if documents is None else documents, "documents")
        if add_generation_prompt and continue_final_message:
            raise InputError("add_generation_prompt and continue_final_message exclude each other. Set one of them.")
        messages = list(messages)
        last = ""
        if continue_final_message:
            messages, last = _tagged(messages)
        held = {**self.special_tokens, **variables, "messages": messages, "tools": tools, "documents": documents}
        held["add_generation_prompt"] = add_generation_prompt
        text = self._rendered(self._chosen(name, tools is not None), held)
        return _cut_at_tag(text, last) if continue_final_message else text

    def _chosen(self, name: str | None, has_tools: bool) -> str:
        """The name of a template."""
        if name is None:
            if has_tools and "tool_use" in self.sources:
                return "tool_use"
            name = "default" if "default" in self.sources or len(self.sources) > 1 else next(iter(self.sources))
        if name not in self.sources:
            raise InputError(f"There is no chat template {name!r}. Give one of: {', '.join(self.sources)}.")
        return name

    def _rendered(self, name: str, variables: dict[str, Any]) -> str:
        environment = _environment()
        from transmuter.serving import sandbox

        try:
            size = sandbox.weight(variables, _LARGEST_INPUT)
        except sandbox.TooMuch as error:
            raise InputError(
                "The messages are nested too deeply, or too long. Give lists of dicts of texts."
            ) from error
        try:
            template = self._compiled.get(name)
            if template is None:
                template = self._compiled[name] = environment.compiled(self.sources[name])
            return environment.rendered(template, variables, _AMOUNT + _AMOUNT_PER_CHARACTER * size)
        except sandbox.Refused as error:
            raise InputError(f"{self._where} refuses the messages: {error}. Give messages as it wants them.") from error
        except TransmuterError:
            raise
        except Exception as error:  # whatever a template of strangers makes Jinja and Python raise
            said = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
            raise ModelError(
                f"{self._where} fails: {said}. Check what it wants, or render the messages yourself and give the text."
            ) from error


@functools.cache
def _environment() -> Any:
    try:
        from transmuter.serving.sandbox import BoundedEnvironment
    except ImportError as error:
        raise ModelError(
            "The package jinja2 is not installed, and chat templates need it. "
            "Install Transmuter with its extra `serving`: pip install 'transmuter[serving]'"
        ) from error
    return BoundedEnvironment()


def _named(held: Any, where: str) -> dict[str, str]:
    """Templates as a configuration has them: a string, a dict, or a list of `{"name", "template"}`."""
    if held is None:
        return {}
    if isinstance(held, str):
        return {"default": held}
    if isinstance(held, list) and all(isinstance(entry, dict) for entry in held):
        held = {entry.get("name"): entry.get("template") for entry in held}
    if isinstance(held, dict) and all(isinstance(text, str) for pair in held.items() for text in pair):
        return held
    raise ModelError(f"'chat_template' in {where} is {json.dumps(held)[:40]}, but must be a text. Correct the file.")


def _check(held: Any, what: str) -> None:
    if not isinstance(held, (list, tuple)) or not all(isinstance(entry, Mapping) for entry in held):
        raise InputError(f"The {what} must be a list of dicts. Write them as [{{'role': 'user', 'content': 'Hi'}}].")


def _tagged(messages: list[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], str]:
    """The messages with a mark after the last one's text, and that text."""
    messages = copy.deepcopy(messages)
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        messages[-1]["content"] = content + _TAG
        return messages, content
    for part in reversed(content if isinstance(content, (list, tuple)) else ()):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text = part["text"]
            part["text"] = text + _TAG
            return messages, text
    raise InputError("The last message has no text to go on with. Set continue_final_message to False.")


def _cut_at_tag(text: str, last: str) -> str:
    place = text.rfind(_TAG.strip())
    if place < 0 or last.strip() not in text:
        raise InputError(
            "The chat template leaves out the end of the last message. Set continue_final_message to False."
        )
    return text[:place] if text.startswith(_TAG, place) else text[:place].rstrip()
