"""Compares servings with sentence-transformers and ONNX Runtime, on the same threads and in turns.

    python benchmarks/serving.py --sentences 1000 --repeats 5 --json results.json

All embed the same sentences with a model of MiniLM-L6's size, whose weights are random, as is the language. Each
runtime has a process of its own, which waits while another works. It needs sentence-transformers, unless `--only`
leaves that out.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import graphs
import inference
import numpy as np
import onnx
import turns
from bars import Row, report
from onnx import numpy_helper

Encode = Callable[[Sequence[str]], np.ndarray]
"""Embeds sentences: [sentences, hidden]."""

BATCH = 32
"""Sentences of a batch, sentence-transformers' default."""
LENGTHS = (*range(8, 48, 4), *range(48, 96, 8), *range(96, 128, 16), *range(128, 257, 32))
"""What they are padded to."""
FEW_LENGTHS = (16, 24, 32, 48, 64, 96, 128, 256)
"""And in a started serving, which needs all shapes from the beginning."""
LONGEST, HIDDEN, VOCABULARY = 256, 384, 30522
CALLERS = 64
"""Threads that call a started serving at once."""
_WARMUP = 1
"""Rounds that are not measured; their results are compared."""


# ---- a language, and a repository of a model for it ----------------------------------------------------------------


def words(count: int, random: np.random.RandomState) -> list[str]:
    """Different words of two to five syllables."""
    onsets, vowels = [*"bcdfghjklmnprstvwz", "br", "cl", "dr", "st", "th"], [*"aeiou", "ai", "ea"]
    syllables = [onset + vowel for onset in onsets for vowel in vowels]
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(syllables[i] for i in random.randint(0, len(syllables), random.randint(2, 6)))] = None
    return list(found)


def sentences(count: int, *, seed: int = 0) -> list[str]:
    """Sentences of a language, most of ten to thirty words, and some far longer."""
    random = np.random.RandomState(seed)
    known = words(60_000, np.random.RandomState(1))
    lengths = np.clip(np.exp(random.normal(2.8, 0.55, count)), 3, 180).astype(int)
    # Words are as frequent as in natural languages: the n-th most frequent 1/n times as often as the first.
    shares = 1 / (np.arange(len(known)) + 2.7)
    drawn = random.choice(len(known), lengths.sum(), p=shares / shares.sum())
    ends = np.cumsum(lengths)
    return [" ".join(known[i] for i in drawn[end - n : end]) + "." for n, end in zip(lengths, ends, strict=True)]


def write_repository(folder: Path) -> None:
    """A repository as sentence-transformers and its exporters write it."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [chr(ord("a") + i) for i in range(26)]
    known = words(60_000, np.random.RandomState(1))
    pieces = [*special, ".", *letters, *(f"##{letter}" for letter in letters)]
    ends = dict.fromkeys(f"##{word[i:]}" for word in known[:4000] for i in (3, 4))
    pieces += [*list(ends)[:5000], *known]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    vocabulary = {piece: i for piece, i in vocabulary.items() if i < VOCABULARY}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))

    model = graphs.bert(vocab=VOCABULARY, hidden=HIDDEN)
    (folder / "onnx").mkdir()
    onnx.save_model(model, folder / "onnx" / "model.onnx")
    multiplied = {node.input[1] for node in model.graph.node if node.op_type == "MatMul"}
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    weights = {name: w.T if name in multiplied else w for name, w in weights.items() if w.dtype == np.float32}
    weights |= {"pooler.dense.weight": np.zeros((HIDDEN, HIDDEN), np.float32)}
    weights |= {"pooler.dense.bias": np.zeros(HIDDEN, np.float32)}
    save_file({n: np.ascontiguousarray(w) for n, w in weights.items()}, folder / "model.safetensors", {"format": "pt"})

    names = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]"}
    names["mask_token"] = "[MASK]"
    module = lambda i, path, kind: {
        "idx": i,
        "name": str(i),
        "path": path,
        "type": f"sentence_transformers.models.{kind}",
    }
    files: dict[str, Any] = {
        "config.json": {
            "architectures": ["BertModel"],
            "model_type": "bert",
            "hidden_size": HIDDEN,
            "num_hidden_layers": 6,
            "num_attention_heads": 12,
            "intermediate_size": 1536,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 512,
            "type_vocab_size": 2,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-12,
            "pad_token_id": 0,
        },
        "tokenizer_config.json": {"tokenizer_class": "BertTokenizer", "model_max_length": 512, **names},
        "special_tokens_map.json": names,
        "sentence_bert_config.json": {"max_seq_length": LONGEST, "do_lower_case": False},
        "modules.json": [
            module(0, "", "Transformer"),
            module(1, "1_Pooling", "Pooling"),
            module(2, "2_Normalize", "Normalize"),
        ],
        "1_Pooling/config.json": {"word_embedding_dimension": HIDDEN, "pooling_mode_mean_tokens": True},
    }
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))


# ---- what a process of its own does --------------------------------------------------------------------------------


def ours(folder: Path, threads: int) -> Encode:
    """A serving, called with the list."""
    from transmuter.serving import text_embedding

    serving = text_embedding(folder, batch_size=BATCH, sequence_length=LENGTHS)
    return lambda texts: np.stack([found["embedding"] for found in serving(list(texts))])


def onnxruntime_in_our_batches(folder: Path, threads: int) -> Encode:
    """ONNX Runtime in the batches that the serving makes, of the serving's tokens."""
    from transmuter.serving import batching, text_embedding

    serving = text_embedding(folder, batch_size=BATCH, sequence_length=LENGTHS)
    run = _session(folder, threads)
    batches = serving.batches

    def encode(texts: Sequence[str]) -> np.ndarray:
        rows = [row for rows, _ in serving.task.rows_of(texts) for row in rows]
        embeddings = np.empty((len(texts), HIDDEN), np.float32)
        for indexes in batching.plan(batches, rows):
            width, places = batches.width(rows[indexes[0]]), batches.places(len(indexes))
            found = run([rows[i].arrays["input_ids"] for i in indexes], width, places)
            embeddings[indexes] = found[: len(indexes)]
        return embeddings

    return encode


def onnxruntime_at_its_best(folder: Path, threads: int) -> Encode:
    """ONNX Runtime with batches of similar lengths, padded to the longest of each, of any length."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(LONGEST)
    run = _session(folder, threads)

    def encode(texts: Sequence[str]) -> np.ndarray:
        ids = [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
        order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
        embeddings = np.empty((len(texts), HIDDEN), np.float32)
        for start in range(0, len(order), BATCH):
            indexes = order[start : start + BATCH]
            embeddings[indexes] = run([ids[i] for i in indexes], len(ids[indexes[0]]), len(indexes))
        return embeddings

    return encode


def _session(folder: Path, threads: int) -> Callable[[Sequence[Sequence[int]], int, int], np.ndarray]:
    """What embeds tokens, padded to so many places in so many rows."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(folder / "onnx" / "model.onnx", options, providers=["CPUExecutionProvider"])

    def run(rows: Sequence[Sequence[int]], width: int, places: int) -> np.ndarray:
        ids, mask = np.zeros((places, width), np.int64), np.zeros((places, width), np.int64)
        for i, row in enumerate(rows):
            ids[i, : len(row)], mask[i, : len(row)] = row, 1
        mask[len(rows) :, 0] = 1
        inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        (states,) = session.run(None, inputs)
        sums = np.matmul(mask[:, None].astype(np.float32), states)[:, 0]
        means = sums / mask.sum(1, keepdims=True)
        return (means / np.linalg.norm(means, axis=1, keepdims=True)).astype(np.float32)

    return run


def sentence_transformers(folder: Path, threads: int) -> Encode:
    """`SentenceTransformer.encode`, in PyTorch, with its defaults."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    model = SentenceTransformer(str(folder), device="cpu")
    return lambda texts: model.encode(list(texts), batch_size=BATCH, show_progress_bar=False)


def unbatched(folder: Path, threads: int) -> Encode:
    """A serving that is called with one sentence after another."""
    from transmuter.serving import text_embedding

    serving = text_embedding(folder, sequence_length=FEW_LENGTHS).warm_up()
    return lambda texts: np.stack([serving(text)["embedding"] for text in texts])


def started(folder: Path, threads: int) -> Encode:
    """A started serving that many threads call at once, each with one sentence after another."""
    from transmuter.serving import text_embedding

    serving = text_embedding(folder, batch_size=8, sequence_length=FEW_LENGTHS).warm_up()

    def encode(texts: Sequence[str]) -> np.ndarray:
        with serving, ThreadPoolExecutor(CALLERS) as pool:
            return np.stack(list(pool.map(lambda text: serving(text)["embedding"], texts)))

    return encode


RUNTIMES: dict[str, Callable[[Path, int], Encode]] = {
    "ours": ours,
    "onnxruntime": onnxruntime_in_our_batches,
    "onnxruntime best": onnxruntime_at_its_best,
    "sentence-transformers": sentence_transformers,
    "unbatched": unbatched,
    "started": started,
}


def work(runtime: str, folder: str, count: str, threads: str) -> None:
    """Embeds all sentences for each line that it reads, and writes the seconds; of the first, the embeddings too."""
    inference.use_cpus(int(threads))
    encode, texts = RUNTIMES[runtime](Path(folder), int(threads)), sentences(int(count))
    for round_, _ in enumerate(sys.stdin):
        start = time.perf_counter()
        found = encode(texts)
        seconds = time.perf_counter() - start
        if round_ == 0:
            np.save(Path(folder, f"{runtime}.npy"), found)
        print(json.dumps({"seconds": seconds}), flush=True)


# ---- the process that starts them ----------------------------------------------------------------------------------


class Worker(turns.Process):
    """A process that embeds all sentences."""

    def __init__(self, runtime: str, folder: str, count: int, threads: int):
        arguments = [__file__, "--worker", runtime, folder, str(count), str(threads)]
        super().__init__(arguments, {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true"})
        self.runtime, self._folder, self._count = runtime, folder, count

    @property
    def rate(self) -> float:
        """Sentences per second: the median of the rounds after the first."""
        return self._count / statistics.median(done["seconds"] for done in self.rounds[_WARMUP:])

    @functools.cached_property
    def embeddings(self) -> np.ndarray:
        """Those of the first round."""
        return np.load(Path(self._folder, f"{self.runtime}.npy"))


def measured(runtimes: Sequence[str], folder: str, count: int, repeats: int, threads: int) -> dict[str, Worker]:
    """Rounds in turns, of each runtime."""
    with ExitStack() as stack:
        workers = {name: stack.enter_context(Worker(name, folder, count, threads)) for name in runtimes}
        for _ in range(_WARMUP + repeats):
            for worker in workers.values():
                worker.work()
    return workers


def compared(name: str, ours: Worker, theirs: Worker, must: float | None, aim: float | None) -> Row:
    """Sentences per second; the figure is theirs by ours."""
    error = float(np.abs(ours.embeddings - theirs.embeddings).max())
    return Row(name, ours.rate, theirs.rate, "1/s", theirs.rate / ours.rate, must, aim, error)


def rows(only: Sequence[str], count: int, repeats: int, threads: int) -> Iterator[Row]:
    """A row for each peer, and one for a started serving."""
    with tempfile.TemporaryDirectory() as folder:
        write_repository(Path(folder))
        peers = [name for name in ("onnxruntime", "onnxruntime best", "sentence-transformers") if name in only]
        if peers:
            workers = measured(["ours", *peers], folder, count, repeats, threads)
            bars = {"onnxruntime": (1.0, 0.9), "onnxruntime best": (None, 1.0), "sentence-transformers": (1 / 1.2, 0.7)}
            for name in peers:
                yield compared(f"list, {name}", workers["ours"], workers[name], *bars[name])
        if "started" in only:
            workers = measured(["started", "unbatched"], folder, count, repeats, threads)
            yield compared(f"{CALLERS} threads, unbatched", workers["started"], workers["unbatched"], 0.5, 0.4)


def main() -> None:
    choices = [name for name in RUNTIMES if name not in ("ours", "unbatched")]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=choices, nargs="+", default=choices, help="the rows to measure")
    parser.add_argument("--sentences", type=int, default=1000, help="how many of them")
    parser.add_argument("--repeats", type=int, default=5, help="measured rounds")
    parser.add_argument("--threads", type=int, default=2, help="CPUs that all may use")
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(*arguments.worker)
        return
    inference.use_cpus(arguments.threads)
    found = rows(arguments.only, arguments.sentences, arguments.repeats, arguments.threads)
    sys.exit(report(found, arguments.json) > 0)


if __name__ == "__main__":
    main()
