"""Records what transformers and sentence-transformers say of the repositories in recorded_cases.py.

    pip install transformers==4.57.6 sentence-transformers==5.7.0 torch onnx onnxruntime
    python tests/serving/recorded/record.py

Their classes do all but the network itself, which is the repository's ONNX file in ONNX Runtime.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import sentence_transformers
import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput, SequenceClassifierOutput

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from recorded_cases import REPOSITORIES, TEXTS  # noqa: E402

QUERY = "a query of berlin"
DOCUMENTS = ["the cat sat on the mat", "berlin people", "", "a good film " * 60, "berlin people", "yes 日本 🙂"]


class _Network(PreTrainedModel):
    """A repository's ONNX file as a model of transformers."""

    def __init__(self, folder: Path):
        super().__init__(AutoConfig.from_pretrained(folder))
        self.session = onnxruntime.InferenceSession(str(folder / "onnx" / "model.onnx"))
        self.nothing = torch.nn.Parameter(torch.zeros(1))  # what the device is read from

    def run(self, **inputs: Any) -> torch.Tensor:
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        names = [value.name for value in self.session.get_inputs()]
        return torch.from_numpy(self.session.run(None, {name: inputs[name].numpy() for name in names})[0])


class _Encoder(_Network):
    def forward(self, input_ids=None, attention_mask=None, token_type_ids=None, **_) -> BaseModelOutput:
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        found = self.run(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
        return BaseModelOutput(last_hidden_state=found)


class _Classifier(_Network):
    def forward(self, input_ids=None, attention_mask=None, token_type_ids=None, **_) -> SequenceClassifierOutput:
        found = self.run(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
        return SequenceClassifierOutput(logits=found)


class _Decoder(_Network):
    def forward(self, input_ids=None, attention_mask=None, **_) -> CausalLMOutput:
        return CausalLMOutput(logits=self.run(input_ids=input_ids, attention_mask=attention_mask))


for _auto, _network in (("", _Encoder), ("ForSequenceClassification", _Classifier), ("ForCausalLM", _Decoder)):
    _class = getattr(transformers, f"AutoModel{_auto}")
    _class.from_pretrained = classmethod(lambda cls, folder, *_, _network=_network, **__: _network(Path(folder)))


def embeddings(folder: Path, name: str) -> list[dict[str, Any]]:
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    ways: list[dict[str, str]] = [{}]
    if "prompt" in name or "messages" in name:
        ways += [{"prompt_name": "passage"}, {"prompt": "good "}, {"prompt_name": "document"}]
    return [
        {"input": TEXTS, "kwargs": way, "output": np.round(model.encode(TEXTS, **way).astype(float), 7).tolist()}
        for way in ways
    ]


def classifications(folder: Path, name: str) -> list[dict[str, Any]]:
    pipeline = transformers.pipeline(
        "text-classification", model=_Classifier(folder), tokenizer=AutoTokenizer.from_pretrained(folder)
    )
    inputs: list[Any] = [text for text in TEXTS if text.strip("\x00\t\n")]
    inputs += [
        {"text": "the cat", "text_pair": "a good film"},
        {"text": "a good cat " * 30, "text_pair": "yes"},
        {"text": "a good cat " * 30, "text_pair": "the bad film " * 4},
        {"text": "no", "text_pair": "berlin people " * 30},
        {"text": "a cat", "text_pair": ""},
    ]
    ways: list[dict[str, Any]] = [{}, {"top_k": None}, {"top_k": 2}]
    ways += [{"top_k": None, "function_to_apply": f} for f in ("softmax", "sigmoid", "none")]
    found = []
    for way in ways:
        outputs = [pipeline(x, truncation=True, **way) for x in inputs]
        found.append({"input": inputs, "kwargs": way, "output": [x if isinstance(x, list) else [x] for x in outputs]})
    return found


def rankings(folder: Path, name: str) -> list[dict[str, Any]]:
    model = sentence_transformers.CrossEncoder(str(folder), device="cpu")
    ways: list[dict[str, Any]] = [{}, {"top_k": 2, "return_documents": True}, {"prompt": "the "}]
    ways += [{"prompt_name": "web"}] if "prompts" in name else []
    found = []
    for way in ways:
        ranked = model.rank(QUERY, DOCUMENTS, **way)
        results = [{"index": x.pop("corpus_id"), **x, "score": float(x["score"])} for x in ranked]
        found.append({"input": {"query": QUERY, "documents": DOCUMENTS}, "kwargs": way, "output": results})
    return found


def zero_shots(folder: Path, name: str) -> list[dict[str, Any]]:
    pipeline = transformers.pipeline(
        "zero-shot-classification", model=_Classifier(folder), tokenizer=AutoTokenizer.from_pretrained(folder)
    )
    labels = ["a film", "berlin", "good", "berlin"]
    ways: list[dict[str, Any]] = [
        {"candidate_labels": labels},
        {"candidate_labels": labels, "multi_label": True},
        {"candidate_labels": ["good"]},
        {"candidate_labels": "good, bad,, yes ", "hypothesis_template": "is it {}?"},
        {"candidate_labels": labels, "hypothesis_template": "{} {{}}"},
    ]
    texts = [text for text in TEXTS if text]
    return [{"input": texts, "kwargs": way, "output": [pipeline(text, **way) for text in texts]} for way in ways]


RECORDERS = {
    "embedding": embeddings,
    "classification": classifications,
    "ranking": rankings,
    "zero-shot": zero_shots,
}


def main() -> None:
    versions = {m.__name__: m.__version__ for m in (transformers, sentence_transformers, torch, onnxruntime)}
    with tempfile.TemporaryDirectory() as place:
        for task, recorder in RECORDERS.items():
            cases = []
            for name in REPOSITORIES:
                if name.startswith(f"{task}/"):
                    folder = REPOSITORIES[name](Path(place, name))
                    cases += [{"repository": name, **case} for case in recorder(folder, name)]
            lines = ",\n".join(json.dumps(case, ensure_ascii=True) for case in cases)
            text = f'{{"versions": {json.dumps(versions)},\n"cases": [\n{lines}\n]}}\n'
            (HERE / f"{task}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    main()
