"""Imports put off until somebody uses the module."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def deferring(*names: str) -> Iterator[None]:
    """Within the block, a first import of one of these modules gives a stand-in, which imports it when it is first
    asked for an attribute. After the block, imports are as ever: `importlib.util.LazyLoader` would give everybody its
    lazy modules, and before Python 3.12 two threads could get to see a half of one."""
    finder = _Finder(set(names))
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in finder.names:
            if isinstance(sys.modules.get(name), _StandIn):
                del sys.modules[name]


class _StandIn(ModuleType):
    def __getattr__(self, attribute: str) -> Any:
        name = self.__name__
        if sys.modules.get(name) is self:  # within the block still
            self.__spec__.loader.names.discard(name)
            del sys.modules[name]
        return getattr(importlib.import_module(name), attribute)


class _Finder:
    """Finds and loads the stand-ins."""

    def __init__(self, names: set[str]):
        self.names = names

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in self.names else None

    def create_module(self, spec: ModuleSpec) -> None:
        """An ordinary module will do."""

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = _StandIn
