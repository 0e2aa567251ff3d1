"""Events of what Transmuter does, with how long each took.

    with telemetry.subscribe(print, telemetry.Compile, telemetry.Break):
        compiled(inputs)
    telemetry.log_to()          # the logger "transmuter"

The durations also go to `jax.monitoring`, under names such as `/transmuter/compile`. Where nobody listens, an event is
never made.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from jax import monitoring


@dataclass(frozen=True)
class Event:
    """What all events have: the model's name (its file's, or its graph's), and how many seconds it took."""

    name: ClassVar[str]
    level: ClassVar[int] = logging.INFO

    model: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.model}: {self._what()} in {self.seconds:.3g} s"

    def _what(self) -> str:
        raise NotImplementedError


@dataclass(frozen=True)
class Load(Event):
    """A model was read and checked."""

    name = "/transmuter/load"
    nodes: int
    weight_bytes: int

    def _what(self) -> str:
        return f"loaded {self.nodes} nodes and {self.weight_bytes} bytes of weights"


@dataclass(frozen=True)
class _OfSegment(Event):
    depth: int
    signature: str


@dataclass(frozen=True)
class Trace(_OfSegment):
    """A segment was traced for a signature that is not in the cache."""

    name = "/transmuter/trace"
    nodes: int

    def _what(self) -> str:
        return f"traced {self.nodes} nodes of segment {self.depth} for {self.signature}"


@dataclass(frozen=True)
class Compile(_OfSegment):
    """XLA compiled a segment. Under a gradient its first run is part of it, since JAX then does both at once."""

    name = "/transmuter/compile"

    def _what(self) -> str:
        return f"compiled segment {self.depth} for {self.signature}"


@dataclass(frozen=True)
class SegmentRun(_OfSegment):
    """A segment ran. Who subscribes to these makes each run wait for its results; what `jax.monitoring` gets otherwise
    is the time until JAX has taken the work on."""

    name = "/transmuter/segment_run"
    level = logging.DEBUG

    def _what(self) -> str:
        return f"ran segment {self.depth} for {self.signature}"


@dataclass(frozen=True)
class Break(_OfSegment):
    """A node ran between two segments, or a value was read there that decides what follows."""

    name = "/transmuter/break"
    level = logging.DEBUG
    node: str
    operator: str
    host_bytes: int
    """Bytes of the operands that were read."""

    def _what(self) -> str:
        return f"break at {self.node} ({self.operator}), {self.host_bytes} bytes read, after segment {self.depth}"


@dataclass(frozen=True)
class Eviction(_OfSegment):
    """A segment left the cache, its executable with it; the seconds are what building it had taken."""

    name = "/transmuter/eviction"

    def __str__(self) -> str:
        return f"{self.model}: evicted segment {self.depth} for {self.signature}, built in {self.seconds:.3g} s"


KINDS: tuple[type[Event], ...] = (Load, Trace, Compile, SegmentRun, Break, Eviction)


class Subscription:
    """A callback that is told of events until `unsubscribe`, or until the `with` block ends."""

    def __init__(self, callback: Callable[[Any], object], kinds: frozenset[type[Event]]):
        self.kinds = kinds
        self._callback, self._failed = callback, False

    def unsubscribe(self) -> None:
        """No event is delivered after this. A second call does nothing."""
        _change(lambda present: tuple(s for s in present if s is not self))

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *_: object) -> None:
        self.unsubscribe()

    def deliver(self, event: Event) -> None:
        """Calls the callback. What it raises is logged, once, and goes no further."""
        try:
            self._callback(event)
        except Exception:
            if not self._failed:
                self._failed = True
                _LOGGER.exception("A subscriber to Transmuter's events failed. Its further failures are not logged.")


_LOGGER = logging.getLogger("transmuter")
_lock = threading.Lock()
_subscriptions: tuple[Subscription, ...] = ()
_wanted: frozenset[type[Event]] = frozenset()


def subscribe(callback: Callable[[Any], object], *kinds: type[Event]) -> Subscription:
    """Calls `callback` with each event of these kinds, or of every kind, in the thread in which it happens.

    Returns:
        A handle: call its `unsubscribe`, or use it as a context manager.
    """
    odd = [kind for kind in kinds if kind not in KINDS]
    if odd:
        raise ValueError(f"{odd[0]!r} is no kind of event. Kinds are {', '.join(kind.__name__ for kind in KINDS)}.")
    subscription = Subscription(callback, frozenset(kinds or KINDS))
    _change(lambda present: (*present, subscription))
    return subscription


def log_to(logger: logging.Logger | None = None, *kinds: type[Event]) -> Subscription:
    """Logs events: runs and breaks at level DEBUG, the others at INFO.

    Args:
        logger: None is that of the name "transmuter".
        kinds: None given is those whose level the logger has enabled now.

    Returns:
        A handle, as of `subscribe`.
    """
    logger = _LOGGER if logger is None else logger
    kinds = kinds or tuple(kind for kind in KINDS if logger.isEnabledFor(kind.level))
    callback = lambda event: logger.log(event.level, "%s", event)
    return subscribe(callback, *kinds) if kinds else Subscription(callback, frozenset())


def is_wanted(kind: type[Event]) -> bool:
    """Whether anybody has subscribed to events of this kind."""
    return kind in _wanted


def record(kind: type[Event], seconds: float, **metadata: Any) -> None:
    """Tells `jax.monitoring` the duration and the subscribers an event, which is made only if there are some."""
    monitoring.record_event_duration_secs(kind.name, seconds)
    if kind in _wanted:
        event = kind(seconds=seconds, **metadata)
        for subscription in _subscriptions:
            if kind in subscription.kinds:
                subscription.deliver(event)


def _change(step: Callable[[tuple[Subscription, ...]], tuple[Subscription, ...]]) -> None:
    global _subscriptions, _wanted
    with _lock:
        _subscriptions = step(_subscriptions)
        _wanted = frozenset().union(*(s.kinds for s in _subscriptions))
