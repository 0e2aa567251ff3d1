"""ONNX operators as `jax.numpy`/`lax`: one plain function per operator, in files by family.

Importing this package registers all of them. To add an operator of your own, see docs/operators-howto.md.
"""

import importlib
import pkgutil

from transmuter.lowering.arrays import canonical, cast, contents, dtype, xp
from transmuter.lowering.registry import Lowering, operator, registered

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["Lowering", "canonical", "cast", "contents", "dtype", "operator", "registered", "xp"]
