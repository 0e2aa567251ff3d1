"""Tiny Hugging Face repositories with ONNX models, made when a test wants one: random weights, real structure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import tokenizers
from onnx import TensorProto, helper, numpy_helper
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

Kind = Literal["wordpiece", "bpe", "unigram"]
Head = Literal["hidden", "classification", "tokens", "fill_mask", "question_answering"]

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "on",
    "mat",
    "in",
    "paris",
    "berlin",
    "is",
    "capital",
    "of",
    "france",
    "germany",
    "who",
    "what",
    "where",
    "when",
    "and",
    "or",
    "not",
    "people",
    "live",
    "likes",
    "big",
    "small",
    "red",
    "house",
    "river",
    "bridge",
    "tower",
    "city",
    "new",
    "york",
]
"""Words that every vocabulary has whole; other words fall into pieces."""
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,!?'\"-:;()/éü日本語中文🙂"


# ---- tokenizers ----------------------------------------------------------------------------------------------------


def wordpiece(*, lower_case: bool = True) -> tokenizers.Tokenizer:
    """As BERT's: [PAD] 0, [UNK] 1, [CLS] 2, [SEP] 3, [MASK] 4."""
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = CHARACTERS if lower_case else CHARACTERS + "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    pieces = [*specials, *letters, *(f"##{c}" for c in letters), *WORDS]
    pieces += [] if lower_case else [word.capitalize() for word in WORDS]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    made = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100))
    made.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    made.add_special_tokens(specials)
    return made


def bpe() -> tokenizers.Tokenizer:
    """As RoBERTa's, byte by byte: <s> 0, <pad> 1, </s> 2, <unk> 3, <mask> 4."""
    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    pieces = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = []
    for word in [f"Ġ{word}" for word in WORDS] + list(WORDS):
        for end in range(1, len(word)):
            merges.append((word[:end], word[end]))
            pieces.append(word[: end + 1])
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, list(dict.fromkeys(merges)), unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), trim_offsets=True, add_prefix_space=False
    )
    made.add_special_tokens([*specials[:4], tokenizers.AddedToken("<mask>", lstrip=True, special=True)])
    return made


def unigram() -> tokenizers.Tokenizer:
    """As DeBERTa-v3's, with NFKC: [PAD] 0, [CLS] 1, [SEP] 2, [UNK] 3, [MASK] 4."""
    specials = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
    pieces = [(special, 0.0) for special in specials] + [("▁", -3.0)]
    pieces += [(f"▁{word}", -4.0) for word in WORDS] + [(character, -8.0) for character in CHARACTERS]
    made = tokenizers.Tokenizer(models.Unigram(list(dict(pieces).items()), unk_id=3, byte_fallback=False))
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    made.add_special_tokens(specials)
    return made


_TOKENIZERS = {"wordpiece": wordpiece, "bpe": bpe, "unigram": unigram}
_CLASSES = {
    "wordpiece": ("bert", "BertTokenizer"),
    "bpe": ("roberta", "RobertaTokenizer"),
    "unigram": ("deberta-v2", "DebertaV2Tokenizer"),
}


def special_tokens(kind: Kind) -> dict[str, str]:
    """Special tokens by role."""
    if kind == "bpe":
        names = {
            "bos": "<s>",
            "eos": "</s>",
            "cls": "<s>",
            "sep": "</s>",
            "unk": "<unk>",
            "pad": "<pad>",
            "mask": "<mask>",
        }
    else:
        names = {"cls": "[CLS]", "sep": "[SEP]", "unk": "[UNK]", "pad": "[PAD]", "mask": "[MASK]"}
    return {f"{role}_token": token for role, token in names.items()}


# ---- models --------------------------------------------------------------------------------------------------------


@dataclass
class _Graph:
    """Nodes and weights as they are added."""

    draws: np.random.Generator
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[TensorProto] = field(default_factory=list)

    def weight(self, *shape: int, scale: float | None = None) -> str:
        scale = shape[-2] ** -0.5 if scale is None else scale
        return self.constant((self.draws.standard_normal(shape) * scale).astype(np.float32))

    def constant(self, array: Any) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(array), f"w{len(self.weights)}"))
        return self.weights[-1].name

    def __call__(self, operator: str, *inputs: str, outputs: Sequence[str] = (), **attributes: Any) -> str:
        outputs = list(outputs) or [f"v{len(self.nodes)}"]
        self.nodes.append(helper.make_node(operator, inputs, outputs, **attributes))
        return outputs[0]


def encoder(
    rows: int,
    *,
    head: Head = "hidden",
    labels: int = 3,
    width: int = 16,
    layers: int = 2,
    positions: int = 64,
    first_position: int = 0,
    has_types: bool = True,
    seed: int = 0,
) -> onnx.ModelProto:
    """An encoder with attention, masks, positions and types, as optimum exports one.

    Args:
        rows: Of the embedding table.
        head: `hidden` gives last_hidden_state [batch, sequence, width], `classification` logits [batch, labels],
            `tokens` logits [batch, sequence, labels], `fill_mask` logits [batch, sequence, rows], and
            `question_answering` start_logits and end_logits [batch, sequence].
        labels: How many labels the head has.
        width, layers, positions: Sizes.
        first_position: Of the first token: 2 in RoBERTa.
        has_types: Whether there is an input `token_type_ids`.
        seed: Of the weights.
    """
    g = _Graph(np.random.default_rng(seed))
    g("Shape", "input_ids", outputs=["shape"])
    g("Gather", "shape", g.constant(np.int64(1)), outputs=["sequence"])
    zero, one = g.constant(np.int64(0)), g.constant(np.int64(1))
    places = g("Range", zero, "sequence", one)
    places = g("Add", places, g.constant(np.int64(first_position)))
    x = g("Gather", g.weight(rows, width, scale=1.0), "input_ids")
    x = g("Add", x, g("Gather", g.weight(positions + first_position, width, scale=0.5), places))
    if has_types:
        x = g("Add", x, g("Gather", g.weight(2, width, scale=0.5), "token_type_ids"))
    ones, zeros = g.constant(np.ones(width, np.float32)), g.constant(np.zeros(width, np.float32))
    x = g("LayerNormalization", x, ones, zeros, axis=-1)
    # [batch, 1, sequence]: far below every score where the mask is 0
    mask = g("Cast", "attention_mask", to=TensorProto.FLOAT)
    mask = g("Mul", g("Sub", mask, g.constant(np.float32(1))), g.constant(np.float32(1e9)))
    mask = g("Unsqueeze", mask, g.constant(np.array([1], np.int64)))
    for _ in range(layers):
        query, key, value = (g("MatMul", x, g.weight(width, width)) for _ in range(3))
        scores = g("MatMul", query, g("Transpose", key, perm=[0, 2, 1]))
        scores = g("Add", g("Mul", scores, g.constant(np.float32(width**-0.5))), mask)
        mixed = g("MatMul", g("Softmax", scores, axis=-1), value)
        x = g("LayerNormalization", g("Add", x, mixed), ones, zeros, axis=-1)
        inner = g("Tanh", g("MatMul", x, g.weight(width, 2 * width)))
        x = g("LayerNormalization", g("Add", x, g("MatMul", inner, g.weight(2 * width, width))), ones, zeros, axis=-1)
    if head == "hidden":
        g("Identity", x, outputs=["last_hidden_state"])
        outputs = [("last_hidden_state", ("batch_size", "sequence_length", width))]
    elif head == "classification":
        first = g("Gather", x, zero, axis=1)
        pooled = g("Tanh", g("MatMul", first, g.weight(width, width)))
        g("MatMul", pooled, g.weight(width, labels, scale=1.0), outputs=["logits"])
        outputs = [("logits", ("batch_size", labels))]
    elif head == "question_answering":
        both = g("MatMul", x, g.weight(width, 2, scale=1.0))
        for index, name in enumerate(("start_logits", "end_logits")):
            g("Gather", both, g.constant(np.int64(index)), outputs=[name], axis=2)
        outputs = [(name, ("batch_size", "sequence_length")) for name in ("start_logits", "end_logits")]
    else:
        count = rows if head == "fill_mask" else labels
        g("MatMul", x, g.weight(width, count, scale=1.0), outputs=["logits"])
        outputs = [("logits", ("batch_size", "sequence_length", count))]
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if has_types else [])]
    tokens = ("batch_size", "sequence_length")
    graph = helper.make_graph(
        g.nodes,
        head,
        [helper.make_tensor_value_info(name, TensorProto.INT64, tokens) for name in names],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs],
        g.weights,
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(made)
    return made


# ---- repositories --------------------------------------------------------------------------------------------------


def make_repository(
    folder: Path,
    *,
    head: Head = "hidden",
    kind: Kind = "wordpiece",
    labels: Sequence[str] = ("negative", "neutral", "positive"),
    max_length: int | None = 64,
    lower_case: bool = True,
    config: Mapping[str, Any] | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    files: Mapping[str, Any] | None = None,
    **model: Any,
) -> Path:
    """Writes a repository: `onnx/model.onnx`, `config.json`, `tokenizer.json` and its settings.

    Args:
        folder: Where; it is made.
        head: What the model gives, as that of `encoder`.
        kind: The tokenizer.
        labels: Of `classification` and `tokens`.
        max_length: `model_max_length` of the tokenizer.
        lower_case: Of the WordPiece tokenizer.
        config, tokenizer_config: Further entries of those files; None leaves an entry out.
        files: Further files by name: text, bytes, or a value to be written as JSON.
        model: As the keywords of `encoder`.

    Returns:
        The folder.
    """
    made = wordpiece(lower_case=lower_case) if kind == "wordpiece" else _TOKENIZERS[kind]()
    model_type, tokenizer_class = _CLASSES[kind]
    options = {"rows": made.get_vocab_size(), "labels": len(labels), "has_types": kind != "bpe", "positions": 64}
    options |= {"first_position": 2 if kind == "bpe" else 0, **model}
    heads = {
        "hidden": "Model",
        "classification": "ForSequenceClassification",
        "tokens": "ForTokenClassification",
        "fill_mask": "ForMaskedLM",
        "question_answering": "ForQuestionAnswering",
    }
    settings: dict[str, Any] = {
        "architectures": [{"bert": "Bert", "roberta": "Roberta"}.get(model_type, "DebertaV2") + heads[head]],
        "model_type": model_type,
        "vocab_size": options["rows"],
        "hidden_size": options.get("width", 16),
        "max_position_embeddings": options["positions"] + options["first_position"],
        "pad_token_id": made.token_to_id(special_tokens(kind)["pad_token"]),
    }
    if head in ("classification", "tokens"):
        settings["id2label"] = {str(i): label for i, label in enumerate(labels)}
        settings["label2id"] = {label: i for i, label in enumerate(labels)}
    about_tokens: dict[str, Any] = {
        "tokenizer_class": tokenizer_class,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        **special_tokens(kind),
    }
    if kind == "wordpiece":
        about_tokens["do_lower_case"] = lower_case
    held = {
        "config.json": _without_none({**settings, **(config or {})}),
        "tokenizer_config.json": _without_none({**about_tokens, **(tokenizer_config or {})}),
        "special_tokens_map.json": special_tokens(kind),
        "tokenizer.json": made.to_str(),
        "onnx/model.onnx": encoder(head=head, **options).SerializeToString(),
        **(files or {}),
    }
    for name, content in held.items():
        if content is None:
            continue
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder


def _without_none(held: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in held.items() if value is not None}
