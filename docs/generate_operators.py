"""Writes docs/operators.md: every operator that can be lowered, and why the others cannot.

    python docs/generate_operators.py            # needs onnxruntime, of the extra `test`
    python docs/generate_operators.py --check    # says whether the page is current

Everything but the reasons below is read off the registry, the lowerings' docstrings, and the schemas of the `onnx`
package and of ONNX Runtime.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import onnx.defs
import onnxruntime
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from transmuter.lowering import Lowering, registered

PAGE = Path(__file__).with_name("operators.md")

Operator = tuple[str, str]
"""A domain (`""` for ai.onnx) and a name."""

UNSUPPORTED: dict[str, dict[str, str]] = {
    "a whole generation loop with its models inside in one node; the models are supported, run one and loop outside": {
        "com.microsoft": "BeamSearch GreedySearch Sampling WhisperBeamSearch",
    },
    "a vendor's compiled program, which only its own runtime reads": {
        "com.microsoft": "EPContext Snpe",
    },
    "works on memory, not on tensors: byte offsets into a runtime's buffers, or addresses": {
        "com.microsoft": "ConvStateReplay GatedDeltaNetStateReplay SpeculativePrefixCommit",
    },
    "a name only: ONNX Runtime computes nothing either, and does not say how its blocks of bits are laid out": {
        "com.microsoft": "DequantizeBFP QuantizeBFP",
    },
    "integers between steps whose rounding on the GPU is documented nowhere": {
        "com.microsoft": "QOrderedAttention QOrderedLongformerAttention",
    },
    "made for one decoder's CUDA kernels and written by its builder alone; there is no CPU kernel to compare with": {
        "com.microsoft": "DynamicSparseAttention HyperConnectionLowRankMix Mamba2Verify MatMulNBitsQLoRA MoEPacked "
        "PackedSparseAttentionIndexer PackedSparseAttentionIndexerMerge RouterGateUpProj SparseAttentionIndexer "
        "SparsePagedAttention",
    },
    "a plugin of TensorRT, which ONNX Runtime only hands on": {
        "": "DisentangledAttention_TRT EfficientNMS_TRT MultilevelCropAndResize_TRT PyramidROIAlign_TRT",
    },
    "put in by ONNX Runtime while it runs a model, never written to a file that is to be exchanged": {
        "": "MemcpyFromHost MemcpyToHost",
        "com.ms.internal.nhwc": "AveragePool BatchNormalization Conv ConvTranspose DepthToSpace GlobalAveragePool "
        "GlobalLpPool GlobalMaxPool GridSample InstanceNormalization LRN LpPool MaxPool MaxUnpool QLinearAveragePool "
        "QLinearConv QLinearConvTranspose Resize SpaceToDepth",
    },
}
"""Operators without a lowering, by reason."""

NOT_COMPUTED = {"Col2Im": ["string"], "GridSample": ["string"]}
"""Types that the schemas of standard operators allow, but that cannot be added up."""

SECTIONS = {
    "ai.onnx": "The standard operators.",
    "ai.onnx.ml": "Classical machine learning.",
    "ai.onnx.preview": "Operators that the standard tries out.",
    "ai.onnx.preview.training": "Optimisers.",
    "com.microsoft": "ONNX Runtime's own operators.",
    "com.microsoft.nchwc": "What ONNX Runtime's layout optimisation writes: channels in blocks.",
    "legacy": "Operators of ai.onnx that only ONNX Runtime has, most of them from before the standard had versions.",
}

HALVES_AND_FLOATS = "float16 bfloat16 float double"
TYPE_GROUPS = {
    "integers": "int8 int16 int32 int64 uint8 uint16 uint32 uint64",
    "signed integers": "int8 int16 int32 int64",
    "unsigned integers": "uint8 uint16 uint32 uint64",
    "floats": HALVES_AND_FLOATS,
    "float8": "float8e4m3fn float8e4m3fnuz float8e5m2 float8e5m2fnuz",
    "float6": "float6e2m3 float6e3m2",
    "4 bits": "int4 uint4 float4e2m1",
    "2 bits": "int2 uint2",
    "complex": "complex64 complex128",
}
EVERY_TYPE = " ".join(
    [
        *(TYPE_GROUPS[g] for g in ("integers", "floats", "float8", "float6", "4 bits", "2 bits", "complex")),
        "float8e8m0 bool string",
    ]
).split()


def page() -> str:
    """The page's text."""
    lowerings = _by_operator()
    counts = {section: sum(_section(o) == section for o in lowerings) for section in SECTIONS}
    opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in _newest_opsets().items())
    lines = [
        "# Operators",
        "",
        "<!-- Made by docs/generate_operators.py: change that, a docstring or a lowering, not this page. -->",
        "",
        f"From the lowerings and the schemas of onnx {onnx.__version__} and ONNX Runtime {onnxruntime.__version__}: "
        + ", ".join(f"{count} of {section}" for section, count in counts.items() if count)
        + ".",
        "",
        "- **versions**: the opsets of the domain from which a lowering holds, each until the next one, the last up to "
        f"the newest opset ({opsets}) or to where the operator was withdrawn. *By its function body* is an operator "
        "that is expanded as its schema defines it.",
        "- **dtypes**: by type parameter, of the newest version. *floats* are float16, bfloat16, float and double, "
        "*4 bits* int4, uint4 and float4e2m1, *2 bits* int2 and uint2.",
        "- **gradient**: whether a gradient flows from float outputs to float operands. It is zero otherwise.",
        "- **reads**: operands whose contents must be known; where they are traced, there is a graph break. "
        "See [how it works](how-it-works.md).",
        "- **notes**: what the specification leaves open, and where ONNX Runtime differs from it.",
    ]
    for section, about in SECTIONS.items():
        operators = [o for o in _operators(lowerings) if _section(o) == section]
        if operators:
            lines += ["", f"## {section}", "", about, "", "| operator | versions | dtypes | gradient | reads | notes |"]
            lines += ["|---|---|---|---|---|---|", *(_row(o, lowerings.get(o, [])) for o in operators)]
    lines += ["", "## Without a lowering", "", "| operators | why |", "|---|---|"]
    for reason, domains in UNSUPPORTED.items():
        named = [f"{domain or 'ai.onnx'}: {', '.join(names.split())}" for domain, names in domains.items()]
        lines.append(f"| {_escaped('; '.join(named))} | {_escaped(reason)} |")
    return "\n".join(lines) + "\n"


def complaints() -> list[str]:
    """What is wrong with `UNSUPPORTED`: an operator that it lacks, or one that has a lowering by now."""
    able = set(_operators(_by_operator()))
    listed = {(d, n) for domains in UNSUPPORTED.values() for d, names in domains.items() for n in names.split()}
    known = {(s.domain, s.name) for s in [*onnx.defs.get_all_schemas(), *get_all_operator_schema()]}
    return [
        *(f"{_name(o)} has neither a lowering nor a reason why not" for o in sorted(known - able - listed)),
        *(f"{_name(o)} has a lowering, but is listed as unsupported" for o in sorted(listed & able)),
        *(f"{_name(o)} is listed as unsupported, but nobody knows it" for o in sorted(listed - known)),
    ]


def _by_operator() -> dict[Operator, list[Lowering]]:
    found = defaultdict(list)
    for lowering in registered():
        if lowering.function.__module__.startswith("transmuter.lowering."):
            found[lowering.domain, lowering.name].append(lowering)
    return dict(found)


def _operators(lowerings: Iterable[Operator]) -> list[Operator]:
    bodies = {(s.domain, s.name) for s in onnx.defs.get_all_schemas() if _has_body(s)}
    return sorted({*lowerings, *bodies}, key=lambda o: (o[1].lower(), o))


def _has_body(schema: onnx.defs.OpSchema) -> bool:
    return schema.has_function or schema.has_context_dependent_function


def _name(operator: Operator) -> str:
    return "::".join(filter(None, operator))


def _section(operator: Operator) -> str:
    domain, name = operator
    if domain == "":
        return "ai.onnx" if onnx.defs.has(name) else "legacy"
    return domain


@functools.cache
def _newest_opsets() -> dict[str, int]:
    newest: dict[str, int] = {}
    for schema in onnx.defs.get_all_schemas():
        newest[schema.domain] = max(newest.get(schema.domain, 0), schema.since_version)
    return dict(sorted(newest.items())) | {"": onnx.defs.onnx_opset_version()}


@functools.cache
def _schemas() -> Mapping[Operator, list[object]]:
    """Schemas by operator, oldest first; those of the `onnx` package where it has some."""
    found: dict[Operator, list[object]] = defaultdict(list)
    for schema in onnx.defs.get_all_schemas_with_history():
        found[schema.domain, schema.name].append(schema)
    for schema in get_all_operator_schema():
        if not onnx.defs.has(schema.name, schema.domain):
            found[schema.domain, schema.name].append(schema)
    return {operator: sorted(all, key=lambda s: s.since_version) for operator, all in found.items()}


def _schema(operator: Operator) -> object | None:
    """The newest schema that is not that of a withdrawal."""
    all = _schemas().get(operator) or _schemas().get(("", operator[1])) or []
    return next((s for s in reversed(all) if not s.deprecated), None)


def _row(operator: Operator, lowerings: list[Lowering]) -> str:
    newest = lowerings[-1] if lowerings else None
    differentiable = (newest is None or newest.differentiable) and _has_float_output(operator)
    reads = [f"`{name}`" for name in newest.operands if name in {*newest.known, *newest.reads}] if newest else []
    cells = [
        operator[1],
        _versions(operator, lowerings),
        _dtypes(operator),
        "yes" if differentiable else "no",
        ", ".join(reads),
        _notes(lowerings),
    ]
    return f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")


def _versions(operator: Operator, lowerings: list[Lowering]) -> str:
    all = _schemas().get(operator, [])
    first = min((s.since_version for s in all), default=1)
    holds = [str(max(v.since, first)) for v in lowerings]
    if not holds:
        return "by its function body"
    if all and all[-1].deprecated:
        holds[-1] += f" to {all[-1].since_version - 1}"
    return ", ".join(dict.fromkeys(holds))


def _types(operator: Operator, outputs_only: bool = False) -> dict[str, list[str]]:
    """Element types by type parameter, in the order of the operands."""
    schema = _schema(operator)
    if schema is None:
        return {}
    allowed = {c.type_param_str: list(c.allowed_type_strs) for c in schema.type_constraints}
    formals = [*([] if outputs_only else schema.inputs), *schema.outputs]
    used = dict.fromkeys(getattr(f, "type_str", None) or f.typeStr for f in formals)
    left_out = {f"tensor({t})" for t in NOT_COMPUTED.get(operator[1], [])}
    return {name: [t for t in allowed.get(name, [name]) if t not in left_out] for name in used}


def _has_float_output(operator: Operator) -> bool:
    floats = HALVES_AND_FLOATS.split()
    types = {t for all in _types(operator, outputs_only=True).values() for t in all}
    return any(f"tensor({f})" in t for f in floats for t in types)


def _dtypes(operator: Operator) -> str:
    types = _types(operator)
    parameters = {name: allowed for name, allowed in types.items() if "(" not in name}
    texts = {name: _compact(allowed) for name, allowed in (parameters or types).items()}
    if len(texts) == 1 or len(set(texts.values())) == 1 or not parameters:
        return ", ".join(dict.fromkeys(texts.values()))
    return "; ".join(f"{name}: {text}" for name, text in texts.items())


def _compact(types: list[str]) -> str:
    """Types as groups: `floats, int32, int64`, or `all but string`."""
    tensors = {m.group(1) for t in types if (m := re.fullmatch(r"tensor\((\w+)\)", t))}
    others = {"seq": "sequences", "optional": "optionals", "map": "maps", "sparse_tensor": "sparse tensors"}
    rest = dict.fromkeys(others[t.partition("(")[0]] for t in types if not t.startswith("tensor("))
    missing = [t for t in EVERY_TYPE if t not in tensors]
    listed, excluded = _grouped(tensors), _grouped(set(missing))
    if not missing:
        listed = ["all"]
    elif len(missing) < len(tensors) and len(excluded) < len(listed):
        listed = ["all but " + ", ".join(excluded)]
    return ", ".join([*listed, *rest])


def _grouped(types: set[str]) -> list[str]:
    left, found = set(types), []
    for group, members in TYPE_GROUPS.items():
        if left.issuperset(members.split()):
            found.append(group)
            left -= set(members.split())
    return found + [t for t in EVERY_TYPE if t in left]


def _notes(lowerings: list[Lowering]) -> str:
    """The docstrings, newest first, those of older versions with where they end."""
    found: dict[str, str] = {}
    for i in reversed(range(len(lowerings))):
        text = _escaped(" ".join((lowerings[i].function.__doc__ or "").split()))
        before = "" if i == len(lowerings) - 1 else f"Before {lowerings[i + 1].since}: "
        if text:
            found.setdefault(text, before)
    return " ".join(before + text for text, before in found.items())


def _escaped(text: str) -> str:
    """`text` for a cell of a Markdown table: what is not code holds no markup."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"([\\*_<>\[\]])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts).replace("|", "\\|")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is not current")
    wanted, present = page(), PAGE.read_text() if PAGE.exists() else ""
    if not parser.parse_args().check:
        PAGE.write_text(wanted)
        print(*complaints(), sep="\n")
        return 0
    difference = list(
        difflib.unified_diff(present.splitlines(), wanted.splitlines(), "page", "wanted", lineterm="", n=0)
    )
    print(*difference, *complaints(), sep="\n")
    return bool(difference or complaints())


if __name__ == "__main__":
    sys.exit(main())
