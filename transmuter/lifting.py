"""Float constants in local functions become weights of the graph, like those of the graph itself.

A function has no initializers. So each such constant becomes an input of its function, and of those that call it, up to
the graph, whose nodes give an initializer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import onnx_ir as ir

_FLOATS = {ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE}
_Lifted = dict[str, ir.TensorProtocol]
"""The further inputs of a function, by the names that the graph has for them."""


def lift(model: ir.Model, smallest: int) -> None:
    """Lifts the constants from `smallest` elements on of the functions that are not inlined; none calls itself."""
    lifted: dict[ir.OperatorIdentifier, _Lifted] = {}

    def of(identifier: ir.OperatorIdentifier) -> _Lifted:
        if identifier not in lifted:
            function = model.functions[identifier]
            found: _Lifted = {}

            def add(name: str, tensor: ir.TensorProtocol) -> ir.Value:
                found[name] = tensor
                function.inputs.append(_value(name, tensor))
                return function.inputs[-1]

            for node in list(function.all_nodes()):
                tensor = _constant(node, smallest)
                if tensor is not None and not node.outputs[0].is_graph_output():
                    name = "/".join(filter(None, (*identifier, node.outputs[0].name)))
                    while name in found:  # subgraphs beside each other may use a name twice
                        name += "_"
                    ir.convenience.replace_all_uses_with(node.outputs[0], add(name, tensor))
                    node.graph.remove(node, safe=True)
            _give(function.all_nodes(), model, of, add)
            lifted[identifier] = found
        return lifted[identifier]

    def register(name: str, tensor: ir.TensorProtocol) -> ir.Value:
        value = _value(name, tensor)
        value.const_value = tensor
        model.graph.register_initializer(value)
        return value

    _give(model.graph.all_nodes(), model, of, register)


def _give(
    nodes: Iterable[ir.Node],
    model: ir.Model,
    of: Callable[[ir.OperatorIdentifier], _Lifted],
    make: Callable[[str, ir.TensorProtocol], ir.Value],
) -> None:
    """Gives calls of functions their further inputs; `make` makes each value that is given."""
    made: dict[str, ir.Value] = {}
    for node in list(nodes):
        function = model.functions.get(node.op_identifier())
        wanted = {} if function is None else of(node.op_identifier())
        if not wanted:
            continue
        node.resize_inputs(len(function.inputs))
        for place, (name, tensor) in enumerate(wanted.items(), len(function.inputs) - len(wanted)):
            if name not in made:
                made[name] = make(name, tensor)
            node.replace_input_with(place, made[name])


def _constant(node: ir.Node, smallest: int) -> ir.TensorProtocol | None:
    """What a Constant node holds, if that is a float weight."""
    attribute = node.attributes.get("value") if node.op_type == "Constant" and node.domain == "" else None
    if attribute is None or attribute.is_ref():
        return None
    tensor = attribute.as_tensor()
    return tensor if tensor.dtype in _FLOATS and tensor.size >= smallest else None


def _value(name: str, tensor: ir.TensorProtocol) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape))
