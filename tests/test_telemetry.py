"""Events: what is told when, to whom, and that a bad listener disturbs nothing."""

from __future__ import annotations

import logging
from pathlib import Path

import jax
import numpy as np
import onnx
import pytest
from building import info, model_of
from compiled_models import X, breaking, plain
from onnx import helper

import transmuter
from transmuter import telemetry
from transmuter.telemetry import Break, Compile, Eviction, Load, SegmentRun, Trace


def names(events: list[telemetry.Event]) -> list[str]:
    return [type(event).__name__ for event in events]


def test_a_model_with_a_break_tells_each_step_in_order() -> None:
    events: list[telemetry.Event] = []
    with telemetry.subscribe(events.append):
        model = breaking()
        compiled = transmuter.compile(model)
        compiled({"x": X})
        assert names(events) == ["Load", "Trace", "Compile", "SegmentRun", "Break", "Trace", "Compile", "SegmentRun"]
        del events[:]
        compiled({"x": X})
        assert names(events) == ["SegmentRun", "Break", "SegmentRun"]
    first, broken, second = events
    assert (first.model, first.depth, first.signature) == ("graph", 0, "x float32[4, 8]")
    assert (broken.node, broken.operator, broken.host_bytes) == ("head", "transmuter.tests::Head", 8)
    assert (second.depth, second.signature) == (1, "rows float32[3, 8]")
    assert all(event.seconds > 0 for event in events)


def test_loading_tells_the_files_name(tmp_path: Path) -> None:
    path = tmp_path / "relu.onnx"
    onnx.save(model_of([helper.make_node("Relu", ["x"], ["y"])], [info("x")], [info("y")]), path)
    events: list[Load] = []
    with telemetry.subscribe(events.append, Load):
        for source in (path, str(path), path.read_bytes()):
            transmuter.load(source)
    assert [(e.model, e.nodes, e.weight_bytes) for e in events] == [
        ("relu.onnx", 1, 0),
        ("relu.onnx", 1, 0),
        ("graph", 1, 0),
    ]


def test_evictions_tell_what_is_lost() -> None:
    compiled = transmuter.compile(plain(), {"x": X}, cache_size=1)
    events: list[Eviction] = []
    with telemetry.subscribe(events.append, Eviction):
        compiled({"x": X[:1]})
    [event] = events
    assert (event.depth, event.signature) == (0, "x float32[4, 8]")
    assert event.seconds > 0
    assert str(event).startswith("graph: evicted segment 0 for x float32[4, 8], built in ")


def test_subscriptions_choose_kinds_and_end() -> None:
    compiled = transmuter.compile(plain(), {"x": X})
    runs: list[telemetry.Event] = []
    everything: list[telemetry.Event] = []
    handle = telemetry.subscribe(runs.append, SegmentRun, Break)
    with telemetry.subscribe(everything.append):
        compiled({"x": X[:2]})
    compiled({"x": X})
    handle.unsubscribe()
    handle.unsubscribe()
    compiled({"x": X})
    assert names(runs) == ["SegmentRun", "SegmentRun"]
    assert names(everything) == ["Trace", "Compile", "SegmentRun"]
    with pytest.raises(ValueError, match="no kind of event"):
        telemetry.subscribe(runs.append, str)


def test_a_failing_subscriber_is_logged_once_and_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    compiled = transmuter.compile(plain())
    later: list[telemetry.Event] = []

    def fails(event: telemetry.Event) -> None:
        raise RuntimeError("bad subscriber")

    with telemetry.subscribe(fails), telemetry.subscribe(later.append):
        for _ in range(3):
            assert compiled({"x": X})["y"].shape == (4, 8)
    assert len(later) == 5
    [record] = caplog.records
    assert record.name == "transmuter"
    assert "bad subscriber" in record.exc_text


def test_the_logger_says_what_its_level_allows(caplog: pytest.LogCaptureFixture) -> None:
    compiled = transmuter.compile(breaking())
    with caplog.at_level(logging.INFO, "transmuter"), telemetry.log_to():
        compiled({"x": X})
    assert [record.levelno for record in caplog.records] == [logging.INFO] * 4
    assert caplog.messages[0].startswith("graph: traced 5 nodes of segment 0 for x float32[4, 8] in ")
    caplog.clear()
    own = logging.getLogger("some.other")
    with caplog.at_level(logging.DEBUG, "some.other"), telemetry.log_to(own):
        compiled({"x": X})
    assert [record.levelno for record in caplog.records] == [logging.DEBUG] * 3
    assert "break at head (transmuter.tests::Head), 8 bytes read" in caplog.messages[1]
    caplog.clear()
    with caplog.at_level(logging.ERROR, "transmuter"), telemetry.log_to():
        assert not telemetry.is_wanted(SegmentRun)


def test_durations_go_to_jax_monitoring() -> None:
    found: dict[str, float] = {}

    def listen(event: str, seconds: float, **_: object) -> None:
        if event.startswith("/transmuter/"):
            found[event] = seconds

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        compiled = transmuter.compile(breaking(), cache_size=1)
        compiled({"x": X})
        compiled({"x": X[:2]})
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert found.keys() == {kind.name for kind in telemetry.KINDS}
    assert all(seconds > 0 for seconds in found.values())


def test_no_event_is_made_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, **_: object) -> None:
        raise AssertionError("an event was made")

    for kind in telemetry.KINDS:
        monkeypatch.setattr(kind, "__init__", refuse)
    compiled = transmuter.compile(breaking(), cache_size=1)
    with telemetry.subscribe(print, Load):
        for x in (X, X[:2], X):
            compiled({"x": x})


def test_explain_tells_how_often_and_how_much_each_break_read() -> None:
    compiled = transmuter.compile(breaking())
    for x in (X, X[:2], X):
        compiled({"x": x})
    explanation = compiled.explain()
    assert [(b.node, b.runs, b.host_bytes) for b in explanation.breaks] == [("head", 3, 24)]
    assert explanation.breaks[0].seconds > 0
    firsts = [s for s in explanation.segments if s.depth == 0]
    assert [(s.signature, s.calls, s.breaks[0].runs) for s in firsts] == [
        ("x float32[2, 8]", 1, 1),
        ("x float32[4, 8]", 2, 2),
    ]


def test_kinds_of_events_are_public() -> None:
    assert list(transmuter.telemetry.KINDS) == [Load, Trace, Compile, SegmentRun, Break, Eviction]
    event = Break("m", 0.5, 0, "x", "n", "NonZero", 8)
    assert str(event) == "m: break at n (NonZero), 8 bytes read, after segment 0 in 0.5 s"
    with pytest.raises(AttributeError):
        event.seconds = 1.0
    np.testing.assert_equal(event.seconds, 0.5)
