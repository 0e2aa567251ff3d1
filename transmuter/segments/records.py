"""Records of compiled segments in the folder of the persistent cache, with which a later process need not trace.

JAX's own cache spares XLA's work alone: to know what to look for, it has to trace and lower again. A record is found by
what a segment follows from (`identity`), and has the executable and how its weights are prepared.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import pickle
import re
import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax.experimental import serialize_executable

from transmuter.segments.preparation import Ref, Weight

_PREFIX = "transmuter-segment-"
_DIGEST = hashlib.blake2b
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_READY = ("transmuter_", "TopK")
"""What the names of functions start with that executables of any process can call."""


@dataclass(frozen=True)
class Recipe:
    """What tracing tells of a segment without breaks.

    Attributes:
        nodes: How many nodes it evaluates.
        emitted: The names of the requested outputs, in the order of its results.
        is_wide: Whether it computes anything in 64-bit types.
        weights: What the executable for the model's own params takes as weights, and how that is made of the model's.
        constants: Arrays that these start from, too.
    """

    nodes: int
    emitted: list[str]
    is_wide: bool
    weights: list[Weight]
    constants: Mapping[Ref, np.ndarray]

    def pickled(self) -> bytes | None:
        """The recipe as `read` takes it; None where a weight is prepared by what cannot be written down."""
        buffer = io.BytesIO()
        try:
            _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(self)
        except (pickle.PicklingError, TypeError, AttributeError):
            return None
        return buffer.getvalue()


@dataclass(frozen=True)
class Record:
    """A recipe, and the executable as `serialize_executable` makes it."""

    recipe: Recipe
    executable: tuple[bytes, Any, Any]

    def load(self) -> jax.stages.Compiled:
        """The executable, ready to be called."""
        device = jax.devices()[0]
        return serialize_executable.deserialize_and_load(
            *self.executable, backend=device.client, execution_devices=[device]
        )


def write(key: str, recipe: bytes, compiled: jax.stages.Compiled) -> None:
    """Keeps a record for later processes, if the executable is for the first device, and XLA can serialise it.

    Args:
        key: What it is found by.
        recipe: As `Recipe.pickled` makes it.
        compiled: The executable. XLA must have compiled it here: of one that it has loaded it serialises a part.
    """
    # JAX makes other targets, such as LAPACK's, ready when it lowers what calls them: a later process would crash
    if any(not target.startswith(_READY) for target in _TARGET.findall(compiled.as_text() or "")):
        return
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    if any(sharding.device_set != {jax.devices()[0]} for sharding in shardings):
        return
    try:
        executable = serialize_executable.serialize(compiled)
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError):
        return
    _write(key, (recipe, executable))


def write_static(key: str, names: Iterable[str]) -> None:
    """Keeps for later processes which inputs tracing found to be static, beyond those that the key has."""
    _write(key, sorted(names))


def read(key: str) -> Record | list[str] | None:
    """The record of this key, or the names of inputs that are static, too; None if there is no whole one."""
    file = _file(key)
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        warnings.warn(f"The persistent cache cannot be read: {error}", RuntimeWarning, stacklevel=2)
        return None
    size = _DIGEST().digest_size
    if _DIGEST(content[size:]).digest() != content[:size]:  # cut short, or spoilt: XLA would crash on it
        return None
    kept = pickle.loads(content[size:])
    return kept if isinstance(kept, list) else Record(pickle.loads(kept[0]), kept[1])


def _write(key: str, kept: Any) -> None:
    content = pickle.dumps(kept, pickle.HIGHEST_PROTOCOL)
    file = _file(key)
    part = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(_DIGEST(content).digest() + content)
        os.replace(part, file)  # nobody finds half of it
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        warnings.warn(f"The persistent cache cannot keep an executable: {error}", RuntimeWarning, stacklevel=2)


class Loaded:
    """A record's executable as a function. It is loaded in a thread, while its weights are prepared.

    Args:
        load: Gives the executable.
        instead: Runs what the executable does not take: arguments on another device than the first, or on several.
    """

    def __init__(self, load: Callable[[], jax.stages.Compiled], instead: Callable[..., list[Any]]):
        self._instead = instead
        self._run: Callable[..., list[Any]] | None = None
        with_one_thread = ThreadPoolExecutor(1)
        self._loading: Future[jax.stages.Compiled] = with_one_thread.submit(load)
        with_one_thread.shutdown(wait=False)

    def __call__(self, weights: list[Any], arguments: list[Any]) -> list[Any]:
        run = self._run
        if run is None:
            run = self._loaded()
        try:
            return run(weights, arguments)
        except (TypeError, ValueError):
            if run is self._instead:
                raise
        self._run = self._instead
        return self._instead(weights, arguments)

    def _loaded(self) -> Callable[..., list[Any]]:
        try:
            run = self._loading.result()
        except (jax.errors.JaxRuntimeError, TypeError, ValueError, LookupError) as error:
            message = f"An executable of the persistent cache cannot be loaded, and is compiled anew: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=4)
            run = self._instead
        self._run = self._run or run
        return self._run


def _file(key: str) -> Path:
    return Path(jax.config.jax_compilation_cache_dir, _PREFIX + key)


# ---- pickling the operations that prepare weights ------------------------------------------------------------------


@functools.cache
def _primitives() -> Mapping[str, jex.Primitive]:
    """JAX's public primitives by the names that its modules have for them."""
    public = {**vars(jax.lax), **vars(jex.primitives)}
    return {name: p for name, p in public.items() if isinstance(p, jex.Primitive)}


@functools.cache
def _names() -> Mapping[int, str]:
    return {id(primitive): name for name, primitive in _primitives().items()}


class _Pickler(pickle.Pickler):
    """Writes primitives as their names, and what hangs on equations besides (variables, tracebacks) not at all."""

    def reducer_override(self, value: Any) -> Any:
        match value:
            case jex.Primitive():
                if id(value) not in _names():
                    raise pickle.PicklingError(f"{value} has no public name")
                return _primitive, (_names()[id(value)],)
            case jex.JaxprEqn():
                if value.effects:
                    raise pickle.PicklingError(f"{value.primitive} has effects")
                operands = [v if isinstance(v, jex.Literal) else v.aval for v in value.invars]
                return _equation, (value.primitive, value.params, operands, [v.aval for v in value.outvars])
            case jex.Literal():
                return _literal, (np.asarray(value.val, value.aval.dtype), value.aval)
            case jax.core.ShapedArray():
                return _aval, (value.shape, value.dtype, value.weak_type)
            case jex.Jaxpr() | jex.ClosedJaxpr():
                raise pickle.PicklingError("a function")
        return NotImplemented


def _primitive(name: str) -> jex.Primitive:
    return _primitives()[name]


def _equation(primitive: jex.Primitive, params: dict[str, Any], operands: list[Any], results: list[Any]) -> Any:
    variables = [v if isinstance(v, jex.Literal) else jex.Var(v) for v in operands]
    return jex.new_jaxpr_eqn(variables, [jex.Var(aval) for aval in results], primitive, params, jex.no_effects)


def _literal(value: np.ndarray, aval: Any) -> jex.Literal:
    return jex.Literal(value[()], aval)


def _aval(shape: tuple[int, ...], dtype: Any, weak_type: bool) -> Any:
    return jax.core.ShapedArray(shape, dtype, weak_type=weak_type)
