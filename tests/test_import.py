"""What importing Transmuter imports, and what of it is put off."""

import ast
import subprocess
import sys
from pathlib import Path

import transmuter


def run(code: str) -> str:
    """What a process of its own prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_imports_neither_sympy_nor_what_stands_behind_the_names() -> None:
    code = "import sys, transmuter; print([m for m in ('sympy', 'transmuter.lowering') if m in sys.modules])"
    assert run(code) == "[]"


def test_every_public_name_is_there_and_is_what_type_checkers_see() -> None:
    tree = ast.parse(Path(transmuter.__file__).read_text())
    static = next(node for node in tree.body if isinstance(node, ast.If) and node.test.id == "TYPE_CHECKING")
    homes = {alias.name: node.module for node in static.body for alias in node.names}
    assert sorted(homes) == transmuter.__all__
    assert set(transmuter.__all__) <= set(dir(transmuter))
    for name, home in homes.items():
        assert getattr(transmuter, name) is getattr(sys.modules[home], name), name


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(transmuter, "nothing")


def test_a_module_can_be_imported_first() -> None:
    for module in ("segments.executor", "reading", "telemetry", "lowering.registry"):
        run(f"import transmuter.{module}")
        run(f"from transmuter import {module.split('.')[0]}")


def test_what_is_put_off_works_when_it_is_needed() -> None:
    code = """
import transmuter, onnx_ir as ir, sys
dims = [(ir.SymbolicDim("n") + 1).value, ir.SymbolicDim("max(n, 2) + m").evaluate({"n": 1, "m": 4})]
from google.protobuf import json_format
import sympy, jax.extend.pallas, onnx
node = onnx.helper.make_node("Relu", ["x"], ["y"])
same = json_format.Parse(json_format.MessageToJson(node), onnx.NodeProto()) == node
print(dims, same, sympy.Symbol("x") + 1, callable(jax.extend.pallas.GridMapping.__init__))
"""
    assert run(code) == "['n + 1', 6] True x + 1 True"


def test_deferring_gives_the_module_to_whom_it_imports_at_once() -> None:
    code = """
import sys
from transmuter.deferral import deferring
with deferring("colorsys", "fractions"):
    import colorsys, fractions
    half = fractions.Fraction(1, 2)      # used within the block
print(half, "colorsys" in sys.modules, type(colorsys).__name__, sys.modules["fractions"].Fraction is type(half))
first = colorsys
import colorsys
print(type(colorsys).__name__, first.rgb_to_hls is colorsys.rgb_to_hls)
"""
    assert run(code) == "1/2 False _StandIn True\nmodule True"
