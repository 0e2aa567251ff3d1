"""`transmuter task`."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from tiny_repositories import make_repository

from transmuter import serving
from transmuter.__main__ import main
from transmuter.serving import command

HEADS = {
    "text-embedding": "hidden",
    "text-classification": "classification",
    "token-classification": "tokens",
    "fill-mask": "fill_mask",
    "question-answering": "question_answering",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = {task: make_repository(tmp_path_factory.mktemp(task), head=head) for task, head in HEADS.items()}
    labels = ["contradiction", "neutral", "entailment"]
    made["zero-shot-classification"] = make_repository(
        tmp_path_factory.mktemp("nli"), head="classification", labels=labels
    )
    made["text-ranking"] = make_repository(tmp_path_factory.mktemp("ranking"), head="classification", labels=["score"])
    return {task: str(folder) for task, folder in made.items()}


def lines(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> list[Any]:
    assert main(["task", *arguments]) == status
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("task", "arguments", "keys"),
    [
        ("text-embedding", ["the cat", "a dog", "--embedding-processor", "l2_norm"], {"embedding"}),
        ("text-classification", ["the cat", "a dog", "--top-k", "none"], {"predictions"}),
        ("token-classification", ["the cat", "a dog", "--aggregation", "same"], {"entities"}),
        ("fill-mask", ["the [MASK]", "--targets", "cat,dog", "a [MASK]"], {"predictions"}),
        ("zero-shot-classification", ["--labels", "cat, dog", "--multi-label", "the cat", "a dog"], {"predictions"}),
    ],
)
def test_texts(
    task: str, arguments: list[str], keys: set[str], folders: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    results = lines(capsys, task, folders[task], *arguments, "--sequence-length", "64")
    assert [set(result) for result in results] == [keys, keys]


def test_results_are_those_of_the_function(folders: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    run = serving.text_classification(folders["text-classification"], sequence_length=[8, 16], batch_size=2, top_k=2)
    [first, second] = lines(
        capsys,
        "text-classification",
        "--batch-size",
        "2",
        "--sequence-length",
        "8,16",
        folders["text-classification"],
        "the cat",
        '{"text": "a", "text_pair": "dog"}',
        "--top-k=2",
    )
    assert [first, second] == run(["the cat", ("a", "dog")])
    assert len(first["predictions"]) == 2


def test_inputs_of_several_fields(folders: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    short = ("--sequence-length", "16")
    [answer] = lines(capsys, "question-answering", folders["question-answering"], "who", "the cat sat", *short)
    assert answer["results"][0]["text"] in "the cat sat"
    line = '{"question": "who", "context": "the cat sat"}'
    assert lines(capsys, "question-answering", folders["question-answering"], line, *short) == [answer]
    [ranked] = lines(capsys, "text-ranking", folders["text-ranking"], "cat", "the cat", "a dog", *short)
    assert sorted(result["index"] for result in ranked["results"]) == [0, 1]


def test_standard_input(
    folders: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    short = ("--sequence-length", "16")
    texts = ["the cat", "a dog", "日本語", "{not JSON"]
    short = (*short, "--batch-size", "2")
    wanted = lines(capsys, "text-classification", folders["text-classification"], *texts, *short)
    assert len(wanted) == 4
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(texts) + "\n\n"))
    assert lines(capsys, "text-classification", folders["text-classification"], *short) == wanted
    monkeypatch.setattr("sys.stdin", io.StringIO('{"question": "who", "context": "the cat"}\n' * 3))
    assert len(lines(capsys, "question-answering", folders["question-answering"], *short)) == 3
    monkeypatch.setattr("sys.stdin", None)  # as it is where it was closed
    assert lines(capsys, "text-classification", folders["text-classification"], *short) == []
    monkeypatch.setattr("sys.stdin", io.StringIO("who\n"))
    assert main(["task", "question-answering", folders["question-answering"], *short]) == 2
    assert 'no object of JSON. Write {"question": "...", "context": "..."}' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["text-embeding", "x"], "invalid choice: 'text-embeding'"),
        (["fill-mask", "REPO", "nothing"], "There is no [MASK] in the text"),
        (["fill-mask", "/no/such/folder", "x"], "neither a folder nor the name of a repository"),
        (["fill-mask", "REPO", "x", "--top-k", "many"], "'many' is no number"),
        (["fill-mask", "REPO", "x", "--sequence-length", "many"], "'many' is no number, and no list"),
        (["fill-mask", "REPO", "x", "--colour", "red"], "unrecognized arguments: --colour"),
        (["question-answering", "REPO", "who"], "1 texts are given. Give both"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], said: str, folders: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["task", *(folders.get(arguments[0], "") if a == "REPO" else a for a in arguments)])
    except SystemExit as exit:
        status = exit.code
    told = capsys.readouterr().err
    assert status == 2
    assert said in told
    assert told.count("\n") <= 1


@pytest.mark.parametrize("task", serving.TASKS)
def test_every_task_has_its_options(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["task", task.replace("_", "-"), "--help"])
    assert exit.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--batch-size" in shown
    assert "How many rows run at once at most" in shown
    for name, _, help in command._options(getattr(serving, task)):
        assert f"--{name.replace('_', '-')}" in shown
        assert help, name


def test_help_without_a_task(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["task", "--help"], ["--help"]):
        with pytest.raises(SystemExit) as exit:
            main(arguments)
        assert exit.value.code == 0
        assert "text-embedding" in capsys.readouterr().out
