"""The cache of compiled segments: what was used least recently goes first, and storms are told once."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import Any

import jax
import onnx_ir as ir

from transmuter.segments.explanation import SegmentReport, report
from transmuter.segments.segment import Segment, Signature, Stage

THRASHING = 16
"""So many evictions tell that the cache is too small for the shapes that come."""
VARYING = 12
"""So many different contents of a static input tell that it is not one to compile for."""
CACHE_DIR = "TRANSMUTER_CACHE_DIR"
_HIT = "/jax/compilation_cache/cache_hits"
_JAX_LIMIT = 1.0
"""The seconds of compiling from which JAX keeps an executable, unless its user says otherwise."""


@dataclass
class Counts:
    """What happened at one depth, or in all: `hits` and `misses` of calls, `evictions` of segments, and the seconds
    that building took, evicted segments included. What `warm_up` does is neither hit nor miss."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    trace_seconds: float = 0.0
    compile_seconds: float = 0.0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Counts)))


@dataclass(frozen=True)
class CacheInfo:
    """The counts of a `CompiledModel`'s cache.

    Attributes:
        hits, misses, evictions, trace_seconds, compile_seconds: The sums over all depths.
        depths: `Counts` of each depth: 0 is what runs first, 1 what follows a break, and so on.
        segments: The segments that are compiled now, with counts of their own.
    """

    hits: int
    misses: int
    evictions: int
    trace_seconds: float
    compile_seconds: float
    depths: tuple[Counts, ...]
    segments: tuple[SegmentReport, ...]


@dataclass
class _Depth:
    """The segments of one depth, and the counts of them and of those that have gone."""

    segments: OrderedDict[tuple[Stage, Signature], Segment] = field(default_factory=OrderedDict)
    gone: Counts = field(default_factory=Counts)

    def counts(self) -> Counts:
        present = (Counts(0, 0, 0, s.trace_seconds, s.compile_seconds) for s in self.segments.values())
        return sum(present, self.gone)


class SegmentCache:
    """At each depth the `size` segments that were used last; every method may be called from any thread."""

    def __init__(self, size: int, declared_static: Set[ir.Value]):
        self.size, self._declared = size, declared_static
        self._depths: dict[int, _Depth] = {}
        self._contents: dict[ir.Value, set[int]] = {}
        self._told = False
        self._lock = threading.Lock()

    def find(self, stage: Stage, signature: Signature, *, counts: bool) -> Segment | None:
        """The segment that continues from `stage` for these arguments, if it is there."""
        with self._lock:
            depth = self._depths.get(stage.depth)
            segment = None if depth is None else depth.segments.get((stage, signature))
            if segment is not None:
                depth.segments.move_to_end((stage, signature))
                if counts:
                    segment.hits += 1
                    depth.gone.hits += 1
            return segment

    def touch(self, segment: Segment) -> None:
        """Counts a hit on a segment that the caller has got already."""
        key = segment.stage, segment.signature
        with self._lock:
            depth = self._depths[segment.stage.depth]
            segment.hits += 1
            depth.gone.hits += 1
            if key in depth.segments:
                depth.segments.move_to_end(key)

    def __contains__(self, segment: Segment) -> bool:
        with self._lock:
            return self._depths[segment.stage.depth].segments.get((segment.stage, segment.signature)) is segment

    def keep(self, segment: Segment, *, counts: bool) -> tuple[list[Segment], str]:
        """Takes a new segment. Returns those that had to go for it, and what to warn of, or nothing."""
        gone: list[Segment] = []
        with self._lock:
            depth = self._depths.setdefault(segment.stage.depth, _Depth())
            depth.gone.misses += counts
            depth.segments[segment.stage, segment.signature] = segment
            while len(depth.segments) > self.size:
                gone.append(depth.segments.popitem(last=False)[1])
                gone += self._unreachable(gone[-1])
            for evicted in gone:
                count = self._depths[evicted.stage.depth].gone
                count.evictions += 1
                count.trace_seconds += evicted.trace_seconds
                count.compile_seconds += evicted.compile_seconds
            return gone, self._advice(segment, depth)

    def _unreachable(self, gone: Segment) -> list[Segment]:
        """Takes out the segments that only follow on one that is gone."""
        found: list[Segment] = []
        stages = set(gone.after.values())
        depth = self._depths.get(gone.stage.depth + 1)
        for key in [key for key in depth.segments if key[0] in stages] if depth is not None else ():
            found.append(depth.segments.pop(key))
            found += self._unreachable(found[-1])
        return found

    def _advice(self, segment: Segment, depth: _Depth) -> str:
        """What to tell of a recompile storm, once."""
        for value, array in segment.static.items():
            seen = self._contents.setdefault(value, set())
            if len(seen) <= VARYING:
                seen.add(hash(array.tobytes()))
        if self._told:
            return ""
        name = segment.model.name
        for value in segment.static:
            if len(self._contents[value]) > VARYING:
                self._told = True
                why = "it is in static_inputs" if value in self._declared else "its contents decide a shape or a branch"
                return (
                    f"{name} has been compiled for more than {VARYING} different contents of {value.name!r}: {why}. "
                    "Give it fewer different values (round them up to a few buckets), take it out of static_inputs, "
                    f"or raise cache_size above {self.size} if they come again."
                )
        if depth.gone.evictions >= THRASHING:
            self._told = True
            return (
                f"{name} has been compiled for {len(depth.segments) + depth.gone.evictions} signatures of a segment, "
                f"of which {self.size} are kept. The last was {segment.labels['signature']}. Pad the axis that varies "
                "to a few sizes (buckets), name what is constant in static_inputs, or compile with a larger cache_size."
            )
        return ""

    def clear(self) -> None:
        """Forgets all segments; what they have counted stays."""
        with self._lock:
            for depth in self._depths.values():
                depth.gone = depth.counts()
                depth.segments.clear()

    def info(self) -> CacheInfo:
        """The counts, and reports on the segments that are there."""
        with self._lock:
            depths = tuple(depth.counts() for _, depth in sorted(self._depths.items()))
            present = self._present()
        total = sum(depths, Counts())
        values = (getattr(total, f.name) for f in fields(Counts))
        return CacheInfo(*values, depths, tuple(map(report, present)))

    def __iter__(self) -> Iterator[Segment]:
        """The segments that are there, in the order of a run."""
        with self._lock:
            return iter(self._present())

    def _present(self) -> list[Segment]:
        return [segment for _, depth in sorted(self._depths.items()) for segment in depth.segments.values()]


def use_persistent_cache(path: str | os.PathLike[str] | None) -> bool:
    """Points JAX's compilation cache to a folder: `path`, or what the environment variable names.

    Returns:
        Whether executables are kept in that folder.

    Raises:
        ValueError: `path` is given, and JAX's cache is somewhere else already.
    """
    wanted = path if path is not None else os.environ.get(CACHE_DIR)
    if not wanted:
        return False
    wanted, present = os.path.abspath(wanted), jax.config.jax_compilation_cache_dir
    if present is None:
        jax.config.update("jax_compilation_cache_dir", wanted)
        return True
    if os.path.abspath(present) == wanted:
        return True
    if path is not None:
        raise ValueError(
            f"persistent_cache is {str(path)!r}, but JAX keeps executables in {present!r} already, and has one such "
            "folder in a process. Leave persistent_cache out."
        )
    return False


def keeping_all() -> AbstractContextManager[Any]:
    """Lets JAX's cache keep what this thread compiles in the block, however quick that is."""
    return _keeping_from(0.0)


def keeping_none() -> AbstractContextManager[Any]:
    """Lets JAX's cache keep nothing that this thread compiles in the block, since a record has it."""
    return _keeping_from(math.inf)


def _keeping_from(seconds: float) -> AbstractContextManager[Any]:
    """The public setting of the limit is one for all threads; where a version of JAX has no other, its limit holds."""
    from jax._src import config

    limit = getattr(config, "persistent_cache_min_compile_time_secs", None)
    return limit(seconds) if limit is not None and keeps_quick_ones() else contextlib.nullcontext()


def keeps_quick_ones() -> bool:
    """Whether executables are kept however quickly they compile: unless JAX's user has set a limit."""
    return jax.config.jax_persistent_cache_min_compile_time_secs == _JAX_LIMIT


@contextlib.contextmanager
def noting_hits() -> Iterator[list[str]]:
    """Fills a list with what this thread finds in JAX's cache in the block."""
    _listen()
    before, _noting.hits = getattr(_noting, "hits", None), []
    try:
        yield _noting.hits
    finally:
        _noting.hits = before


_noting = threading.local()


@functools.cache
def _listen() -> None:
    """Once for all: JAX may be going through its listeners in one thread when another would take one away."""

    def note(event: str, **_: Any) -> None:
        hits = getattr(_noting, "hits", None)
        if event == _HIT and hits is not None:
            hits.append(event)

    jax.monitoring.register_event_listener(note)


def used_weights(segments: Iterable[Segment]) -> set[str]:
    """Keys of the prepared weights that the segments take."""
    return {weight.key for segment in segments for executable in segment.executables for weight in executable.weights}
