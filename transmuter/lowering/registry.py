"""The registry of lowerings: which function computes which version of which operator.

A lowering is a plain function whose signature is the operator's ONNX schema: tensor inputs are positional (optional
ones default to None, a variadic one is `*args`), attributes are keyword-only under their ONNX names. An attribute
without a default gets the schema's. Further keyword-only parameters are filled in where a signature has them: `key` (a
JAX random key of the node's own), `output_count` (how many outputs the node lists), and for Gradient alone `region`
(what it differentiates, as a function of its operands).

    @operator(known=("shape",))
    def Reshape(data, shape, *, allowzero): ...

    @operator()
    def Softmax_13(x, *, axis): ...        # what Softmax means from opset 13 on; `Softmax` holds until then
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import onnx
import onnx.defs

_FILLED = ("key", "output_count", "region")
_NO_DEFAULT = inspect.Parameter.empty


@dataclass(frozen=True)
class Lowering:
    """One version of one operator. `known` and `reads` name the operands whose contents it needs: a known one arrives
    as a NumPy array, one that it reads arrives as it is, but never hidden (see `arrays.contents`)."""

    domain: str
    name: str
    since: int
    function: Callable[..., Any]
    known: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    exact_dtypes: bool = False
    differentiable: bool = True
    bounds: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        named = {*self.known, *self.reads, *self.bounds}
        if named and (unknown := named - set(self.operands)):
            raise TypeError(f"{self.name} has no operands {sorted(unknown)}")

    @functools.cached_property
    def _parameters(self) -> tuple[inspect.Parameter, ...]:
        """Of the function; looked at when first asked for, since a model has few of the registered operators."""
        return tuple(inspect.signature(self.function).parameters.values())

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands; the last one may be variadic."""
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        positional = [p.name for p in self._parameters if p.kind in kinds]
        return (*positional, *(p.name for p in self._parameters if p.kind is p.VAR_POSITIONAL))

    @functools.cached_property
    def variadic(self) -> bool:
        """Whether the last operand stands for any number of them."""
        return any(p.kind is p.VAR_POSITIONAL for p in self._parameters)

    @functools.cached_property
    def fills(self) -> frozenset[str]:
        """The keyword-only parameters that are no attributes."""
        return frozenset(p.name for p in self._parameters if p.kind is p.KEYWORD_ONLY and p.name in _FILLED)

    @functools.cached_property
    def attributes(self) -> dict[str, Any]:
        """The attributes, with the defaults that the function's signature gives them."""
        return {p.name: p.default for p in self._parameters if p.kind is p.KEYWORD_ONLY and p.name not in _FILLED}

    def operand(self, position: int) -> str:
        """The name of the operand at `position`; the last one's for those that a variadic operand takes."""
        return self.operands[min(position, len(self.operands) - 1)] if self.operands else f"operand {position}"

    def defaults(self, version: int) -> dict[str, Any]:
        """Values of the attributes that a node may omit, at a `version` of the operator's domain."""
        return _defaults(self, version)


_LOWERINGS: dict[tuple[str, str], list[Lowering]] = {}


def operator(
    *names: str,
    domain: str = "",
    known: tuple[str, ...] = (),
    reads: tuple[str, ...] = (),
    exact_dtypes: bool = False,
    differentiable: bool = True,
    bounds: tuple[str, ...] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function as the lowering of the operator that its name says, `Name` or `Name_VERSION`.

    Args:
        names: The operators, where the function's own name does not say them (`"Add", "Sub_7"`).
        domain: The operator's domain, `""` for ai.onnx.
        known: Operands that must be NumPy arrays (a shape, axes, pads): a traced one is a graph break.
        reads: Operands whose contents decide the shape of the result (NonZero): a hidden one is a graph break.
        exact_dtypes: The operator reads bits: float16 operands of a model that computes in float32 are cast back first.
        differentiable: False where float outputs have no gradient but zero: they are constant piece by piece (Round),
            drawn at random, or made of no float operand. (Operators without float outputs need not say it.)
        bounds: Operands of which a bound will do where only the run knows them (`padding.Length`): they arrive as such.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names or (function.__name__,):
            base, since = re.fullmatch(r"(.+?)(?:_(\d+))?", name).groups()
            versions = _LOWERINGS.setdefault((domain, base), [])
            for other in [v for v in versions if v.since == int(since or 1)]:
                if _place(other.function) != _place(function):
                    where = f"{domain or 'ai.onnx'}::{base} from version {other.since}"
                    raise ValueError(f"{where} already has a lowering, {'.'.join(_place(other.function))}.")
                versions.remove(other)  # a cell of a notebook or a module that runs again
            versions.append(
                Lowering(domain, base, int(since or 1), function, known, reads, exact_dtypes, differentiable, bounds)
            )
            versions.sort(key=lambda v: -v.since)
        find.cache_clear()
        return function

    return register


def _place(function: Callable[..., Any]) -> tuple[str, str]:
    return function.__module__, function.__qualname__


@functools.cache
def find(domain: str, name: str, version: int) -> Lowering | None:
    """The lowering that holds for an operator at a version of its domain, or None."""
    return next((v for v in _LOWERINGS.get((domain, name), ()) if v.since <= version), None)


def generation() -> int:
    """A number that changes when a lowering is registered."""
    return sum(map(len, _LOWERINGS.values()))


def registered() -> list[Lowering]:
    """Every lowering, by domain, name and version."""
    return sorted((v for versions in _LOWERINGS.values() for v in versions), key=lambda v: (v.domain, v.name, v.since))


@functools.cache
def schema(domain: str, name: str, version: int) -> onnx.defs.OpSchema | None:
    """The ONNX schema of an operator at a version of its domain, or None where the `onnx` package has none."""
    try:
        return onnx.defs.get_schema(name, max_inclusive_version=version, domain=domain)
    except onnx.defs.SchemaError:
        return None


@functools.cache
def _defaults(lowering: Lowering, version: int) -> dict[str, Any]:
    known = schema(lowering.domain, lowering.name, version)
    defaults = {}
    for name, default in lowering.attributes.items():
        if default is not _NO_DEFAULT:
            defaults[name] = default
        elif known is not None and name in known.attributes and known.attributes[name].default_value.name:
            defaults[name] = _python(onnx.helper.get_attribute_value(known.attributes[name].default_value))
    return defaults


def _python(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_python, value))
    return value.decode() if isinstance(value, bytes) else value
