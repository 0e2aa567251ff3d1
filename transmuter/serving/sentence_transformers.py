"""The files of sentence-transformers: the modules after the transformer, how text is prepared for it, and pooling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from transmuter.errors import InputError, ModelError
from transmuter.serving.repository import Repository, setting
from transmuter.serving.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transmuter.serving.chat_template import ChatTemplate

POOLING_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
_OLD_POOLING = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""The switches that files before `pooling_mode` have, in the order in which several are joined."""
_TRANSFORMER_FILES = (
    "sentence_bert_config.json",
    *(
        f"sentence_{kind}_config.json"
        for kind in ("roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
    ),
)
_SETTINGS = "config_sentence_transformers.json"
_FLAT_TYPES = ("apertus", "deepseek_v3", "gpt_oss", "seed_oss")
"""The model types whose chat templates take strings whatever they look like."""
_PARTS_SIGNS = ("content[0]", ".type", "'type'", '"type"', "message.content[")
"""What only a chat template has that takes a message's content in parts."""


# -- what the files say


@dataclass(frozen=True)
class Module:
    """An entry of `modules.json`.

    Attributes:
        kind: The name of the class; the whole dotted path where that is not one of sentence-transformers.
        path: The folder of its files, empty for the root.
    """

    kind: str
    path: str


@dataclass(frozen=True)
class Pooling:
    """How the embeddings of tokens become one.

    Attributes:
        modes: Of `POOLING_MODES`; the results of several are joined.
        include_prompt: Whether the tokens of a prompt take part.
    """

    modes: tuple[str, ...] = ("mean",)
    include_prompt: bool = True


@dataclass(frozen=True)
class TransformerSettings:
    """What `sentence_bert_config.json` says.

    Attributes:
        max_length: The most tokens of a text; None for what the tokenizer says.
        lower_case: Whether text is lowercased, whatever the tokenizer does.
        output: The model's output that is the result, as `last_hidden_state`; None if the file does not say.
        makes: What the output is, as `token_embeddings`, `sentence_embedding` or `causal_logits`.
        messages: Whether texts go through the chat template; None if the file does not say.
        message_format: `flat`, `structured` or `auto`.
        template: Variables for the chat template.
    """

    max_length: int | None = None
    lower_case: bool = False
    output: str | None = None
    makes: str | None = None
    messages: bool | None = None
    message_format: str = "auto"
    template: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Prompts:
    """Texts that are put before an input, by name."""

    texts: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None

    def resolve(self, prompt: str | None = None, name: str | None = None) -> str:
        """The prompt of a call: the one given, the one of that name, or the default; empty for none.

        Raises:
            InputError: There is no prompt of that name, or it is given in both ways.
        """
        if prompt is not None and name is not None:
            raise InputError("Both prompt and prompt_name are given. Give one of them.")
        if prompt is not None:
            if not isinstance(prompt, str):
                raise InputError(f"The prompt is {type(prompt).__name__}. Give a string.")
            return prompt
        if name is None:
            return self.texts.get(self.default, "") if self.default is not None else ""
        if not isinstance(name, str) or name not in self.texts:
            known = ", ".join(sorted(self.texts)) or "none"
            raise InputError(
                f"There is no prompt named {name!r}. Give one of those that there are ({known}), or prompt."
            )
        return self.texts[name]


@dataclass(frozen=True)
class SentenceFiles:
    """What a repository has of sentence-transformers' files.

    Attributes:
        modules: Those of `modules.json`, in order; empty if there is none.
        home: The repository that has `modules.json`, else the one that was asked.
        transformer: The settings of the transformer.
        prompts: Those of `config_sentence_transformers.json`.
        settings: All of that file.
    """

    modules: tuple[Module, ...]
    home: Repository
    transformer: TransformerSettings
    prompts: Prompts
    settings: Mapping[str, Any]

    def unknown(self, known: Sequence[str]) -> tuple[str, ...]:
        """The kinds of modules that are not of `known`."""
        return tuple(module.kind for module in self.modules if module.kind not in known)

    def first(self, kind: str) -> Module | None:
        """The first module of a kind."""
        return next((module for module in self.modules if module.kind == kind), None)


def read_files(repository: Repository, model_type: str, *, base: bool = True) -> SentenceFiles:
    """Reads them. Files of another model type count as absent, as in sentence-transformers.

    What a repository without `modules.json` lacks, as an export often does, is taken from the base model of its card.
    One with modules is whole: its base is what it was trained from.

    Args:
        repository: Where to look first.
        model_type: `SentenceTransformer` or `CrossEncoder`.
        base: Whether to look at the base model.

    Raises:
        ModelError: A file is malformed.
        HubError: The base model is needed and could not be had.
    """
    home = _with(repository, "modules.json", base)
    base = base and home is not repository
    settings = _read(repository, _SETTINGS, base)
    type_ = setting(settings, "model_type", str, "SentenceTransformer", file=_SETTINGS)
    names = ("query", "document") if model_type == "SentenceTransformer" else ()
    if (home is not None or settings) and type_ != model_type:
        return SentenceFiles((), repository, TransformerSettings(), _prompts({}, names), {})
    modules = () if home is None else _modules(home)
    folder = next((module.path for module in modules if module.kind == "Transformer"), "")
    return SentenceFiles(
        modules,
        home if home is not None else repository,
        _transformer_settings(repository, folder, base),
        _prompts(settings, names),
        settings,
    )


def read_module(repository: Repository, module: Module, *, base: bool = True) -> dict[str, Any]:
    """The `config.json` of a module; empty if there is none.

    Raises:
        ModelError: It is malformed.
        HubError: It could not be had.
    """
    return _read(repository, _inside(module.path, "config.json"), base)


def read_pooling(repository: Repository, module: Module | None, *, base: bool = True) -> Pooling | None:
    """The pooling of a module, or of `1_Pooling/config.json` where no `modules.json` names one; None if neither does.

    Raises:
        ModelError: The file is malformed, or has a mode that does not exist.
        HubError: It could not be had.
    """
    config = read_module(repository, module or Module("Pooling", "1_Pooling"), base=base)
    if not config:
        if module is None:
            return None
        raise ModelError(f"modules.json has a Pooling module, but {module.path}/config.json is not there. Add it.")
    where = "the config.json of a Pooling module"
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in _OLD_POOLING.items() if setting(config, key, bool, file=where)] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or not modes or any(mode not in POOLING_MODES for mode in modes):
        raise ModelError(
            f"The pooling_mode in {where} is {modes!r}, but the modes are {', '.join(POOLING_MODES)}. "
            "Correct the file, or set output_pool."
        )
    return Pooling(tuple(modes), setting(config, "include_prompt", bool, True, file=where))


def _with(repository: Repository, name: str, base: bool) -> Repository | None:
    if base:
        return repository.with_base(name)
    return repository if name in repository.files() else None


def _read(repository: Repository, name: str, base: bool) -> dict[str, Any]:
    home = _with(repository, name, base)
    return {} if home is None else home.json(name)


def _inside(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _modules(home: Repository) -> tuple[Module, ...]:
    entries = home.json_value("modules.json")
    modules = []
    for entry in entries if isinstance(entries, list) else [None]:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("type", "path")):
            raise ModelError(
                f"modules.json of {home.name} is no list of modules with a type and a path. Correct the file."
            )
        kind, path = entry["type"], entry["path"].rstrip("/")
        if path.startswith("/") or ".." in path.split("/"):
            raise ModelError(f"modules.json of {home.name} names {path!r}, outside of the repository. Do not trust it.")
        is_known = kind.startswith("sentence_transformers.")
        modules.append(Module(kind.rsplit(".", 1)[-1] if is_known else kind, path))
    return tuple(modules)


def _transformer_settings(repository: Repository, folder: str, base: bool) -> TransformerSettings:
    for name in _TRANSFORMER_FILES:
        config = _read(repository, _inside(folder, name), base)
        if not config and folder:  # exports put the files of the transformer at the top
            config = _read(repository, name, base)
        if config:
            break
    else:
        return TransformerSettings()
    max_length = setting(config, "max_seq_length", int, file=name)
    for key in ("tokenizer_args", "processor_kwargs"):
        max_length = setting(setting(config, key, dict, {}, file=name), "model_max_length", int, max_length, file=name)
    processing = setting(config, "processing_kwargs", dict, {}, file=name)
    for key in ("common", "text"):
        max_length = setting(setting(processing, key, dict, {}, file=name), "max_length", int, max_length, file=name)
    if max_length is not None and max_length < 1:
        raise ModelError(f"{name} gives texts {max_length} tokens at most. Correct the file.")
    template = setting(processing, "chat_template", dict, {}, file=name)
    if "messages" in template:
        raise ModelError(f"{name} gives the chat template messages of its own. Correct the file.")
    ways = setting(config, "modality_config", dict, file=name)
    way = {} if ways is None else setting(ways, "message" if "message" in ways else "text", dict, {}, file=name)
    return TransformerSettings(
        max_length=max_length,
        lower_case=setting(config, "do_lower_case", bool, False, file=name),
        output=setting(way, "method_output_name", str, file=name),
        makes=setting(config, "module_output_name", str, file=name),
        messages=None if ways is None else "message" in ways,
        message_format=setting(way, "format", str, "auto", file=name),
        template=template,
    )


def _prompts(settings: Mapping[str, Any], empty: Sequence[str]) -> Prompts:
    texts = setting(settings, "prompts", dict, {}, file=_SETTINGS)
    found = dict.fromkeys(empty, "") | {name: setting(texts, name, str, "", file=_SETTINGS) for name in texts}
    default = setting(settings, "default_prompt_name", str, file=_SETTINGS)
    if default is not None and default not in found:
        raise ModelError(
            f"The default_prompt_name in {_SETTINGS} is {default!r}, none of its prompts. Correct the file."
        )
    return Prompts(found, default)


# -- pooling


def pool(tokens: np.ndarray, modes: Sequence[str], skipped: int = 0) -> np.ndarray:
    """One embedding of the embeddings of tokens, as sentence-transformers' `Pooling`.

    Args:
        tokens: [tokens, width], all of them attended to.
        modes: Of `POOLING_MODES`; the results of several are joined.
        skipped: How many of the first tokens do not take part. Weights of `weightedmean` count them all the same.

    Returns:
        [len(modes) * width], float32.
    """
    tokens = np.asarray(tokens, np.float32)
    kept = tokens[skipped:]
    count, found, total = len(kept), [], None
    for mode in modes:
        if mode == "cls":
            found.append(kept[0] if count else tokens[0])
        elif mode == "max":
            found.append(kept.max(axis=0, initial=-np.inf))
        elif mode == "lasttoken":
            found.append(kept[-1] if count else np.zeros_like(tokens[0]))
        elif mode == "weightedmean":
            weights = np.arange(skipped + 1, len(tokens) + 1, dtype=np.float32)
            found.append(weights @ kept / np.maximum(weights.sum(), np.float32(1e-9)))
        else:
            total = kept.sum(axis=0) if total is None else total
            size = np.float32(max(count, 1e-9))
            found.append(total / (size if mode == "mean" else np.sqrt(size)))
    return found[0].copy() if len(found) == 1 else np.concatenate(found)


def normalize(embedding: np.ndarray) -> np.ndarray:
    """Scales the last axis to length 1, as `torch.nn.functional.normalize`: what is shorter than 1e-12 stays short."""
    length = np.sqrt(np.sum(np.square(embedding), axis=-1, keepdims=True))
    return embedding / np.maximum(length, np.float32(1e-12))


# -- messages


class Messages:
    """Turns texts and pairs into tokens through a chat template, as sentence-transformers' `Transformer`.

    A text is a message of the user, a pair one of the query and one of the document, and a prompt one of the system
    before them. Where truncation takes what the template puts after the content, that is written over the last tokens:
    the model answers there.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, settings: TransformerSettings, model_type: str):
        """
        Args:
            template: The chat template.
            tokenizer: The tokenizer.
            settings: Of the transformer.
            model_type: That of `config.json`.
        """
        form = settings.message_format
        if form == "auto":
            in_parts = any(sign in template.source for sign in _PARTS_SIGNS)
            form = "structured" if in_parts and model_type not in _FLAT_TYPES else "flat"
        self._template, self._tokenizer, self._in_parts = template, tokenizer, form == "structured"
        self._variables = {k: v for k, v in settings.template.items() if k != "restore_suffix"}
        self._restores = bool(settings.template.get("restore_suffix", True))
        self._ends: dict[tuple[str, bool], list[int]] = {}

    def check_pairs(self) -> None:
        """Refuses a template that leaves the query or the document out.

        Raises:
            ModelError: It does, or it fails.
        """
        both, query, document = (
            self._render(pair, "") for pair in (("alpha", "bravo"), ("charlie", "bravo"), ("alpha", "foxtrot"))
        )
        lost = [role for role, text in (("query", query), ("document", document)) if text == both]
        if lost:
            raise ModelError(
                f"The chat template leaves out messages of the role {' and '.join(lost)}. Use a repository whose "
                "template has the roles query and document, as that of a reranker."
            )

    def encode(
        self, items: Sequence[str | tuple[str, str]], prompts: Sequence[str], max_length: int | None
    ) -> list[np.ndarray]:
        """The ids of tokens of texts or pairs, each with its prompt: [tokens] int64.

        Raises:
            ModelError: The template fails.
        """
        texts = [self._render(item, prompt) for item, prompt in zip(items, prompts, strict=True)]
        encodings = self._tokenizer.encode_batch(
            texts,
            max_length=max_length,
            truncation=None if max_length is None else "longest_first",
            add_special_tokens=False,
        )
        found = []
        for item, prompt, encoding in zip(items, prompts, encodings, strict=True):
            ids = np.array(encoding.ids, np.int64)
            if self._restores and max_length is not None and len(ids) >= max_length:
                end = self._end(prompt, isinstance(item, str))
                if end:
                    ids[-len(end) :] = end[-len(ids) :]
            found.append(ids)
        return found

    def _end(self, prompt: str, is_single: bool) -> list[int]:
        """The tokens that the template puts after all content: those that two different contents both end with."""
        key = (prompt, is_single)
        end = self._ends.get(key)
        if end is None:
            short, long = "0", "1 2 3 4"
            items = (short, long) if is_single else ((short, short), (long, long))
            one, other = (
                list(x.ids)
                for x in self._tokenizer.encode_batch(
                    [self._render(item, prompt) for item in items], add_special_tokens=False
                )
            )
            same, most = 0, min(len(one), len(other))
            while same < most and one[-1 - same] == other[-1 - same]:
                same += 1
            end = one[len(one) - same :] if 0 < same < most else []
            if len(self._ends) >= 256:  # prompts may differ from call to call
                self._ends.clear()
            self._ends[key] = end
        return end

    def _render(self, item: str | tuple[str, str], prompt: str) -> str:
        contents = [("system", prompt)] if prompt else []
        contents += [("user", item)] if isinstance(item, str) else [("query", item[0]), ("document", item[1])]
        messages = [
            {"role": role, "content": [{"type": "text", "text": text}] if self._in_parts else text}
            for role, text in contents
        ]
        return self._template.render(messages, **self._variables)
