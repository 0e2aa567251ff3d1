"""Prints the time that a call spends in each of XLA's kernels, against what the machine can do.

    python benchmarks/kernels.py --only "resnet50 1" --top 20

A kernel is a fusion, a matrix product or a convolution of the compiled module; those of like shapes are one row.
"""

from __future__ import annotations

import argparse
import collections
import glob
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import inference

_BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "f16": 16, "bf16": 16}
_BITS |= {"f64": 64, "s64": 64, "u64": 64}  # others have 32
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%(?P<name>\S+) = (?P<type>\(.*?\)|\S+) (?P<op>[\w-]+)\((?P<operands>[^)]*)\)")


@dataclass
class Instruction:
    """An instruction of an HLO module: its result's type as text, its operands' names, and its line."""

    type: str
    op: str
    operands: list[str]
    line: str

    @property
    def called(self) -> list[str]:
        """The computations that it calls."""
        return re.findall(r"(?:calls|body|to_apply)=%([\w.-]+)", self.line)


@dataclass
class Module:
    """An HLO module's text, by names, which are unique in it."""

    instructions: dict[str, Instruction] = field(default_factory=dict)
    computations: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Module:
        module, names = cls(), []
        for line in text.splitlines():
            if line.endswith("{") and (start := re.match(r"(?:ENTRY )?%([\w.-]+) \(", line)):
                names = module.computations.setdefault(start[1], [])
            elif found := _INSTRUCTION.match(line):
                operands = re.findall(r"%([\w.-]+)", found["operands"])
                module.instructions[found["name"]] = Instruction(found["type"], found["op"], operands, line)
                names.append(found["name"])
        return module

    def flops(self, name: str) -> float:
        """Those of the matrix products and convolutions in an instruction, a multiply-add counted as two."""
        it = self.instructions[name]
        if it.op == "dot":
            contracted = _numbers(re.search(r"lhs_contracting_dims={([\d,]*)}", it.line)[1])
            left = _dims(self.instructions[it.operands[0]].type)
            return 2 * math.prod(_dims(it.type)) * math.prod(left[i] for i in contracted)
        if it.op == "convolution":
            labels = re.search(r"dim_labels=\w+_(\w+)->", it.line)[1]
            kernel = _dims(self.instructions[it.operands[1]].type)
            return 2 * math.prod(_dims(it.type)) * math.prod(kernel) / kernel[labels.index("o")]
        return sum(self.flops(inner) for called in it.called for inner in self.computations.get(called, ()))

    def bytes(self, name: str) -> float:
        """Those of an instruction's operands and result."""
        it = self.instructions[name]
        return _nbytes(it.type) + sum(_nbytes(self.instructions[o].type) for o in it.operands)


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def _dims(type_: str) -> list[int]:
    return _numbers(re.search(r"\[([\d,]*)\]", type_)[1])


def _nbytes(type_: str) -> float:
    arrays = re.findall(r"(\w+)\[([\d,]*)\]", type_)
    return sum(_BITS.get(dtype, 32) / 8 * math.prod(_numbers(dims)) for dtype, dims in arrays)


@dataclass
class Row:
    """Kernels of one shape: how many there are in a call, and their sums for a call."""

    what: str
    calls: float = 0
    ms: float = 0
    flops: float = 0
    bytes: float = 0


def events(call: Callable[[], Any], repeats: int) -> dict[str, tuple[float, float]]:
    """How often each kernel runs in a call, and its milliseconds in a call."""
    from jax import profiler

    with tempfile.TemporaryDirectory() as folder:
        with profiler.trace(folder):
            for _ in range(repeats):
                call()
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        data = profiler.ProfileData.from_file(path)
        found: dict[str, list[float]] = collections.defaultdict(list)
        for plane in data.planes:
            for line in plane.lines:
                for event in line.events:
                    if "hlo_op" in (stats := dict(event.stats)):
                        found[str(stats["hlo_op"])].append(event.duration_ns / 1e6)
    return {name: (len(spent) / repeats, sum(spent) / repeats) for name, spent in found.items()}


def rows(compiled: Any, inputs: Any, repeats: int) -> Iterator[Row]:
    """The kernels of a compiled model, the longest first."""
    import jax

    jax.block_until_ready(compiled(inputs))
    modules = [Module.parse(text) for text in hlo(compiled)]
    merged: dict[str, Row] = {}
    for name, (calls, ms) in events(lambda: jax.block_until_ready(compiled(inputs)), repeats).items():
        module = next((m for m in modules if name in m.instructions), None)
        if module is None:
            merged.setdefault(name, Row(name)).ms += ms
            continue
        it = module.instructions[name]
        if it.op in ("while", "call", "conditional"):
            continue  # their bodies' kernels have rows
        operands = ", ".join(_short(module.instructions[o].type) for o in it.operands)
        row = merged.setdefault(what := f"{re.sub(r'[.0-9]+$', '', name)}({operands}) -> {_short(it.type)}", Row(what))
        row.calls += calls
        row.ms += ms
        row.flops += calls * module.flops(name)
        row.bytes += calls * module.bytes(name)
    yield from sorted(merged.values(), key=lambda row: -row.ms)


def _short(type_: str) -> str:
    return re.sub(r"\{[^}]*\}", "", type_)


def hlo(compiled: Any) -> list[str]:
    """The optimised HLO of each segment that has run on the model's own params."""
    import jax

    with jax.enable_x64(True):  # as the compiled model runs them
        return [
            executable.main.lower(executable.values, [jax.ShapeDtypeStruct(*x) for x in segment.signature.arguments])
            .compile()
            .as_text()
            for segment in compiled.segments
            for executable in segment.executables
        ]


def peaks(threads: int) -> tuple[float, float]:
    """The machine's measured GFLOP/s in a float32 product of 2048 x 2048, and GB/s of reading 1 GiB."""
    import jax
    import jax.numpy as jnp

    a, big = jnp.ones((2048, 2048)), jnp.ones(1 << 28)
    product, total = jax.jit(jnp.matmul), jax.jit(lambda x: x.reshape(threads * 8, -1).sum(1))
    calls = [lambda: product(a, a).block_until_ready(), lambda: total(big).block_until_ready()]
    product_ms, total_ms = inference.alternate(calls, 5)
    return 2 * 2048**3 / product_ms / 1e6, 4 * big.size / total_ms / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="minilm 1x128", help="the cases whose name contains this")
    parser.add_argument("--top", type=int, default=25, help="how many rows of each case")
    parser.add_argument("--repeats", type=int, default=10, help="profiled calls of each case")
    parser.add_argument("--threads", type=int, default=2, help="CPUs to use")
    parser.add_argument("--hlo", metavar="FOLDER", help="also write the optimised HLO of each case there")
    arguments = parser.parse_args()
    inference.use_cpus(arguments.threads)

    import transmuter

    flops, reads = peaks(arguments.threads)
    print(f"This machine: {flops:.0f} GFLOP/s in a large float32 product, {reads:.1f} GB/s read from memory.")
    for case in inference.cases():
        if arguments.only not in case.name:
            continue
        compiled = transmuter.compile(transmuter.load(inference.ARCHITECTURES[case.architecture]()), case.inputs)
        found = list(rows(compiled, case.inputs, arguments.repeats))
        total = sum(row.ms for row in found)
        print(f"\n{case.name}: {total:.2f} ms in kernels, {sum(r.flops for r in found) / 1e9:.2f} GFLOP in products")
        print(f"{'ms':>8}{'share':>7}{'calls':>7}{'GFLOP/s':>9}{'GB/s':>7}  kernel")
        for row in found[: arguments.top]:
            speed = f"{row.flops / row.ms / 1e6:.0f}" if row.flops else ""
            print(
                f"{row.ms:>8.3f}{row.ms / total:>7.1%}{row.calls:>7.0f}{speed:>9}{row.bytes / row.ms / 1e6:>7.1f}"
                f"  {row.what}"
            )
        if arguments.hlo:
            for i, text in enumerate(hlo(compiled)):
                with open(os.path.join(arguments.hlo, f"{case.name.replace(' ', '-')}-{i}.txt"), "w") as stream:
                    stream.write(text)


if __name__ == "__main__":
    main()
