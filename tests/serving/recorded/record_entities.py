"""Makes the tiny GLiNER repositories beside this file, and records what gliner says of them.

    pip install gliner==0.2.29 transformers==4.57.6 torch onnx
    python tests/serving/recorded/record_entities.py

The weights are random, and large enough that scores lie on both sides of any threshold; the graphs are those of
`export_to_onnx`. gliner itself runs the PyTorch weights.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from gliner import GLiNER, GLiNERConfig
from tokenizers import AddedToken
from transformers import DebertaV2TokenizerFast

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from tiny_repositories import unigram  # noqa: E402

KINDS: dict[str, dict[str, Any]] = {
    "gliner_span": {"span_mode": "markerV0", "max_width": 3},
    "gliner_token": {"span_mode": "token_level"},
    "gliner_token_mean": {"span_mode": "token_level", "subtoken_pooling": "mean", "num_rnn_layers": 0},
}
LABELS = ["person", "city", "small animal"]
TEXTS = [
    "The cat sat on the mat in Paris.",
    "Where is the capital of France? It is Paris, not new-york_city.",
    "café cafe\u0301 日本語 中文 🙂👍 ﬁ",
    "<<ENT>> [SEP] dog",
    "a\tdog \n cat",
    "x",
    "The red house and the big river bridge of Berlin " * 4,
]
OPTIONS: list[dict[str, Any]] = [
    {"threshold": 0.5},
    {"threshold": 0.3, "flat_ner": False},
    {"threshold": 0.4, "multi_label": True},
    {"threshold": 0.2, "flat_ner": False, "multi_label": True},
    {"threshold": 0.0},
]
OWN_LABELS: list[Any] = [["person"], ["city", "dog", "city"], {"thing": "a small red thing", "place": "city"}]


def make(folder: Path, kind: str) -> GLiNER:
    made = unigram()
    made.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("[FLERT]", "<<ENT>>", "<<SEP>>")]
    )
    tokenizer = DebertaV2TokenizerFast(tokenizer_object=made, model_max_length=96, **_names())
    with tempfile.TemporaryDirectory() as temporary:
        tokenizer.save_pretrained(temporary)
        config = GLiNERConfig(
            model_name=temporary,
            hidden_size=16,
            max_len=32,
            dropout=0.0,
            vocab_size=len(tokenizer),
            class_token_index=tokenizer.convert_tokens_to_ids("<<ENT>>"),
            encoder_config={
                "model_type": "deberta-v2",
                "vocab_size": len(tokenizer),
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 32,
                "max_position_embeddings": 96,
                "relative_attention": True,
                "position_buckets": 16,
                "norm_rel_ebd": "layer_norm",
                "share_att_key": True,
                "pos_att_type": ["p2c", "c2p"],
                "position_biased_input": False,
                "type_vocab_size": 0,
            },
            **KINDS[kind],
        )
        torch.manual_seed(7)
        model = GLiNER.from_config(config, backbone_from_pretrained=False)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("out_mlp.3.bias"):
                weight.copy_(
                    torch.tensor([8.0, 3.5, 1.0])
                )  # or hardly any words would start, end and fill the same entity
            if weight.ndim > 1:
                weight.copy_(
                    torch.randn_like(weight) * (0.8 if "embeddings" in name else 0.45 if "span" in kind else 0.35)
                )
    model.eval()
    target = folder / kind
    model.config.model_name = ""
    model.export_to_onnx(target, opset=17)
    (target / "onnx").mkdir(exist_ok=True)
    (target / "model.onnx").rename(target / "onnx" / "model.onnx")
    config = json.loads((target / "gliner_config.json").read_text())
    config.pop("encoder_config", None)
    (target / "gliner_config.json").write_text(json.dumps(config, indent=1) + "\n")
    return model


def _names() -> dict[str, str]:
    return {
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "mask_token": "[MASK]",
    }


def main() -> None:
    warnings.simplefilter("ignore")
    recorded: dict[str, list[dict[str, Any]]] = {}
    for kind in KINDS:
        model = make(HERE, kind)
        cases = recorded[kind] = []

        def record(texts: list[str], labels: Any, options: dict[str, Any], model: GLiNER = model) -> None:
            found = [
                [[e["start"], e["end"], e["label"], round(e["score"], 7), e["text"]] for e in entities]
                for entities in model.inference(texts, labels, **options)
            ]
            cases.append({"texts": texts, "labels": labels, "options": options, "entities": found})  # noqa: B023

        for options in OPTIONS:
            for text in TEXTS:
                record([text], LABELS, options)
        for labels in OWN_LABELS:
            record(TEXTS[:2], labels, {"threshold": 0.3})
        record(["", " \n", TEXTS[0]], LABELS, {"threshold": 0.3})
        record(TEXTS[:3], [["person"], LABELS, ["city", "dog"]], {"threshold": 0.3})
    path = HERE / "entities.json"
    lines = ",\n".join(
        f"{json.dumps(kind)}: [\n" + ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases) + "\n]"
        for kind, cases in recorded.items()
    )
    path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    print({kind: sum(len(e) for c in cases for e in c["entities"]) for kind, cases in recorded.items()})


if __name__ == "__main__":
    main()
