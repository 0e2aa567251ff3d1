"""Every exception that Transmuter raises on purpose.

Each message has one sentence that says what is wrong and one that says what to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class TransmuterError(Exception):
    """Base of every error of this package."""


class ModelError(TransmuterError):
    """The source is no usable ONNX model: truncated, malformed, cyclic, or its external data is missing or
    lies outside of the model's folder. Or a repository lacks a file, or has a malformed one (configuration, tokenizer,
    chat template)."""


class InputError(TransmuterError, ValueError):
    """An input (or requested output) has the wrong name, dtype, rank or dimension."""


class HubError(TransmuterError):
    """A file of a Hugging Face repository could not be had."""


class UnsupportedOperatorError(TransmuterError, NotImplementedError):
    """The graph needs operators that have no lowering.

    `operators` maps each operator, as `domain::Name` (or `Name` in ai.onnx), to the names of its nodes.
    """

    def __init__(self, operators: Mapping[str, Sequence[str]]):
        self.operators = {name: tuple(nodes) for name, nodes in operators.items()}
        lines = [
            f"  {name} x{len(nodes)} (nodes {', '.join(nodes[:3])}{', ...' if len(nodes) > 3 else ''})"
            for name, nodes in sorted(self.operators.items())
        ]
        super().__init__(
            "The graph uses operators that have no lowering:\n" + "\n".join(lines) + "\n"
            "Register one with `transmuter.lowering.operator` (see docs/operators-howto.md), or export the model "
            "without them."
        )


class LoweringError(TransmuterError):
    """A node failed: its operands do not fit its operator. The message names the node, operator, version, and the
    shapes and dtypes of its operands."""


class GraphBreakError(TransmuterError):
    """A node needs the contents of a value which are hidden by a JAX transform around the call.

    Attributes: `node`, `operator`, `operand` (name of the operand), `origin` (the chain of values that leads to it).
    """

    def __init__(
        self, message: str, *, node: str = "", operator: str = "", operand: str = "", origin: Sequence[str] = ()
    ):
        super().__init__(message)
        self.node, self.operator, self.operand, self.origin = node, operator, operand, tuple(origin)


class GradientError(TransmuterError):
    """Reverse-mode differentiation reaches a node that has no reverse mode. The message names it and the ways out."""


class ExecutionError(TransmuterError, RuntimeError):
    """XLA failed to compile or to run a segment, for want of memory above all. The message holds XLA's own.

    Devices work on while Python goes on: a failure that only shows when a result is read is JAX's own error.

    Attributes: `segment` (its depth and signature), `nodes` (names of its nodes, in order).
    """

    def __init__(self, message: str, *, segment: str = "", nodes: Sequence[str] = ()):
        super().__init__(message)
        self.segment, self.nodes = segment, tuple(nodes)


class TrainingError(TransmuterError):
    """Training cannot go on: a loss or gradient is not finite, the loss does not depend on what is trained, or a later
    batch does not fit.

    Attributes: `state` (the last good `train.TrainState`), `params` (all params of the model as that has them).
    """

    def __init__(self, message: str, *, state: Any = None, params: Mapping[str, Any] | None = None):
        super().__init__(message)
        self.state, self.params = state, params


class ServingError(TransmuterError, RuntimeError):
    """A serving takes no more requests or gave one up: its queue is full, it was stopped, its worker died, or the time
    for it is over."""


class CoverageError(TransmuterError):
    """The coverage matrix cannot be made: its list of models is malformed, a model of it cannot be had, or there is no
    recorded reference."""


class RecompileWarning(UserWarning):
    """A compiled model compiles again and again; told once of each. The message says what would help."""
