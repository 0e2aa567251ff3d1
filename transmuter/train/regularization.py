"""What an export for inference has lost of training: dropout, and BatchNormalization on the statistics of a batch.

Both are other graphs on the same weights: models to train with, of which `model.save` writes the original.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import onnx_ir as ir

from transmuter.errors import InputError
from transmuter.lowering.normalization import BatchNormalization_14
from transmuter.lowering.registry import operator
from transmuter.model import Model

_DOMAIN = "transmuter.train"


@operator(domain=_DOMAIN)
def Dropout(x, *, ratio, key):
    """Zeros a share of the elements and scales the others, so that the mean stays."""
    kept = jax.random.bernoulli(key, 1 - ratio, x.shape)
    return jnp.where(kept, x * jnp.asarray(1 / (1 - ratio), x.dtype), jnp.zeros((), x.dtype))


@operator(domain=_DOMAIN)
def BatchNormalization(x, scale, bias, mean, var, *, epsilon=1e-5, momentum=0.9):
    """Of ONNX version 14 in training mode, in graphs of any version."""
    return BatchNormalization_14(x, scale, bias, mean, var, epsilon=epsilon, momentum=momentum, training_mode=1)


def with_dropout(model: Model, *, attention: float = 0.0, dense: float = 0.0) -> Model:
    """A model with dropout at the places where transformers have it when they are trained.

    Exports for inference leave dropout out. It draws anew for each `key` that a call gives.

    Args:
        model: From `transmuter.load`.
        attention: The share of attention weights to drop: the results of each Softmax that a MatMul takes.
        dense: The share of elements to drop of the result of each dense layer (MatMul, with or without an Add of a
            bias, or Gemm) that is added to a residual.

    Returns:
        A model with the same params. Evaluate and save the original.

    Raises:
        InputError: There is no such place, or a share is not in [0, 1).
    """
    for name, ratio in (("attention", attention), ("dense", dense)):
        if not 0 <= ratio < 1:
            raise InputError(f"The share {name}={ratio} is not in [0, 1).")

    def edit(copy: ir.Model, arrays: dict[ir.Value, Any]) -> None:
        places = {"attention": _attention_weights(copy.graph), "dense": _residual_branches(copy.graph, arrays)}
        for name, ratio in (("attention", attention), ("dense", dense)):
            if ratio and not places[name]:
                raise InputError(f"The graph of {model.name} has no place for {name} dropout. Leave it 0.")
            for value in places[name] if ratio else ():
                _insert_dropout(copy.graph, value, ratio)
        copy.graph.opset_imports.setdefault(_DOMAIN, 1)

    return model.edited(edit)


def _attention_weights(graph: ir.Graph) -> list[ir.Value]:
    return [
        node.outputs[0]
        for node in graph
        if node.op_type == "Softmax"
        and any(use.node.op_type == "MatMul" and use.idx == 0 for use in node.outputs[0].uses())
    ]


def _residual_branches(graph: ir.Graph, arrays: dict[ir.Value, Any]) -> list[ir.Value]:
    """Results of dense layers that are added to something else that is computed."""
    found = []
    for node in graph:
        if node.op_type not in ("MatMul", "Gemm") or node.inputs[1] not in arrays:
            continue
        value = node.outputs[0]
        while (add := _sole_add(value)) is not None:
            other = next((v for v in add.inputs if v is not value), value)
            if other not in arrays:
                found.append(value)
                break
            value = add.outputs[0]  # with its bias
    return found


def _sole_add(value: ir.Value) -> ir.Node | None:
    uses = value.uses()
    return uses[0].node if len(uses) == 1 and uses[0].node.op_type == "Add" else None


def _insert_dropout(graph: ir.Graph, value: ir.Value, ratio: float) -> None:
    users = list(value.uses())
    node = ir.node("Dropout", [value], {"ratio": ratio}, domain=_DOMAIN, name=f"{value.name}/Dropout")
    node.outputs[0].name = f"{value.name}/dropped"
    graph.insert_after(value.producer(), node)
    for use in users:
        use.node.replace_input_with(use.idx, node.outputs[0])


def _check_saved(node: ir.Node) -> None:
    for value in node.outputs[3:]:  # the statistics of the batch, until version 14
        if value.uses() or value.is_graph_output():
            raise InputError(
                f"{value.name!r}, a saved statistic of {node.name!r} (BatchNormalization), is used by the graph, which "
                "version 14 of the operator no longer returns. Export the model for opset 14 or later."
            )


def with_batch_statistics(model: Model) -> tuple[Model, dict[str, str]]:
    """A model whose BatchNormalization nodes normalise with the statistics of the batch, as in training.

    Running means and variances move as ONNX's operator of version 14 says: by `1 - momentum` towards those of the
    batch, whose variance is that of the population (PyTorch's running variance is the unbiased one).

    Args:
        model: From `transmuter.load(..., trainable=True)`.

    Returns:
        The model, and for each param that is a running statistic the name of the value that holds it after a call: ask
        for it with `outputs=`, and do not train it. Exporters often fold these nodes into convolutions; then there is
        none.

    Raises:
        InputError: There is no such node, or the model was not loaded with `trainable=True`.
    """
    if not model.is_trainable:
        raise InputError("Short running statistics are constants. Load the model with trainable=True.")
    statistics: dict[str, str] = {}

    def edit(copy: ir.Model, arrays: dict[ir.Value, Any]) -> None:
        for node in list(copy.graph):
            if node.op_type != "BatchNormalization" or node.domain or not set(node.inputs[3:5]) <= arrays.keys():
                continue
            kept = {k: v for k, v in node.attributes.items() if k in ("epsilon", "momentum")}
            new = ir.Node(_DOMAIN, node.op_type, node.inputs, list(kept.values()), num_outputs=3, name=node.name)
            _check_saved(node)
            pairs = [
                pair for pair in zip(node.outputs[:3], new.outputs) if pair[0].name
            ]  # more where it trains already
            prefix = node.name or node.outputs[0].name
            ir.convenience.replace_nodes_and_values(copy.graph, node, [node], [new], *map(list, zip(*pairs)))
            for output, source in zip(new.outputs[1:], new.inputs[3:5], strict=True):
                output.name = output.name or f"{prefix}/{source.name}"
                statistics[source.name] = output.name
        if not statistics:
            raise InputError(
                f"{model.name} has no BatchNormalization on weights: the exporter has folded it into convolutions. "
                "Export the model without that to keep it: torch.onnx.export(..., optimize=False)."
            )
        copy.graph.opset_imports.setdefault(_DOMAIN, 1)

    return model.edited(edit), statistics
