"""LoRA (Hu et al., 2021): low-rank adapters beside weights that stay as they are, quantised ones too (QLoRA).

An adapter is three nodes in the graph, so that an adapted model runs wherever ONNX does; where the weight is a float,
it can be merged into it.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx_ir as ir

from transmuter.errors import InputError, ModelError
from transmuter.model import Model
from transmuter.partition import Patterns, matching

ADAPTERS = re.compile(r"\.lora_[AB]$")
"""What `trainable=` takes to train the adapters alone."""


@dataclass(frozen=True)
class Adapter:
    """One adapter: what it computes is added to the result of a node.

    Attributes:
        node: The node's name.
        weight: The param that it stands beside, `""` where that is quantised.
        a, b: The adapter's own params: [in, rank] and [rank, out], or kernels of 1x1 convolutions.
        scale: What their product is multiplied by, `alpha / rank`.
        is_transposed: Whether the weight is [out, in].
        gain: What the node multiplies its own product by (Gemm's alpha).
    """

    node: str
    weight: str
    a: str
    b: str
    scale: float
    is_transposed: bool = False
    gain: float = 1.0


def with_lora(
    model: Model, places: Patterns, *, rank: int = 8, alpha: float | None = None, seed: int = 0
) -> tuple[Model, list[Adapter]]:
    """A model with adapters beside the weights of some nodes.

        adapted, adapters = train.with_lora(model, "*/attention/self/*", rank=8)
        step = train.Step(adapted, loss, optimizer, trainable=train.lora.ADAPTERS)
        ...
        model.save("tuned.onnx", params=train.lora.merge(model, step.params(state), adapters))

    Args:
        model: From `transmuter.load(..., trainable=True)`.
        places: Which MatMul, Gemm, Conv 1x1 and MatMulNBits nodes, by their names or those of their weights.
        rank: The rank of the adapters.
        alpha: The strength: what an adapter computes is multiplied by `alpha / rank`. None is `rank`.
        seed: Of the first factors, which are uniform in ±1/sqrt(in) as in PEFT; the second ones are zero, so that the
            model computes at first what it did.

    Returns:
        The adapted model, whose further params are the adapters' factors, and what is needed to merge or save them.

    Raises:
        InputError: Nothing that can be adapted matches, or the model was not loaded with `trainable=True`.
    """
    if not model.is_trainable:
        raise InputError("Adapters are small params. Load the model with trainable=True.")
    if rank < 1:
        raise InputError(f"The rank is {rank}, but must be at least 1.")
    places = places if isinstance(places, (str, re.Pattern)) else list(places)
    scale = (rank if alpha is None else alpha) / rank
    random = np.random.default_rng(seed)
    adapters: list[Adapter] = []

    def edit(copy: ir.Model, arrays: dict[ir.Value, Any]) -> None:
        for node in list(copy.graph):
            found = _target(node, arrays)
            if found is not None and matching(places, (found.name, found.weight.name)):
                adapters.append(_insert(copy.graph, found, arrays, rank, scale, random))

    adapted = model.edited(edit)
    if not adapters:
        able = [t for t in (_target(node, model.weight_values) for node in model.graph) if t is not None]
        near = ", ".join(f"{t.name} ({t.weight.name})" for t in able[:3])
        raise InputError(
            f"No node that can be adapted matches {places!r}. "
            + (f"Those that can be are, with their weights, {near}, ..." if able else f"{model.name} has none.")
        )
    return adapted, adapters


def merge(model: Model, params: Mapping[str, Any], adapters: Sequence[Adapter]) -> dict[str, jax.Array]:
    """The params of `model`, with what the adapters have learnt added to the weights.

    Args:
        model: The model that was adapted.
        params: Those of the adapted model, from `Step.params`.
        adapters: From `with_lora`.

    Raises:
        InputError: A weight is quantised, or two adapters share it, or its node multiplies its product by zero (Gemm's
            alpha). Save the adapted model then, adapters and all.
    """
    merged = {name: params[name] for name in model.params}
    done: set[str] = set()
    for adapter in adapters:
        if (why := _why_not_merged(adapter, done)) is not None:
            raise InputError(
                f"The adapter of {adapter.node!r} {why}, so that it cannot be merged. Save the adapted model, in which "
                "adapters are nodes: adapted.save(path, params=...)."
            )
        done.add(adapter.weight)
        weight = jnp.asarray(merged[adapter.weight])
        a, b = (
            jnp.asarray(params[name], jnp.promote_types(weight.dtype, jnp.float32)) for name in (adapter.a, adapter.b)
        )
        if a.ndim > 2:  # kernels [rank, in, 1, 1] and [out, rank, 1, 1]
            change = (b.reshape(b.shape[:2]) @ a.reshape(a.shape[:2])).reshape(weight.shape)
        else:
            change = (a @ b).T if adapter.is_transposed else a @ b
        merged[adapter.weight] = (weight + adapter.scale / adapter.gain * change).astype(weight.dtype)
    return merged


def _why_not_merged(adapter: Adapter, done: set[str]) -> str | None:
    if not adapter.weight:
        return "stands beside a quantised weight"
    if not adapter.gain:
        return "stands beside a product that its node multiplies by zero"
    return f"shares {adapter.weight!r} with another" if adapter.weight in done else None


def save(path: str | os.PathLike[str], params: Mapping[str, Any], adapters: Sequence[Adapter]) -> None:
    """Writes the adapters' factors as safetensors, with what they belong to in the metadata.

    Args:
        path: The file.
        params: Those of the adapted model, from `Step.params`.
        adapters: From `with_lora`.
    """
    from safetensors.numpy import save_file

    names = [name for adapter in adapters for name in (adapter.a, adapter.b)]
    arrays = {name: np.ascontiguousarray(params[name]) for name in names}
    save_file(arrays, path, {"format": "transmuter-lora", "adapters": json.dumps([asdict(a) for a in adapters])})


def load(path: str | os.PathLike[str], model: Model) -> tuple[Model, list[Adapter]]:
    """The adapted model of a file that `save` has written.

    Args:
        path: The file.
        model: The model that was adapted, from `transmuter.load(..., trainable=True)`.

    Returns:
        As `with_lora`: the factors are those of the file.

    Raises:
        ModelError: The file is no such one, or is of another model.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            adapters = [Adapter(**entry) for entry in json.loads((file.metadata() or {})["adapters"])]
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{os.fspath(path)} holds no adapters ({error}). Give a file of train.lora.save.") from error

    def edit(copy: ir.Model, contents: dict[ir.Value, Any]) -> None:
        targets = {t.name: t for t in (_target(node, contents) for node in copy.graph) if t is not None}
        for adapter in adapters:
            target = targets.get(adapter.node)
            if target is None or not target.fits(arrays[adapter.a], arrays[adapter.b]):
                raise ModelError(
                    f"{model.name} has no node {adapter.node!r} with such a weight as the adapter in "
                    f"{os.fspath(path)} is for. Load the model that was adapted."
                )
            _join(copy.graph, target, contents, (arrays[adapter.a], arrays[adapter.b]), adapter.scale)

    return model.edited(edit), adapters


# ---- the graph -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Target:
    """A node that can have an adapter."""

    node: ir.Node
    weight: ir.Value
    sizes: tuple[int, int]
    """Features in and out."""
    dtype: ir.DataType
    is_float: bool
    is_transposed: bool = False
    gain: float = 1.0

    @property
    def name(self) -> str:
        return self.node.name or self.node.outputs[0].name

    @property
    def is_conv(self) -> bool:
        return self.node.op_type == "Conv"

    def factors(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of an adapter's factors."""
        size_in, size_out = self.sizes
        if not self.is_conv:
            return (size_in, rank), (rank, size_out)
        ones = (1,) * (len(self.weight.shape) - 2)
        return (rank, size_in, *ones), (size_out, rank, *ones)

    def fits(self, a: np.ndarray, b: np.ndarray) -> bool:
        return (a.shape, b.shape) == self.factors(b.shape[1] if self.is_conv else b.shape[0])


def _target(node: ir.Node, weights: Iterable[ir.Value]) -> _Target | None:
    kind, inputs = (node.domain, node.op_type), node.inputs
    if kind == ("com.microsoft", "MatMulNBits"):
        sizes = node.attributes["K"].as_int(), node.attributes["N"].as_int()
        return _Target(node, inputs[1], sizes, inputs[2].dtype, is_float=False) if inputs[1] in weights else None
    if kind not in (("", "MatMul"), ("", "Gemm"), ("", "Conv")):
        return None
    weight, is_transposed = inputs[1], False
    attribute = lambda name, default: node.attributes[name].value if name in node.attributes else default
    if kind[1] == "Gemm":
        if attribute("transA", 0):
            return None
        is_transposed = bool(attribute("transB", 0))
    dtype, is_float = None, True
    while (producer := weight.producer()) is not None:
        if producer.op_type == "Transpose" and kind[1] != "Conv" and len(producer.inputs[0].shape or ()) == 2:
            is_transposed = not is_transposed
        elif producer.op_type == "DequantizeLinear":
            dtype, is_float = producer.inputs[1].dtype, False
        elif producer.op_type != "Identity":
            return None
        weight = producer.inputs[0]
    if weight not in weights or weight.shape is None:
        return None
    shape, dtype = [int(d) for d in weight.shape], dtype or weight.dtype
    if kind[1] == "Conv":
        is_pointwise = attribute("group", 1) == 1 and math.prod(shape[2:]) == 1 and not any(attribute("pads", ()))
        if not is_pointwise or attribute("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
            return None
        return _Target(node, weight, (shape[1], shape[0]), dtype, is_float)
    if len(shape) != 2:
        return None
    sizes = (shape[1], shape[0]) if is_transposed else (shape[0], shape[1])
    return _Target(node, weight, sizes, dtype, is_float, is_transposed, float(attribute("alpha", 1.0)))


def _insert(
    graph: ir.Graph, target: _Target, arrays: dict[ir.Value, Any], rank: int, scale: float, random: np.random.Generator
) -> Adapter:
    shape_a, shape_b = target.factors(rank)
    bound = 1 / math.sqrt(target.sizes[0])
    dtype = target.dtype.numpy()
    factors = random.uniform(-bound, bound, shape_a).astype(dtype), np.zeros(shape_b, dtype)
    a, b = _join(graph, target, arrays, factors, scale)
    weight = target.weight.name if target.is_float else ""
    return Adapter(target.name, weight, a, b, scale, target.is_transposed, target.gain)


def _join(
    graph: ir.Graph,
    target: _Target,
    arrays: dict[ir.Value, Any],
    factors: tuple[np.ndarray, np.ndarray],
    scale: float,
) -> tuple[str, str]:
    """Adds an adapter's nodes and params to the graph. Returns the names of the params."""
    node, name = target.node, target.name
    values = []
    for letter, array in zip("AB", factors, strict=True):
        if f"{name}.lora_{letter}" in graph.initializers:
            raise InputError(f"{name!r} has an adapter already. Merge it, or adapt the original model.")
        value = ir.Value(name=f"{name}.lora_{letter}", type=ir.TensorType(target.dtype), shape=ir.Shape(array.shape))
        value.const_value = ir.Tensor(array, name=value.name)
        graph.register_initializer(value)
        arrays[value] = array
        values.append(value)
    a, b = values
    result = node.outputs[0]
    users, positions = list(result.uses()), [i for i, output in enumerate(graph.outputs) if output is result]

    def then(op_type: str, inputs: list[ir.Value], attributes: dict[str, Any] | None = None) -> ir.Value:
        made = ir.node(op_type, inputs, attributes or {}, name=f"{name}.lora/{op_type}_{len(new)}")
        made.outputs[0].name = f"{made.name}_output"
        new.append(made)
        return made.outputs[0]

    new: list[ir.Node] = []
    if target.is_conv:
        strides = {"strides": list(node.attributes["strides"].as_ints())} if "strides" in node.attributes else {}
        product = then("Conv", [then("Conv", [node.inputs[0], a], strides), b])
    else:
        product = then("MatMul", [then("MatMul", [node.inputs[0], a]), b])
    factor = ir.Tensor(np.asarray(scale, target.dtype.numpy()), name=f"{name}.lora/scale")
    scaled = then("Mul", [product, then("Constant", [], {"value": factor})])
    whole = then("Add", [result, scaled])
    whole.name, whole.type, whole.shape, result.name = result.name, result.type, result.shape, f"{name}.lora/frozen"
    graph.insert_after(node, new)
    for use in users:
        use.node.replace_input_with(use.idx, whole)
    for position in positions:
        graph.outputs[position] = whole
    return a.name, b.name
