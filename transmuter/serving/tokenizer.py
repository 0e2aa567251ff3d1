"""Tokenizers: `tokenizer.json` with the settings beside it, as transformers' fast tokenizers (`PreTrainedTokenizerFast`
and its subclasses) have it.

The Rust library's tokenizer carries its truncation as state that all threads share. Here nothing of that state is set:
sequences are encoded bare, cut to the length of this call, and special tokens put around them, so that any number of
threads can use one tokenizer with lengths of their own.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from transmuter.errors import InputError, ModelError, TransmuterError
from transmuter.serving.repository import Repository, setting

Truncation = Literal["longest_first", "only_first", "only_second"]
Side = Literal["left", "right"]
Text = str | list[str] | tuple[Any, Any]

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_UNLIMITED = 10**20
"""A `model_max_length` above this means that there is none (`LARGE_INTEGER` of transformers)."""

_BERT = {r: f"[{r[:3].upper()}]" for r in ("unk_token", "sep_token", "pad_token", "cls_token")} | {
    "mask_token": "[MASK]"
}
_ROBERTA = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "sep_token": "</s>",
    "pad_token": "<pad>",
    "cls_token": "<s>",
    "mask_token": "<mask>",
}
_GPT2 = dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>")
_FAMILIES: dict[str, tuple[dict[str, str], str]] = {
    "bert": (_BERT, "Bert ConvBert DistilBert Electra LayoutLM Lxmert MobileBert RoFormer Splinter SqueezeBert"),
    "mpnet": ({**_ROBERTA, "unk_token": "[UNK]"}, "MPNet"),
    "funnel": ({**_ROBERTA, "sep_token": "<sep>", "cls_token": "<cls>"}, "Funnel"),
    "roberta": (_ROBERTA, "Roberta Bart Blenderbot LED Longformer Mvp"),
    "xlm-roberta": (_ROBERTA, "XLMRoberta Camembert Barthez MBart Nllb"),
    "deberta": ({**_BERT, "bos_token": "[CLS]", "eos_token": "[SEP]"}, "Deberta DebertaV2"),
    "gpt2": (_GPT2, "GPT2 Whisper CodeGen GPTNeoX"),
    "clip": ({**_GPT2, "bos_token": "<|startoftext|>", "pad_token": "<|endoftext|>"}, "CLIP"),
    "qwen": ({**_GPT2, "bos_token": "", "pad_token": "<|endoftext|>"}, "Qwen2"),
    "t5": ({"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}, "T5"),
    "llama": ({"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}, "Llama CodeLlama"),
    "gemma": ({"unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}, "Gemma"),
}
"""Special tokens that transformers' classes have unless the configuration says otherwise, and the classes' names."""

_CLASSES = {
    "bert": "Bert",
    "distilbert": "DistilBert",
    "electra": "Electra",
    "mobilebert": "MobileBert",
    "mpnet": "MPNet",
    "roberta": "Roberta",
    "bart": "Bart",
    "xlm-roberta": "XLMRoberta",
    "camembert": "Camembert",
    "deberta": "Deberta",
    "deberta-v2": "DebertaV2",
    "gpt2": "GPT2",
    "clip": "CLIP",
    "t5": "T5",
    "llama": "Llama",
    "whisper": "Whisper",
}
"""The tokenizer's class by `model_type`, where the configuration names none."""

_LEFT_PADDED = {"Llama", "CodeLlama", "Gemma", "Cohere"}
_SHIFTED_POSITIONS = {
    "camembert",
    "longformer",
    "mpnet",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
}
"""Models whose first two positions are for padding: texts are that much shorter than `max_position_embeddings`."""
_RELATIVE_POSITIONS = {"deberta", "deberta-v2", "t5", "mt5", "umt5", "longt5", "xlnet", "bloom", "mpt", "funnel"}
"""Models that run beyond `max_position_embeddings`, or have no such limit."""


class Encoding:
    """A text, or a pair, as tokens. Lists are made when first asked for; all have one element per token.

    Attributes:
        ids: Token ids.
        type_ids: 0 or 1, as the model's `token_type_ids`.
        attention_mask: All 1: an encoding is not padded.
        special_tokens_mask: 1 for a token that the tokenizer put around the text.
        offsets: `(start, end)` of the characters in the text that a token comes from; (0, 0) for special tokens.
        sequence_ids: 0 for tokens of the text, 1 of the pair, None for special ones.
        word_ids: The index of the token's word in its text, None for special ones.
        tokens: The tokens' strings.
        overflowing: The further windows of a text that is cut, as `stride` has it.
    """

    __slots__ = ("__dict__", "_held", "_types", "ids")

    def __init__(self, held: Any, types: tuple[int, int] | None = None):
        """
        Args:
            held: The library's encoding.
            types: The type ids of a pair's tokens, of which the library sets those of the first window alone.
        """
        self._held, self._types = held, types
        self.ids: list[int] = held.ids

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"Encoding({self.tokens})"

    @cached_property
    def type_ids(self) -> list[int]:
        if self._types is None:
            return self._held.type_ids
        return [own if of is None else self._types[of] for own, of in zip(self._held.type_ids, self.sequence_ids)]

    @property
    def attention_mask(self) -> list[int]:
        return [1] * len(self.ids)

    @cached_property
    def special_tokens_mask(self) -> list[int]:
        return self._held.special_tokens_mask

    @cached_property
    def offsets(self) -> list[tuple[int, int]]:
        return self._held.offsets

    @cached_property
    def sequence_ids(self) -> list[int | None]:
        return self._held.sequence_ids

    @cached_property
    def word_ids(self) -> list[int | None]:
        return self._held.word_ids

    @cached_property
    def tokens(self) -> list[str]:
        return self._held.tokens

    @cached_property
    def overflowing(self) -> list[Encoding]:
        return [Encoding(held, self._types) for held in self._held.overflowing]


@dataclass(frozen=True)
class SpecialTokens:
    """What `tokenizer_config.json` and `special_tokens_map.json` say of special tokens.

    Attributes:
        roles: Tokens by role (`bos_token`, `eos_token`, `unk_token`, `sep_token`, `pad_token`, `cls_token`,
            `mask_token`, and a repository's own such as `image_token`).
        additional: Further special tokens.
    """

    roles: Mapping[str, str]
    additional: tuple[str, ...]

    @classmethod
    def load(cls, repository: Repository, folder: str = "") -> SpecialTokens:
        """Reads them.

        Args:
            repository: The repository.
            folder: The tokenizer's folder in it, ending in `/`.

        Raises:
            ModelError: A file is malformed.
            HubError: The Hub does not give a file.
        """
        file = f"{folder}tokenizer_config.json"
        config = dict(repository.json(file, optional=True))
        if "added_tokens_decoder" not in config:  # as older versions of transformers wrote it
            file = f"{folder}special_tokens_map.json"
            config |= repository.json(file, optional=True)
        roles: dict[str, str] = {}
        for role in _ROLES:
            if role in config:
                roles[role] = _content(config[role], role, file)
        extra = setting(config, "extra_special_tokens", dict, {}, file=file)
        roles |= {role: _content(token, role, file) for role, token in extra.items()}
        listed = setting(config, "additional_special_tokens", list, [], file=file)
        additional = tuple(_content(token, "additional_special_tokens", file) for token in listed)
        for role, token in _defaults(_class_name(repository, folder)).items():
            roles.setdefault(role, token)
        return cls({role: token for role, token in roles.items() if token}, additional)


def _content(token: Any, role: str, file: str) -> str:
    """The string of a token, which files give alone or with its properties; empty for null."""
    if isinstance(token, dict):
        token = token.get("content")
    if token is None:
        return ""
    if not isinstance(token, str):
        raise ModelError(f"{role!r} in {file} is {json.dumps(token)[:40]}, but must be a token. Correct the file.")
    return token


def _class_name(repository: Repository, folder: str) -> str:
    """The tokenizer's class in transformers, without `Tokenizer` and `Fast`."""
    config = repository.json(f"{folder}tokenizer_config.json", optional=True)
    name = setting(config, "tokenizer_class", str, "", file=f"{folder}tokenizer_config.json")
    if not name and "config.json" in repository:
        name = repository.setting("tokenizer_class", str, "") or _CLASSES.get(
            repository.setting("model_type", str, ""), ""
        )
    return name.removesuffix("Fast").removesuffix("Tokenizer")


def _family(name: str) -> str:
    return next((family for family, (_, names) in _FAMILIES.items() if name in names.split()), "")


def _defaults(name: str) -> dict[str, str]:
    family = _family(name)
    return _FAMILIES[family][0] if family else {}


class Tokenizer:
    """Text ↔ token ids. `load` makes one; any number of threads may use it.

    Attributes:
        special_tokens: Special tokens by role, as `{"cls_token": "[CLS]", ...}`.
        additional_special_tokens: Further special tokens.
        special_ids: The ids of all of them.
        bos_token, eos_token, unk_token, sep_token, pad_token, cls_token, mask_token: One of them, or None.
        bos_id, eos_id, unk_id, sep_id, cls_id, mask_id: Its id, or None.
        pad_id: The id that fills up shorter rows: 0 if there is no such token.
        pad_type_id: The type id that goes with it.
        max_length: How many tokens the model takes, special ones included; None is any number.
        padding_side, truncation_side: Where rows are filled up and cut: `"right"` or `"left"`.
        vocab_size: One more than the largest token id.
        name: The class in transformers, as `"Bert"`; empty if unknown.
    """

    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    sep_token: str | None
    pad_token: str | None
    cls_token: str | None
    mask_token: str | None
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    sep_id: int | None
    cls_id: int | None
    mask_id: int | None
    pad_id: int

    def __init__(
        self,
        definition: str,
        *,
        special: SpecialTokens | None = None,
        config: Mapping[str, Any] | None = None,
        name: str = "",
        max_length: int | None = None,
        where: str = "tokenizer.json",
    ):
        """
        Args:
            definition: The contents of `tokenizer.json`.
            special: Its special tokens.
            config: The contents of `tokenizer_config.json`.
            name: The class in transformers, without `Tokenizer` and `Fast`.
            max_length: How many tokens the model takes.
            where: The file, for errors.

        Raises:
            ModelError: One of them is malformed, or the package tokenizers is not installed.
        """
        tokenizers = _imported()
        config, file = config or {}, "tokenizer_config.json"
        special = special or SpecialTokens({}, ())
        try:
            self._bare = tokenizers.Tokenizer.from_str(definition)
        except BaseException as error:
            raise _malformed(error, f"{where} is no definition of a tokenizer") from error
        self.name, self.max_length = name, max_length
        cut, padded = self._bare.truncation or {}, self._bare.padding or {}
        self._bare.no_truncation()
        self._bare.no_padding()
        self.truncation_side: Side = _side(config, "truncation_side", cut.get("direction", "right"), file)
        self.padding_side: Side = _side(
            config, "padding_side", padded.get("direction") or ("left" if name in _LEFT_PADDED else "right"), file
        )
        self.pad_type_id: int = setting(config, "pad_token_type_id", int, padded.get("pad_type_id", 0), file=file)
        self._cleans_up: bool = setting(config, "clean_up_tokenization_spaces", bool, False, file=file)
        try:
            self._add_tokens(config, special, file)
            self._adapt(config, special, file)
        except TransmuterError:
            raise
        except BaseException as error:
            raise _malformed(error, f"{where} does not fit its {file}") from error
        self._take_roles(special, padded)
        self.vocab_size = max(self._bare.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.rows: int | None = None

        # special tokens are put around by a tokenizer of its own, which has nothing but that
        processor = self._bare.post_processor
        self._processor = tokenizers.Tokenizer(tokenizers.models.WordLevel({}, unk_token=""))
        if processor is not None:
            self._processor.post_processor = processor
        self._bare.post_processor = None
        self._pair_types = _pair_types(processor)
        try:
            self._added = {pair: self._processor.num_special_tokens_to_add(pair) for pair in (False, True)}
        except BaseException as error:
            raise _malformed(error, f"{where} has malformed special tokens") from error

    @classmethod
    def load(cls, repository: Repository | str, folder: str = "") -> Tokenizer:
        """A repository's tokenizer.

        Args:
            repository: The repository, or what `Repository.open` takes.
            folder: Its folder there, as `"tokenizer"`.

        Raises:
            ModelError: There is no `tokenizer.json`, or it or a file of settings is malformed.
            HubError: The Hub does not give a file.
        """
        repository = Repository.open(repository)
        folder = f"{folder.rstrip('/')}/" if folder else ""
        if f"{folder}tokenizer.json" not in repository:
            raise ModelError(
                f"{repository.name} has no {folder}tokenizer.json. Save one there with transformers: "
                "AutoTokenizer.from_pretrained(..., use_fast=True).save_pretrained(folder)."
            )
        config = repository.json(f"{folder}tokenizer_config.json", optional=True)
        return cls(
            repository.text(f"{folder}tokenizer.json"),
            special=SpecialTokens.load(repository, folder),
            config=config,
            name=_class_name(repository, folder),
            max_length=_max_length(repository, config, f"{folder}tokenizer_config.json"),
            where=f"{folder}tokenizer.json of {repository.name}",
        )

    def __repr__(self) -> str:
        return f"Tokenizer({self.name or '?'}, {self.vocab_size} tokens, max_length={self.max_length})"

    # -- what transformers' classes change

    def _add_tokens(self, config: Mapping[str, Any], special: SpecialTokens, file: str) -> None:
        """Tokens that the settings have and `tokenizer.json` lacks, or has with other properties."""
        tokenizers = _imported()
        named = {*special.roles.values(), *special.additional}
        added = []
        for id, token in setting(config, "added_tokens_decoder", dict, {}, file=file).items():
            if not (isinstance(token, dict) and isinstance(token.get("content"), str) and id.isdecimal()):
                raise ModelError(f"'added_tokens_decoder' in {file} has a malformed token {id!r}. Correct the file.")
            kinds = ("single_word", "lstrip", "rstrip", "normalized")
            properties = {k: setting(token, k, bool, k == "normalized", file=file) for k in kinds}
            is_special = setting(token, "special", bool, False, file=file) or token["content"] in named
            added.append((int(id), tokenizers.AddedToken(token["content"], special=is_special, **properties)))
        added.sort(key=lambda entry: entry[0])
        tokens = [token for _, token in added]
        held = {t.content for t in (*self._bare.get_added_tokens_decoder().values(), *tokens)}
        # transformers also adds the special tokens of which its classes are sure; one that the vocabulary lacks would
        # get an id that the model lacks
        tokens += [
            tokenizers.AddedToken(token, special=True, normalized=False)
            for token in dict.fromkeys((*special.roles.values(), *special.additional))
            if token not in held and self._bare.token_to_id(token) is not None
        ]
        if tokens:
            self._bare.add_tokens(tokens)

    def _adapt(self, config: Mapping[str, Any], special: SpecialTokens, file: str) -> None:
        """Parts that a class of transformers makes anew from its settings."""
        tokenizers = _imported()
        family = _family(self.name)
        if family in ("bert", "mpnet", "funnel") and self._bare.normalizer is not None:
            state = json.loads(self._bare.normalizer.__getstate__())
            wanted = {
                "lowercase": setting(config, "do_lower_case", bool, True, file=file),
                "strip_accents": setting(config, "strip_accents", bool, None, file=file),
                "handle_chinese_chars": setting(config, "tokenize_chinese_chars", bool, True, file=file),
            }
            if state.get("type") == "BertNormalizer" and any(state[key] != wanted[key] for key in wanted):
                self._bare.normalizer = tokenizers.normalizers.BertNormalizer(
                    clean_text=state.get("clean_text", True), **wanted
                )
        prefixed = setting(config, "add_prefix_space", bool, False, file=file)
        if self._bare.pre_tokenizer is not None:
            state = json.loads(self._bare.pre_tokenizer.__getstate__())
            if state.get("type") == "ByteLevel" and state["add_prefix_space"] != prefixed:
                self._bare.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
                    add_prefix_space=prefixed, use_regex=state.get("use_regex", True)
                )
        if family == "roberta" and self._bare.post_processor is not None:
            state = json.loads(self._bare.post_processor.__getstate__())
            trims = setting(config, "trim_offsets", bool, True, file=file)
            if state.get("type") == "RobertaProcessing" and (
                (state["trim_offsets"], state["add_prefix_space"]) != (trims, prefixed)
            ):
                self._bare.post_processor = tokenizers.processors.RobertaProcessing(
                    tuple(state["sep"]), tuple(state["cls"]), trim_offsets=trims, add_prefix_space=prefixed
                )
        if self.name in ("Llama", "CodeLlama", "Gemma", "Cohere") or (
            self.name == "GPTNeoX" and {"add_bos_token", "add_eos_token"} & config.keys()
        ):
            around = {
                "bos": setting(config, "add_bos_token", bool, self.name != "GPTNeoX", file=file),
                "eos": setting(config, "add_eos_token", bool, False, file=file),
            }
            tokens = {role: special.roles.get(f"{role}_token", "") for role, is_on in around.items() if is_on}
            for role, token in tokens.items():
                if not token or self._bare.token_to_id(token) is None:
                    raise ModelError(
                        f"'add_{role}_token' in {file} is true, but there is no such token. Correct the file."
                    )
            before, after = tokens.get("bos"), tokens.get("eos")
            parts = {
                n: [*([f"{before}:{n}"] if before else []), f"${'AB'[n]}:{n}", *([f"{after}:{n}"] if after else [])]
                for n in (0, 1)
            }
            self._bare.post_processor = tokenizers.processors.TemplateProcessing(
                single=parts[0],
                pair=parts[0] + parts[1],
                special_tokens=[(token, self._bare.token_to_id(token)) for token in dict.fromkeys(tokens.values())],
            )

    def _take_roles(self, special: SpecialTokens, padded: Mapping[str, Any]) -> None:
        roles = dict(special.roles)
        if padded.get("pad_token") and "pad_token" not in roles:
            roles["pad_token"] = padded["pad_token"]
        ids = {role: self._bare.token_to_id(token) for role, token in roles.items()}
        self.special_tokens = {role: token for role, token in roles.items() if ids[role] is not None}
        self.additional_special_tokens = special.additional
        for role in _ROLES:
            setattr(self, role, self.special_tokens.get(role))
            setattr(self, f"{role.removesuffix('_token')}_id", ids.get(role))
        if self.pad_id is None:
            self.pad_id = padded.get("pad_id", 0)
        others = (self._bare.token_to_id(token) for token in special.additional)
        self.special_ids = frozenset(id for id in (*ids.values(), *others) if id is not None)

    def lowercased(self) -> Tokenizer:
        """The same with texts in lower case, as sentence-transformers has it for `do_lower_case`
        (`models.Transformer`): a normalizer before the others, unless there is one already."""
        tokenizers = _imported()
        held = self._bare.normalizer
        if held is not None and _lowers(json.loads(held.__getstate__())):
            return self
        other = copy.copy(self)
        other._bare = tokenizers.Tokenizer.from_str(self._bare.to_str())
        first = tokenizers.normalizers.Lowercase()
        other._bare.normalizer = first if held is None else tokenizers.normalizers.Sequence([first, held])
        return other

    def fitted(self, rows: int | None, *, where: str = "the model") -> Tokenizer:
        """The same for a model with so many embeddings (`embedding_rows`): an id beyond them is an error of ours, where
        the graph would read whatever is there.

        Raises:
            ModelError: A special token that goes around texts, or fills them up, lies beyond.
        """
        if rows is None or self.vocab_size <= rows:
            return self
        other = copy.copy(self)
        other.rows = rows
        ids = self._processed(self._raw([""])[0], None, True).ids
        beyond = [id for id in (*ids, self.pad_id) if id >= rows]
        if beyond:
            raise ModelError(
                f"The tokenizer's {self.token(beyond[0])!r} has the id {beyond[0]}, but {where} has embeddings for "
                f"{rows} tokens. The tokenizer is another model's: download the repository again."
            )
        return other

    # -- encoding

    def encode(
        self,
        text: str | list[str],
        pair: str | list[str] | None = None,
        *,
        max_length: int | None = None,
        truncation: Truncation | None = "longest_first",
        stride: int = 0,
        add_special_tokens: bool = True,
        is_split_into_words: bool = False,
    ) -> Encoding:
        """The tokens of a text, or of a pair of texts.

        Args:
            text: The text; with `is_split_into_words` a list of words.
            pair: The second text.
            max_length: The largest number of tokens, special ones included; None cuts nothing.
            truncation: What is cut: token by token of the longer one, the text or the pair alone; None cuts nothing.
            stride: How many tokens of a window are in the next one (`Encoding.overflowing`).
            add_special_tokens: Whether to put special tokens around.
            is_split_into_words: Whether the texts are lists of words.

        Raises:
            InputError: A text is no string (or list of them), or has surrogates; it cannot be cut to `max_length` as
                `truncation` says; or `stride` leaves nothing of a window.
            ModelError: The tokenizer fails, or gives an id that the model lacks.
        """
        item = text if pair is None else (text, pair)
        return self.encode_batch(
            [item],
            max_length=max_length,
            truncation=truncation,
            stride=stride,
            add_special_tokens=add_special_tokens,
            is_split_into_words=is_split_into_words,
        )[0]

    def encode_batch(
        self,
        items: Sequence[Text],
        *,
        max_length: int | None = None,
        truncation: Truncation | None = "longest_first",
        stride: int = 0,
        add_special_tokens: bool = True,
        is_split_into_words: bool = False,
    ) -> list[Encoding]:
        """`encode` of many texts in one call of the library. A tuple is a pair.

        Raises:
            InputError, ModelError: As `encode`.
        """
        texts: list[Any] = []
        for item in items:
            for text in item if isinstance(item, tuple) and len(item) == 2 else (item,):
                _check_text(text, is_split_into_words)
                texts.append(text)
        held = iter(self._raw(texts, is_split_into_words))
        if truncation is None:
            max_length = None
        found = []
        for item in items:
            first = next(held)
            second = next(held) if isinstance(item, tuple) else None
            if max_length is not None:
                room = max_length - (self._added[second is not None] if add_special_tokens else 0)
                if len(first) + (0 if second is None else len(second)) > room:
                    self._cut(first, second, room, truncation, stride)
            found.append(self._processed(first, second, add_special_tokens))
        return found

    def _raw(self, texts: list[Any], is_split_into_words: bool = False) -> list[Any]:
        """The library's encodings, without special tokens and at full length."""
        try:
            return self._bare.encode_batch(texts, is_pretokenized=is_split_into_words, add_special_tokens=False)
        except BaseException as error:
            words = (part for text in texts for part in ((text,) if isinstance(text, str) else text))
            if any(re.search("[\ud800-\udfff]", word) for word in words):
                raise InputError(
                    "A text has half of a surrogate pair, which is no character. Take it out: "
                    "text.encode('utf-8', 'replace').decode()."
                ) from error
            raise _malformed(error, "The tokenizer fails on a text") from error

    def _processed(self, first: Any, second: Any, add_special_tokens: bool) -> Encoding:
        try:
            held = self._processor.post_process(first, second, add_special_tokens)
        except BaseException as error:
            raise _malformed(error, "The tokenizer cannot put its special tokens around a text") from error
        encoding = Encoding(held, None if second is None else self._pair_types)
        if self.rows is not None and max(encoding.ids, default=0) >= self.rows:
            id = max(encoding.ids)
            raise ModelError(
                f"The token {self.token(id)!r} has the id {id}, but the model has embeddings for {self.rows} tokens. "
                "The tokenizer is another model's: download the repository again."
            )
        return encoding

    def _cut(self, first: Any, second: Any, room: int, truncation: str, stride: int) -> None:
        """Cuts a text and a pair so that both fit, as `truncate_encodings` of the library."""
        if room <= 0:
            raise InputError("max_length leaves no room beside the special tokens. Give a larger one.")
        lengths = [len(first), 0 if second is None else len(second)]
        kept = list(lengths)
        over = sum(lengths) - room
        if truncation == "longest_first":
            if second is None:
                kept[0] = room
            else:
                short = min(lengths)
                long = short if short > room else max(short, room - short)
                if short + long > room:
                    short = room // 2
                    long = short + room % 2
                kept = [long, short] if lengths[0] > lengths[1] else [short, long]
        elif truncation in ("only_first", "only_second"):
            index = ("only_first", "only_second").index(truncation)
            if lengths[index] <= over:
                what = "text" if index == 0 else "pair"
                raise InputError(
                    f"The {what} has {lengths[index]} tokens, of which {over} would have to go for max_length. "
                    "Give a larger max_length, or another truncation."
                )
            kept[index] -= over
        else:
            raise InputError(
                f"truncation is {truncation!r}, but must be 'longest_first', 'only_first', 'only_second' or None."
            )
        for held, length, full in zip((first, second), kept, lengths):
            if held is None or length >= full:
                continue
            if length and stride >= length:
                raise InputError(
                    f"Windows of {length} tokens cannot overlap by {stride}. Give a smaller stride or a larger "
                    "max_length."
                )
            held.truncate(length, stride=stride if length else 0, direction=self.truncation_side)

    def pad(
        self, encodings: Sequence[Encoding], length: int | None = None, *, side: Side | None = None
    ) -> dict[str, np.ndarray]:
        """Rows of one length, as the model takes them.

        Args:
            encodings: The rows.
            length: Their length; None is that of the longest.
            side: Where to fill up; None is `padding_side`.

        Returns:
            `input_ids`, `attention_mask` and `token_type_ids`: int64 [rows, length].

        Raises:
            InputError: A row is longer.
        """
        longest = max(map(len, encodings), default=0)
        length = longest if length is None else length
        if longest > length:
            raise InputError(f"A row has {longest} tokens, more than {length}. Cut it with max_length.")
        shape = (len(encodings), length)
        ids, types = np.full(shape, self.pad_id, np.int64), np.full(shape, self.pad_type_id, np.int64)
        mask = np.zeros(shape, np.int64)
        for row, encoding in enumerate(encodings):
            n = len(encoding)
            place = slice(length - n, None) if (side or self.padding_side) == "left" else slice(n)
            ids[row, place], types[row, place], mask[row, place] = encoding.ids, encoding.type_ids, 1
        return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}

    # -- decoding

    def decode(
        self,
        ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """The text of token ids.

        Args:
            ids: Token ids.
            skip_special_tokens: Leave out special tokens.
            clean_up_tokenization_spaces: Take out spaces before punctuation and English contractions; None is the
                tokenizer's own setting.

        Raises:
            InputError: An id is no number from 0 to 2**32 - 1.
        """
        try:
            numbers = [int(id) for id in np.asarray(ids, dtype=object).reshape(-1)]
            text = self._bare.decode(numbers, skip_special_tokens=skip_special_tokens)
        except (TypeError, ValueError, OverflowError) as error:
            raise InputError(f"Token ids must be a list of integers from 0: {error}. Give such a list.") from error
        except BaseException as error:
            raise _malformed(error, "The tokenizer fails on token ids") from error
        if self.name == "CLIP":
            text = text.replace("</w>", " ").strip()
        elif self.name == "Whisper":
            text = re.sub(r"<\|\d+\.\d+\|>", "", text)
        cleans_up = self._cleans_up if clean_up_tokenization_spaces is None else clean_up_tokenization_spaces
        return _cleaned_up(text) if cleans_up else text

    def join(self, tokens: Sequence[str]) -> str:
        """The text of tokens given as strings (`convert_tokens_to_string` of transformers)."""
        decoder = self._bare.decoder
        return " ".join(tokens) if decoder is None else decoder.decode(list(tokens))

    @cached_property
    def subword_prefix(self) -> str:
        """What a token starts with that goes on with a word, as `##`; empty where tokens do not tell."""
        return getattr(self._bare.model, "continuing_subword_prefix", None) or ""

    def token(self, id: int) -> str:
        """The string of a token id, empty if there is none."""
        return self._bare.id_to_token(int(id)) or "" if id >= 0 else ""

    def id(self, token: str) -> int | None:
        """The id of a token's string, or None."""
        try:
            return self._bare.token_to_id(token)
        except UnicodeEncodeError:  # half of a surrogate pair
            return None


def _imported() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ModelError(
            "The package tokenizers is not installed, and texts need it. "
            "Install Transmuter with its extra `serving`: pip install 'transmuter[serving]'"
        ) from error
    return tokenizers


def _malformed(error: BaseException, what: str) -> ModelError:
    """The error to raise for one of the Rust library, whose panics are no `Exception`s."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    return ModelError(f"{what}: {str(error)[:200]}. Download the repository again.")


def _check_text(text: Any, is_split_into_words: bool) -> None:
    if is_split_into_words:
        if not isinstance(text, (list, tuple)) or not all(isinstance(word, str) for word in text):
            raise InputError(f"A text is a {type(text).__name__}, but must be a list of words. Split it first.")
    elif not isinstance(text, str):
        raise InputError(f"A text is a {type(text).__name__}, but must be a string. Give strings.")


def _side(config: Mapping[str, Any], key: str, default: str, file: str) -> Side:
    side = setting(config, key, str, default, file=file).lower()
    if side not in ("left", "right"):
        raise ModelError(f"{key!r} in {file} is {side!r}, but must be 'left' or 'right'. Correct the file.")
    return side


def _max_length(repository: Repository, config: Mapping[str, Any], file: str) -> int | None:
    """How many tokens the model takes: `model_max_length`, or fewer where its positions are absolute and run out."""
    held = setting(config, "model_max_length", float, None, file=file)
    if held is not None and held < 1:
        raise ModelError(f"'model_max_length' in {file} is {held:g}, but must be positive. Correct the file.")
    limits = [] if held is None or held > _UNLIMITED else [int(held)]
    if "config.json" in repository:
        kind = repository.setting("model_type", str, "")
        key = "n_positions" if "n_positions" in repository.config else "max_position_embeddings"
        positions = repository.setting(key, int)
        if positions is not None and positions > 2 and kind not in _RELATIVE_POSITIONS:
            limits.append(positions - 2 if kind in _SHIFTED_POSITIONS else positions)
    return min(limits, default=None)


def _pair_types(processor: Any) -> tuple[int, int]:
    """The type ids of a pair's tokens, as its post-processor gives them."""

    def parts(state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        if state.get("type") == "Sequence":
            for inner in state.get("processors", ()):
                yield from parts(inner)
        else:
            yield state

    types = {"A": 0, "B": 1}
    for part in parts(json.loads(processor.__getstate__())) if processor is not None else ():
        if part.get("type") == "RobertaProcessing":
            types["B"] = 0
        elif part.get("type") == "TemplateProcessing":
            types |= {p["Sequence"]["id"]: p["Sequence"]["type_id"] for p in part["pair"] if "Sequence" in p}
    return types["A"], types["B"]


def _lowers(state: Mapping[str, Any]) -> bool:
    if state.get("type") == "Sequence":
        return any(_lowers(inner) for inner in state.get("normalizers", ()))
    return state.get("type") == "Lowercase"


def _cleaned_up(text: str) -> str:
    """As `clean_up_tokenization` of transformers."""
    for spaced, plain in (
        (" .", "."),
        (" ?", "?"),
        (" !", "!"),
        (" ,", ","),
        (" ' ", "'"),
        (" n't", "n't"),
        (" 'm", "'m"),
        (" 's", "'s"),
        (" 've", "'ve"),
        (" 're", "'re"),
    ):
        text = text.replace(spaced, plain)
    return text
