"""Repositories whose models are short formulas, so that a test can say in NumPy what a serving must give.

Each word piece has a vector, and each type one. A text's hidden states are those of its tokens, moved by the mean of
all that are attended to; logits are products of that mean, or, of a decoder, of the mean so far. All weights are sines,
so that they are the same wherever they are made. `record.py` makes them too, for what transformers and
sentence-transformers say of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

WIDTH = 12
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = (
    *("the", "cat", "sat", "on", "mat", "good", "bad", "film", "phone", "is", "this", "example", "of", "query"),
    *("passage", "yes", "no", "berlin", "people"),
)
SIGNS = "abcdefghijklmnopqrstuvwxyz0123456789.,:;!?-'\"()/日本語中文é🙂"
PIECES = (*SPECIAL, *WORDS, *SIGNS, *(f"##{sign}" for sign in "abcdefghijklmnopqrstuvwxyz0123456789"))
BYTES = pre_tokenizers.ByteLevel.alphabet()
CHAT = ("<|im_start|>", "<|im_end|>")


# -- the formulas


def weights(rows: int, columns: int, phase: float) -> np.ndarray:
    """[rows, columns] float32 between -1 and 1."""
    places = np.arange(rows * columns, dtype=np.float64).reshape(rows, columns)
    return np.sin(1.7 * places + phase).astype(np.float32)


def hidden_states(ids: Sequence[int], types: Sequence[int] | None = None) -> np.ndarray:
    """The hidden states of a text: [tokens, WIDTH]."""
    types = np.zeros(len(ids), int) if types is None else types
    tokens = weights(len(PIECES), WIDTH, 0.1)[np.asarray(ids)] + weights(2, WIDTH, 0.7)[np.asarray(types)]
    return tokens + tokens.mean(axis=0)


def logits_of(ids: Sequence[int], types: Sequence[int] | None, classes: int) -> np.ndarray:
    """The logits of a text or pair: [classes]."""
    return hidden_states(ids, types).mean(axis=0) @ weights(WIDTH, classes, 0.3)


def next_logits(ids: Sequence[int], vocabulary: int) -> np.ndarray:
    """The logits of a decoder after the last token: [vocabulary]. Later tokens weigh more."""
    tokens = weights(vocabulary, WIDTH, 0.1)[np.asarray(ids)]
    places = np.arange(1, len(ids) + 1, dtype=np.float32)[:, None]
    return 3 * (tokens * places).sum(axis=0) / places.sum() @ weights(WIDTH, vocabulary, 0.3)


# -- the graphs


def encoder(
    *, classes: int | None = None, outputs: Sequence[str] = ("last_hidden_state",), types: bool = True
) -> ModelProto:
    """A graph with hidden states, or with logits of `classes`.

    `sentence_embedding` among the outputs is twice the hidden states' mean, `pooler_output` three times the first one.
    """
    arrays = {"table": weights(len(PIECES), WIDTH, 0.1), "kinds": weights(2, WIDTH, 0.7)}
    axes: dict[str, Any] = {"middle": [1], "last": [2]}
    node = helper.make_node
    nodes = [
        node("Gather", ["table", "input_ids"], ["tokens" if types else "x"]),
        node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        node("Unsqueeze", ["mask", "last"], ["shares"]),
        node("ReduceSum", ["shares", "middle"], ["count"]),
        node("Mul", ["x", "shares"], ["attended"]),
        node("ReduceSum", ["attended", "middle"], ["sum"]),
        node("Div", ["sum", "count"], ["mean"]),
        node("Add", ["x", "mean"], ["last_hidden_state"]),
        node("Add", ["mean", "mean"], ["mean_state"]),  # the mean of the hidden states
        node("Squeeze", ["mean_state", "middle"], ["flat"]),
    ]
    if types:
        nodes[1:1] = [
            node("Gather", ["kinds", "token_type_ids"], ["kind"]),
            node("Add", ["tokens", "kind"], ["x"]),
        ]
    shapes: dict[str, list[Any]] = {"last_hidden_state": ["batch", "sequence", WIDTH]}
    shapes |= {name: ["batch", WIDTH] for name in ("sentence_embedding", "pooler_output")}
    if classes is not None:
        outputs, shapes["logits"] = ("logits",), ["batch", classes]
        arrays["head"] = weights(WIDTH, classes, 0.3)
        nodes.append(node("MatMul", ["flat", "head"], ["logits"]))
    if "token_embeddings" in outputs:
        nodes.append(node("Identity", ["last_hidden_state"], ["token_embeddings"]))
        shapes["token_embeddings"] = shapes["last_hidden_state"]
    if "sentence_embedding" in outputs:
        arrays["two"] = np.float32(2)
        nodes.append(node("Mul", ["flat", "two"], ["sentence_embedding"]))
    if "pooler_output" in outputs:
        arrays["three"], axes["zero"] = np.float32(3), 0
        nodes += [
            node("Gather", ["last_hidden_state", "zero"], ["first"], axis=1),
            node("Mul", ["first", "three"], ["pooler_output"]),
        ]
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if types else [])]
    return _model(nodes, names, {name: shapes[name] for name in outputs}, arrays, axes)


def decoder(vocabulary: int) -> ModelProto:
    """A graph with the logits of a next token at each position, where each attends to those before it."""
    node = helper.make_node
    nodes = [
        node("Gather", ["table", "input_ids"], ["tokens"]),
        node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        node("Unsqueeze", ["mask", "last"], ["shares"]),
        node("Cast", ["position_ids"], ["places"], to=TensorProto.FLOAT),
        node("Unsqueeze", ["places", "last"], ["place"]),
        node("Add", ["place", "one"], ["weight"]),
        node("Mul", ["weight", "shares"], ["attended"]),
        node("Mul", ["tokens", "attended"], ["weighted"]),
        node("CumSum", ["weighted", "middle"], ["sum"]),
        node("CumSum", ["attended", "middle"], ["total"]),
        node("Max", ["total", "one"], ["divisor"]),  # of padding on the left
        node("Div", ["sum", "divisor"], ["mean"]),
        node("MatMul", ["mean", "head"], ["logits"]),
    ]
    arrays = {
        "table": weights(vocabulary, WIDTH, 0.1),
        "head": 3 * weights(WIDTH, vocabulary, 0.3),
        "one": np.float32(1),
    }
    shapes = {"logits": ["batch", "sequence", vocabulary]}
    return _model(nodes, ["input_ids", "attention_mask", "position_ids"], shapes, arrays, {"middle": 1, "last": [2]})


def _model(
    nodes: Sequence[Any],
    inputs: Sequence[str],
    outputs: Mapping[str, Sequence[Any]],
    arrays: Mapping[str, np.ndarray],
    numbers: Mapping[str, Any],
) -> ModelProto:
    held = [numpy_helper.from_array(np.asarray(x), name) for name, x in arrays.items()]
    held += [numpy_helper.from_array(np.asarray(x, np.int64), name) for name, x in numbers.items()]
    graph = helper.make_graph(
        nodes,
        "formula",
        [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "sequence"]) for name in inputs],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()],
        held,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


# -- the tokenizers


def word_pieces(*, lower: bool = True) -> Tokenizer:
    """A WordPiece tokenizer as BERT's."""
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(PIECES)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def byte_pieces() -> Tokenizer:
    """A byte-level BPE tokenizer with the tokens `yes` and `no`, as a decoder's."""
    merges = [("y", "e"), ("ye", "s"), ("n", "o")]
    vocabulary = {piece: i for i, piece in enumerate([*sorted(BYTES), "ye", "yes", "no"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(sign, special=True) for sign in ("<|endoftext|>", *CHAT)])
    return tokenizer


RERANKER_TEMPLATE = """\
{%- set system = messages | selectattr("role", "eq", "system") | map(attribute="content") | first | default("judge") -%}
<|im_start|>system
{{ system }}<|im_end|>
<|im_start|>user
<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}
<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}<|im_end|>
<|im_start|>assistant
"""


# -- the repositories


def write(
    folder: Path,
    model: ModelProto,
    *,
    config: Mapping[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    max_length: int = 64,
    files: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a repository of a formula.

    Args:
        folder: Where; it need not exist.
        model: The graph.
        config: Entries of `config.json` besides those of a BERT.
        tokenizer: `word_pieces()` by default.
        tokenizer_config: Entries of `tokenizer_config.json` besides those of BERT's.
        max_length: `model_max_length`.
        files: Further files by name: a string as it is, anything else as JSON.
    """
    (folder / "onnx").mkdir(parents=True, exist_ok=True)
    (folder / "onnx" / "model.onnx").write_bytes(model.SerializeToString())
    (tokenizer or word_pieces()).save(str(folder / "tokenizer.json"))
    roles = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    contents: dict[str, Any] = {
        "config.json": {"model_type": "bert", "max_position_embeddings": 512, **(config or {})},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_length,
            **(roles | {"mask_token": "[MASK]"} if tokenizer_config is None else tokenizer_config),
        },
        **(files or {}),
    }
    for name, held in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(held if isinstance(held, str) else json.dumps(held), encoding="utf-8")
    return folder


def sentence_files(
    *modules: str,
    pooling: Mapping[str, Any] | None = None,
    transformer: Mapping[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """The files of a sentence-transformers model with these modules after the transformer."""
    kinds = ("Transformer", *modules)
    files: dict[str, Any] = {
        "modules.json": [
            {
                "idx": i,
                "name": str(i),
                "path": f"{i}_{kind}" if i else "",
                "type": f"sentence_transformers.models.{kind}",
            }
            for i, kind in enumerate(kinds)
        ],
        "config_sentence_transformers.json": {"__version__": {"sentence_transformers": "3.0.0"}, **settings},
    }
    if "Pooling" in kinds:
        files[f"{kinds.index('Pooling')}_Pooling/config.json"] = {
            "word_embedding_dimension": WIDTH,
            **(pooling or {"pooling_mode_mean_tokens": True}),
        }
    if transformer is not None:
        files["sentence_bert_config.json"] = transformer
    return files


def reranker_files(*, prompts: Mapping[str, str] | None = None, **score: int) -> dict[str, Any]:
    """The files of a causal language model that ranks through `RERANKER_TEMPLATE`."""
    return {
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
            {
                "idx": 1,
                "name": "1",
                "path": "1_LogitScore",
                "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
            },
        ],
        "1_LogitScore/config.json": {"module_input_name": "causal_logits", **score},
        "sentence_bert_config.json": {
            "transformer_task": "text-generation",
            "modality_config": {
                "text": {"method": "forward", "method_output_name": "logits"},
                "message": {"method": "forward", "method_output_name": "logits", "format": "flat"},
            },
            "module_output_name": "causal_logits",
        },
        "config_sentence_transformers.json": {
            "__version__": {"sentence_transformers": "5.4.0"},
            "model_type": "CrossEncoder",
            "activation_fn": "torch.nn.modules.linear.Identity",
            "prompts": dict(prompts or {}),
        },
        "chat_template.jinja": RERANKER_TEMPLATE,
    }


RERANKER_CONFIG = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 512}
RERANKER_TOKENS = {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>", "additional_special_tokens": list(CHAT)}
