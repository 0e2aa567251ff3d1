"""Documents ranked by how well they answer a query."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Unpack

import numpy as np

from transmuter.errors import InputError, ModelError
from transmuter.serving.batching import Row
from transmuter.serving.inputs import merged, token_row
from transmuter.serving.options import Opened, Options, open_text, served, token_batches
from transmuter.serving.outputs import find_output, sigmoid
from transmuter.serving.repository import Repository, setting
from transmuter.serving.runtime import Serving
from transmuter.serving.sentence_transformers import Messages, Prompts, SentenceFiles, read_files, read_module
from transmuter.serving.tokenizer import Tokenizer

Activation = Literal["sigmoid", "identity", "tanh", "relu"]
_ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "sigmoid": sigmoid,
    "identity": lambda x: x,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, np.float32(0)),
}
_RUN = ("Transformer", "LogitScore", "Dropout")
"""The modules that are run here; a Dropout does nothing outside of training."""


def text_ranking(
    source: str | os.PathLike[str] | Repository,
    *,
    top_k: int | None = None,
    return_documents: bool = False,
    activation: Activation | None = None,
    prompt: str | None = None,
    prompt_name: str | None = None,
    **options: Unpack[Options],
) -> Serving:
    """Ranks documents for a query, as sentence-transformers' `CrossEncoder.rank`.

        serving = text_ranking("Xenova/ms-marco-MiniLM-L-6-v2")
        serving({"query": "Who lives in Berlin?", "documents": ["New York is big.", "Berlin has 3,520,031 people."]})
        # {"results": [{"index": 1, "score": 8.76}, {"index": 0, "score": -11.25}]}

    An input is a dict of `query` and `documents`, a list of texts; `top_k`, `return_documents`, `prompt` and
    `prompt_name` may be there too. The result is a dict of `results`, each a dict of `index` (of the document) and
    `score`, the highest score first; documents of equal scores keep their order. Each document is one row of a batch.

    A cross-encoder scores a pair by its only logit. A causal language model scores the text that its chat template
    makes of the query and the document, by the logits of two tokens at its end: those of its `LogitScore` module, else
    of "yes" and "no". It has logits for all positions, so a small `batch_size` and `sequence_length` are advisable.
    What a repository without `modules.json` lacks of sentence-transformers' files comes from the `base_model` of its
    model card.

    Args:
        source: A folder, or a repository of the Hub.
        top_k: How many results; None for all. May be given at a call as well.
        return_documents: Whether a result has the `text` of the document. May be given at a call as well.
        activation: What makes a score of a logit, in place of what the files say: `sigmoid`, `identity`, `tanh` or
            `relu`. Where the files say nothing it is the sigmoid.
        prompt: A text put before the query, or the system's message. May be given at a call as well.
        prompt_name: The name of a prompt of the files, in place of their default. May be given at a call as well.
        options: Those of all tasks.

    Raises:
        HubError: The repository, or its base model, could not be had.
        ModelError: A file is malformed, the model has several logits for a pair, or a module that is not run here.
        InputError: A call's input is of another kind.
    """
    opened = open_text(source, options)
    repository = opened.repository
    is_causal = _is_causal(repository)
    files = read_files(repository, "CrossEncoder", base=activation is None or is_causal)
    unknown = files.unknown(_RUN)
    if unknown:
        raise ModelError(
            f"modules.json of {files.home.name} has {', '.join(unknown)}, which is not run here. Use another model."
        )
    module = files.first("LogitScore")
    is_causal = module is not None if files.modules else is_causal
    name = find_output(opened.model, ["logits"], "text classification or text generation")
    ids, messages = None, None
    if is_causal:
        config = {} if module is None else read_module(repository, module)
        ids = _token_ids(config, opened.tokenizer)
        messages = _messages(opened, files)
    shape = opened.model.outputs[name].shape
    if not is_causal and shape and (len(shape) != 2 or (isinstance(shape[-1], int) and shape[-1] != 1)):
        raise _many_logits(shape)
    if activation is None:
        activation = _activation(repository, files)
    elif activation not in _ACTIVATIONS:
        raise InputError(f"activation is {activation!r}. Give one of {', '.join(_ACTIVATIONS)}.")
    batches = token_batches(opened, options, max_length=files.transformer.max_length, outputs=(name,))
    tokenizer = opened.tokenizer.lowercased() if files.transformer.lower_case else opened.tokenizer
    defaults = {
        "top_k": top_k,
        "return_documents": return_documents,
        "prompt": prompt,
        "prompt_name": prompt_name,
    }
    task = TextRanking(tokenizer, batches.max_length, ids, _ACTIVATIONS[activation], files.prompts, messages, defaults)
    _check(defaults)
    files.prompts.resolve(prompt, prompt_name)  # a name that does not exist is told at once
    return served(task, batches, options, name="text_ranking")


class TextRanking:
    """What comes before and after the model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_length: int | None,
        token_ids: tuple[int, int | None] | None,
        activation: Callable[[np.ndarray], np.ndarray],
        prompts: Prompts,
        messages: Messages | None,
        defaults: Mapping[str, Any],
    ):
        """
        Args:
            tokenizer: The tokenizer.
            max_length: The most tokens of a row.
            token_ids: Of a causal model, the tokens whose logits speak for and against; None for a cross-encoder.
            activation: Makes scores of logits.
            prompts: Of the files.
            messages: Makes the text of a pair, where that is the chat template's.
            defaults: Options of an input.
        """
        self._tokenizer, self._max_length, self._token_ids = tokenizer, max_length, token_ids
        self._activation, self._prompts, self._messages, self._defaults = activation, prompts, messages, defaults

    def rows(self, item: Any, **overrides: Any) -> tuple[list[Row], dict[str, Any]]:
        """A row of each document."""
        if not isinstance(item, Mapping) or not isinstance(item.get("query"), str):
            raise InputError('The input is no query with documents. Give {"query": "...", "documents": ["...", ...]}.')
        documents = item.get("documents")
        if not isinstance(documents, (list, tuple)) or not all(isinstance(text, str) for text in documents):
            raise InputError('The documents are no list of texts. Give {"query": "...", "documents": ["...", ...]}.')
        given = {**overrides, **{key: value for key, value in item.items() if key not in ("query", "documents")}}
        defaults = dict(self._defaults)
        if "prompt" in given or "prompt_name" in given:
            defaults.update(prompt=None, prompt_name=None)
        options = merged("text_ranking", defaults, given)
        _check(options)
        prompt = self._prompts.resolve(options["prompt"], options["prompt_name"])
        if self._messages is not None:
            pairs = [(item["query"], text) for text in documents]
            encoded = self._messages.encode(pairs, [prompt] * len(pairs), self._max_length)
            rows = [Row({"input_ids": ids}) for ids in encoded]
        else:
            encodings = self._tokenizer.encode_batch(
                [(prompt + item["query"], text) for text in documents],
                max_length=self._max_length,
                truncation="longest_first",
            )
            rows = [token_row(encoding) for encoding in encodings]
        return rows, {**options, "documents": documents}

    def result(self, context: Mapping[str, Any], outputs: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Any]:
        """The ranked documents of an input."""
        logits = np.array([self._logit(next(iter(found.values()))) for found in outputs], np.float32)
        scores = self._activation(logits)
        results: list[dict[str, Any]] = []
        for index in np.argsort(-scores, kind="stable")[: context["top_k"]]:
            results.append({"index": int(index), "score": float(scores[index])})
            if context["return_documents"]:
                results[-1]["text"] = context["documents"][index]
        return {"results": results}

    def _logit(self, logits: np.ndarray) -> np.ndarray:
        """What a row says of its document."""
        if self._token_ids is None:
            if logits.shape != (1,):
                raise _many_logits(("rows", *logits.shape))
            return logits[0]
        yes, no = self._token_ids
        largest = max(yes, no or 0)
        if logits.ndim != 2 or largest >= logits.shape[1]:
            raise ModelError(
                f"The logits have the shape {list(logits.shape)} for each text, without one for the token {largest} at "
                "each position. Take the tokenizer and the model from the same repository."
            )
        last = logits[-1].astype(np.float32)
        return last[yes] if no is None else last[yes] - last[no]


def _is_causal(repository: Repository) -> bool:
    """Whether `config.json` names a causal language model."""
    names = repository.setting("architectures", list, [])
    return bool(names) and str(names[0]).endswith("ForCausalLM")


def _token_ids(config: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[int, int | None]:
    """The tokens for and against, of a LogitScore module's configuration or of the vocabulary."""
    if config:
        where = "the config.json of a LogitScore module"
        yes, no = (setting(config, key, int, file=where) for key in ("true_token_id", "false_token_id"))
        if yes is None or yes < 0 or (no is not None and no < 0):
            raise ModelError(f"{where} has the tokens {yes} and {no}, but must have one at least. Correct the file.")
        return yes, no
    yes, no = tokenizer.id("yes"), tokenizer.id("no")
    if yes is None or no is None:
        raise ModelError(
            "The vocabulary has no tokens 'yes' and 'no', and the repository no LogitScore module that names others. "
            "Use a model that was made for ranking."
        )
    return yes, no


def _messages(opened: Opened, files: SentenceFiles) -> Messages | None:
    """The chat template of a causal model; None where the files say that pairs are tokenized as they are."""
    settings = files.transformer
    if settings.messages is False or (settings.messages is None and files.modules):
        return None
    from transmuter.serving.chat_template import ChatTemplate

    template = ChatTemplate.find(files.home) or ChatTemplate.find(opened.repository)
    if template is None:
        if settings.messages:
            raise ModelError(
                f"{files.home.name} has no chat template, which its files ask for. Add it to the repository."
            )
        return None
    tokenizer = opened.tokenizer.lowercased() if settings.lower_case else opened.tokenizer
    messages = Messages(template, tokenizer, settings, str(opened.repository.config.get("model_type")))
    messages.check_pairs()
    return messages


def _activation(repository: Repository, files: SentenceFiles) -> Activation:
    """The activation that the files name, the sigmoid where they name none."""
    name = setting(files.settings, "activation_fn", str, file="config_sentence_transformers.json")
    holders = [repository]
    if name is None:
        base = repository.base()
        holders += [base] if base is not None and "config.json" in base else []
    for holder in holders:
        held = holder.setting("sentence_transformers", dict, {})
        name = name or setting(held, "activation_fn", str, file="config.json")
        name = name or holder.setting("sbert_ce_default_activation_function", str)
    if name is None:
        return "sigmoid"
    kind = name.rsplit(".", 1)[-1].lower()
    if not name.startswith("torch.nn.") or kind not in _ACTIVATIONS:
        raise ModelError(f"The repository's activation function is {name!r}, which is unknown here. Set activation.")
    return kind


def _check(options: Mapping[str, Any]) -> None:
    top_k = options["top_k"]
    if top_k is not None and (type(top_k) is not int or top_k < 1):
        raise InputError(f"top_k is {top_k!r}. Give a positive number, or None for all.")


def _many_logits(shape: Sequence[int | str | None]) -> ModelError:
    return ModelError(
        f"The logits have the shape {list(shape)}, but ranking needs one for each pair. Use text_classification for a "
        "model with classes, or a causal language model that was made for ranking."
    )
