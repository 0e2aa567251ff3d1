"""Embeddings of texts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Unpack

import numpy as np

from transmuter.errors import HubError, InputError, ModelError
from transmuter.model import Model
from transmuter.serving.batching import Row
from transmuter.serving.inputs import merged, text_of, token_row
from transmuter.serving.options import Options, open_text, served, token_batches
from transmuter.serving.outputs import find_output
from transmuter.serving.repository import Repository, setting
from transmuter.serving.runtime import Serving
from transmuter.serving.sentence_transformers import (
    POOLING_MODES,
    Messages,
    Pooling,
    Prompts,
    SentenceFiles,
    normalize,
    pool,
    read_files,
    read_pooling,
)
from transmuter.serving.tokenizer import Tokenizer

_RUN = ("Transformer", "Pooling", "Normalize", "Dropout")
"""The modules that are run here; a Dropout does nothing outside of training."""
_OTHER_NAMES = {"mean_pooling": "mean", "cls_token_pooling": "cls", "last_token_pooling": "lasttoken"}
"""Bumblebee's names of ways to pool."""


def text_embedding(
    source: str | os.PathLike[str] | Repository,
    *,
    output_pool: str | Sequence[str] | None = None,
    embedding_processor: Literal["l2_norm", "none"] | None = None,
    output: str | None = None,
    truncate_dim: int | None = None,
    prompt: str | None = None,
    prompt_name: str | None = None,
    **options: Unpack[Options],
) -> Serving:
    """Embeds texts, as sentence-transformers' `SentenceTransformer.encode`.

        serving = text_embedding("Xenova/bge-small-en-v1.5")
        serving("The cat sat on the mat.")  # {"embedding": array([-0.02, ...], dtype=float32)}

    An input is a text, or a dict of `text` and `prompt` or `prompt_name`. The result is a dict of `embedding`, [width]
    float32. Pooling, normalisation, prompts and maximum length come from the files of sentence-transformers; what a
    repository without `modules.json` lacks of them, from the `base_model` of its model card. Without them the
    embedding is the mean of the embeddings of all tokens. An output `sentence_embedding` of the graph is taken where
    nothing tells how to pool, and where the files have a module that is not run here, such as `Dense`, because the
    graph has run it.

    Args:
        source: A folder, or a repository of the Hub.
        output_pool: How the embeddings of tokens become one, in place of what the files say: `cls`, `max`, `mean`,
            `mean_sqrt_len_tokens`, `weightedmean`, `lasttoken`, several of these to be joined, or `none` for those of
            all tokens, [tokens, width], as transformers' `FeatureExtractionPipeline`.
        embedding_processor: `l2_norm` for embeddings of length 1, or `none`, in place of what the files say.
        output: The output of the graph to take; one of a single embedding for each text is not pooled.
        truncate_dim: How many of the first dimensions are kept. None is what the files say, else all. A Normalize
            module comes before that, `embedding_processor` after it.
        prompt: A text put before every input. May be given at a call as well.
        prompt_name: The name of a prompt of the files, in place of their default. May be given at a call as well.
        options: Those of all tasks.

    Raises:
        HubError: The repository, or its base model, could not be had.
        ModelError: A file is malformed, or `modules.json` has a module that is not run here; `output_pool` and
            `embedding_processor` together do without it, and without the base model.
        InputError: An option or a call's input is of another kind.
    """
    modes = None if output_pool is None else _modes(output_pool)
    if embedding_processor not in (None, "l2_norm", "none"):
        raise InputError(f"embedding_processor is {embedding_processor!r}. Give 'l2_norm' or 'none'.")
    if truncate_dim is not None and (type(truncate_dim) is not int or truncate_dim < 1):
        raise InputError(f"truncate_dim is {truncate_dim!r}. Give a positive number.")
    opened = open_text(source, options)
    is_told = modes is not None and embedding_processor is not None
    try:
        files = read_files(opened.repository, "SentenceTransformer", base=not is_told)
        pooling = None if is_told else read_pooling(opened.repository, files.first("Pooling"))
    except HubError as error:
        raise HubError(f"{error} Or set output_pool and embedding_processor, which do without it.") from error
    unknown = () if is_told else files.unknown(_RUN)
    if modes is not None:
        pooling = Pooling(modes, pooling is None or pooling.include_prompt)
    name = _output(opened.model, output, files, pooling, unknown)
    if truncate_dim is None:
        truncate_dim = setting(files.settings, "truncate_dim", int, file="config_sentence_transformers.json")
    tokenizer, settings = opened.tokenizer, files.transformer
    if settings.lower_case:
        tokenizer = tokenizer.lowercased()
    batches = token_batches(opened, options, max_length=settings.max_length, outputs=(name,))
    messages = None
    if settings.messages:
        from transmuter.serving.chat_template import ChatTemplate

        model_type = str(opened.repository.config.get("model_type"))
        messages = Messages(ChatTemplate.load(files.home), tokenizer, settings, model_type)
    task = TextEmbedding(
        tokenizer,
        batches.max_length,
        pooling or Pooling(),
        normalizes_first=embedding_processor is None and files.first("Normalize") is not None,
        normalizes_last=embedding_processor == "l2_norm",
        truncate_dim=truncate_dim,
        prompts=files.prompts,
        messages=messages,
        defaults={"prompt": prompt, "prompt_name": prompt_name},
    )
    files.prompts.resolve(prompt, prompt_name)  # a name that does not exist is told at once
    return served(task, batches, options, name="text_embedding")


class TextEmbedding:
    """What comes before and after the model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_length: int | None,
        pooling: Pooling,
        *,
        normalizes_first: bool,
        normalizes_last: bool,
        truncate_dim: int | None,
        prompts: Prompts,
        messages: Messages | None,
        defaults: Mapping[str, str | None],
    ):
        self._tokenizer, self._max_length, self._pooling = tokenizer, max_length, pooling
        self._normalizes_first, self._normalizes_last = normalizes_first, normalizes_last
        self._truncate_dim = truncate_dim
        self._prompts, self._messages, self._defaults = prompts, messages, defaults
        self._prompt_lengths: dict[str, int] = {}

    def rows(self, item: Any, **overrides: Any) -> tuple[list[Row], int]:
        """One row of a text."""
        return self.rows_of([item], **overrides)[0]

    def rows_of(self, items: Sequence[Any], **overrides: Any) -> list[tuple[list[Row], int]]:
        """One row of each text, and how many tokens are not pooled."""
        texts, prompts = [], []
        for item in items:
            given = {**overrides, **item} if isinstance(item, Mapping) else overrides
            texts.append(text_of(given.get("text")) if isinstance(item, Mapping) else text_of(item))
            named = {key: value for key, value in given.items() if key != "text"}
            choice = merged("text_embedding", dict.fromkeys(self._defaults) if named else self._defaults, named)
            prompts.append(self._prompts.resolve(choice["prompt"], choice["prompt_name"]))
        if self._messages is not None:
            rows = [Row({"input_ids": ids}) for ids in self._messages.encode(texts, prompts, self._max_length)]
            return [([row], 0) for row in rows]
        encodings = self._tokenizer.encode_batch(
            [prompt + text for prompt, text in zip(prompts, texts, strict=True)],
            max_length=self._max_length,
            truncation="longest_first",
        )
        skipped = [
            0 if self._pooling.include_prompt or not prompt else self._prompt_length(prompt) for prompt in prompts
        ]
        return [([token_row(encoding)], count) for encoding, count in zip(encodings, skipped, strict=True)]

    def _prompt_length(self, prompt: str) -> int:
        """How many tokens a prompt has by itself, without a special one at the end, as sentence-transformers counts."""
        length = self._prompt_lengths.get(prompt)
        if length is None:
            ids = self._tokenizer.encode(prompt, max_length=self._max_length, truncation="longest_first").ids
            length = len(ids) - (len(ids) > 0 and ids[-1] in self._tokenizer.special_ids)
            if len(self._prompt_lengths) >= 256:  # prompts may differ from call to call
                self._prompt_lengths.clear()
            self._prompt_lengths[prompt] = length
        return length

    def result(self, context: int, outputs: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """The embedding of an input."""
        (found,) = outputs[0].values()
        if found.ndim not in (1, 2):
            raise ModelError(
                f"The output has the shape {list(found.shape)} for each text, but embeddings of tokens or of the text "
                "are needed. Name another with output."
            )
        if found.ndim == 2 and self._pooling.modes:
            embedding = pool(found, self._pooling.modes, context)
        else:
            embedding = np.array(found, np.float32)
        if self._normalizes_first:  # as the module does: what is left of a truncated one is shorter
            embedding = normalize(embedding)
        embedding = embedding[..., : self._truncate_dim]
        return {"embedding": normalize(embedding) if self._normalizes_last else embedding}


def _modes(given: str | Sequence[str]) -> tuple[str, ...]:
    if given == "none":
        return ()
    modes = tuple(_OTHER_NAMES.get(mode, mode) for mode in ((given,) if isinstance(given, str) else given))
    wrong = [mode for mode in modes if mode not in POOLING_MODES]
    if wrong or not modes:
        raise InputError(f"output_pool is {given!r}. Give one or some of {', '.join(POOLING_MODES)}, or 'none'.")
    return modes


def _output(
    model: Model, given: str | None, files: SentenceFiles, pooling: Pooling | None, unknown: Sequence[str]
) -> str:
    """The output to take."""
    if given is not None:
        if given not in model.outputs:
            raise InputError(f"There is no output {given!r}. Give one of {', '.join(model.outputs)}.")
        return given
    names = ["last_hidden_state", "token_embeddings"]
    has_tokens = any(name in model.outputs for name in names)
    if "sentence_embedding" in model.outputs and (unknown or pooling is None or not has_tokens):
        return "sentence_embedding"
    if unknown:
        raise ModelError(
            f"modules.json of {files.home.name} has {', '.join(unknown)}, which is not run here. Set output_pool and "
            "embedding_processor to use the model without it."
        )
    wanted = files.transformer.output
    return find_output(model, names if wanted is None else [wanted, *names], "feature extraction")
