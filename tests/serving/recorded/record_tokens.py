"""Records what transformers' pipelines say of the repositories in recorded_tokens.py.

    pip install transformers==4.57.6 torch onnx onnxruntime
    python tests/serving/recorded/record_tokens.py

Their classes do all but the network itself, which is the repository's ONNX file in ONNX Runtime.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import onnxruntime
import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
from transformers.modeling_outputs import ModelOutput

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import recorded_tokens as recorded  # noqa: E402


class _Network(PreTrainedModel):
    """A repository's ONNX file as a model of transformers."""

    def __init__(self, folder: Path):
        super().__init__(AutoConfig.from_pretrained(folder))
        self.session = onnxruntime.InferenceSession(str(folder / "onnx" / "model.onnx"))
        self.nothing = torch.nn.Parameter(torch.zeros(1))  # what the device is read from

    def forward(self, input_ids=None, attention_mask=None, token_type_ids=None, **_) -> ModelOutput:
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        names = [value.name for value in self.session.get_inputs()]
        outputs = self.session.run(None, {name: given[name].numpy() for name in names})
        found = {value.name: torch.from_numpy(x) for value, x in zip(self.session.get_outputs(), outputs)}
        return ModelOutput(found)


def _pipeline(task: str, folder: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    kind = {
        "token-classification": transformers.TokenClassificationPipeline,
        "fill-mask": transformers.FillMaskPipeline,
        "question-answering": transformers.QuestionAnsweringPipeline,
    }[task]
    kind.check_model_type = lambda self, supported: None
    return kind(model=_Network(folder), tokenizer=tokenizer, framework="pt")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(x) for x in value]
    return value.item() if hasattr(value, "item") else value


def _attempt(call: Any, *given: Any, **options: Any) -> dict[str, Any]:
    try:
        return {"output": _plain(call(*given, **options))}
    except BaseException as error:  # the Rust library's panics are no `Exception`s
        return {"error": type(error).__name__}


def tokens(pipeline: Any) -> list[dict[str, Any]]:
    def listed(text: Any, options: dict[str, Any]) -> list[list[Any]]:
        found = pipeline(text, **options)
        found = found[0] if "is_split_into_words" in options else found
        name = "entity" if options["aggregation_strategy"] == "none" else "entity_group"
        return [[e["start"], e["end"], e[name], round(float(e["score"]), 7), e["word"]] for e in found]

    cases = []
    for aggregation in recorded.AGGREGATIONS:
        for text in recorded.TEXTS:
            options = {"aggregation_strategy": aggregation}
            cases.append({"input": text, "options": options, **_attempt(listed, text, options)})
        for words in recorded.WORDS:
            options = {"aggregation_strategy": aggregation, "is_split_into_words": True}
            cases.append({"input": words, "options": options, **_attempt(listed, words, options)})
        if aggregation != "none":
            for stride in recorded.STRIDES:
                options = {"aggregation_strategy": aggregation, "stride": stride}
                cases += [
                    {"input": text, "options": options, **_attempt(listed, text, options)}
                    for text in (recorded.LONG, recorded.TEXTS[0], "")
                ]
    options = {"aggregation_strategy": "simple", "ignore_labels": ["PER", "LOC"]}
    cases.append({"input": recorded.TEXTS[0], "options": options, **_attempt(listed, recorded.TEXTS[0], options)})
    return cases


def masks(pipeline: Any) -> list[dict[str, Any]]:
    cases = []
    options = recorded.MASK_OPTIONS + (recorded.TARGETS if pipeline.tokenizer.mask_token == "[MASK]" else [])
    for chosen in options:
        for text in recorded.MASKED:
            text = text.replace("{}", pipeline.tokenizer.mask_token)
            cases.append({"input": text, "options": chosen, **_attempt(pipeline, text, **chosen)})
    return cases


def questions(pipeline: Any) -> list[dict[str, Any]]:
    cases = []
    for options in recorded.QUESTION_OPTIONS:
        for question, context in recorded.QUESTIONS:
            found = _attempt(pipeline, question=question, context=context, **options)
            cases.append({"input": {"question": question, "context": context}, "options": options, **found})
    return cases


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    record = {"token-classification": tokens, "fill-mask": masks, "question-answering": questions}
    with tempfile.TemporaryDirectory() as temporary:
        for task, function in record.items():
            found = {}
            for name, (kind, make) in recorded.REPOSITORIES.items():
                if kind == task:
                    found[name] = function(_pipeline(task, make(Path(temporary) / name)))
            lines = ",\n".join(
                f"{json.dumps(name)}: [\n" + ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases) + "\n]"
                for name, cases in found.items()
            )
            (HERE / f"{task}.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
            print(task, sum(map(len, found.values())), sum("error" in c for cs in found.values() for c in cs))


if __name__ == "__main__":
    main()
