"""Recurrent layers: RNN, GRU, LSTM. The products of all time steps with the input weights are one matrix product; what
is left of a step, which needs the step before, is scanned."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter.lowering.arrays import cast, traced
from transmuter.lowering.attention import masked, positions, probabilities
from transmuter.lowering.control_flow import varying, varying_axes
from transmuter.lowering.linear import accumulator
from transmuter.lowering.registry import operator

_SHORT = 4
"""Steps up to which a layer is unrolled: without a loop, it does not compute the gates of the step after the last."""

Function: TypeAlias = Callable[[jax.Array], jax.Array]
States: TypeAlias = Sequence[jax.Array]
"""The hidden state first."""


@dataclass(frozen=True)
class _Cell:
    """One direction of a layer."""

    gates: Callable[[jax.Array, States], Any]
    """What there is of a step's gates before it: the inputs' share, and what follows from the states."""
    step: Callable[[Any, States], States]
    """The new states, of the gates and the old ones."""


_ACTIVATIONS: dict[str, tuple[Callable[..., jax.Array], tuple[float | None, ...]]] = {
    "affine": (lambda x, alpha, beta: alpha * x + beta, (1.0, 0.0)),
    "elu": (lambda x, alpha: jax.nn.elu(x, alpha), (1.0,)),
    "hardsigmoid": (lambda x, alpha, beta: jnp.clip(alpha * x + beta, 0, 1), (0.2, 0.5)),
    "leakyrelu": (lambda x, alpha: jnp.where(x >= 0, x, alpha * x), (0.01,)),
    "relu": (jax.nn.relu, ()),
    "scaledtanh": (lambda x, alpha, beta: alpha * jnp.tanh(beta * x), (None, None)),
    "sigmoid": (jax.nn.sigmoid, ()),
    "softplus": (jax.nn.softplus, ()),
    "softsign": (jax.nn.soft_sign, ()),
    "tanh": (jnp.tanh, ()),
    "thresholdedrelu": (lambda x, alpha: jnp.where(x >= alpha, x, 0), (1.0,)),
}
"""By lower-case name, with the alpha and the beta (where the function has them) of the ONNX operator of that name: ONNX
Runtime takes 0 for those of Affine, ScaledTanh and ThresholdedRelu."""


@dataclass(frozen=True)
class _Layer:
    """Attributes that recurrent layers have in common."""

    direction: str
    layout: int | None
    activations: tuple[str, ...] | None
    alphas: tuple[float, ...] | None
    betas: tuple[float, ...] | None
    clip: float | None
    variant: int | None = None
    """Whether an LSTM couples its forget gate to the input gate, and a GRU applies its weights before the reset."""

    @property
    def directions(self) -> int:
        if self.direction not in ("forward", "reverse", "bidirectional"):
            raise ValueError(f"the direction is {self.direction!r}")
        return 2 if self.direction == "bidirectional" else 1

    def functions(self, usual: Sequence[str]) -> list[list[Function]]:
        """Each direction's activations. Those that have an alpha or a beta take the next one of the given ones."""
        names, count = self.activations or [*usual] * self.directions, self.directions * len(usual)
        if len(names) != count:
            raise ValueError(f"{len(names)} activations are given, and the layer has {count}")
        given = iter(self.alphas or ()), iter(self.betas or ())
        found = [self._function(name, given) for name in names]
        return [found[i : i + len(usual)] for i in range(0, count, len(usual))]

    def _function(self, name: str, given: tuple[Iterator[float], Iterator[float]]) -> Function:
        if name.lower() not in _ACTIVATIONS:
            raise ValueError(f"there is no activation {name!r}")
        function, defaults = _ACTIVATIONS[name.lower()]
        values = [next(source, default) for source, default in zip(given, defaults, strict=False)]
        if None in values:
            raise ValueError(f"{name} needs an alpha and a beta")
        return lambda x: function(x, *values)

    def clipped(self, gate: jax.Array) -> jax.Array:
        """The input of a gate's activation."""
        return gate if self.clip is None else jnp.clip(gate, -self.clip, self.clip)

    def run(
        self,
        X: jax.Array,
        hidden: int,
        lengths: jax.Array | None,
        states: Sequence[jax.Array | None],
        weights: Sequence[jax.Array | None],
        project: Callable[[jax.Array, int], jax.Array],
        cell: Callable[[int], _Cell],
    ) -> tuple[jax.Array, ...]:
        """Y and the final states, in X's dtype.

        Args:
            lengths: Those of the sequences; None if all are as long as X.
            states: The initial ones; an absent one is zero.
            weights: What `project` and `cell` read.
            project: The inputs' share of the gates of a direction.
            cell: The rest of a direction.
        """
        (x,) = _wide(X)
        length, batch = X.shape[1::-1] if self.layout else X.shape[:2]
        zeros = jnp.zeros((self.directions, batch, hidden), x.dtype)
        initial = [zeros if s is None else jnp.swapaxes(s, 0, 1) if self.layout else s for s in _wide(*states)]
        axes = varying_axes([x, initial, lengths, *weights])
        going = None
        if lengths is not None:
            going = (jnp.arange(length, dtype=lengths.dtype)[:, None] < lengths)[..., None]
        x = jnp.swapaxes(x, 0, 1) if self.layout else x
        runs = [
            _scan(
                cell(d),
                x,
                functools.partial(project, d=d),
                [varying(s[d], axes) for s in initial],
                going,
                backwards=d == 1 or self.direction == "reverse",
            )
            for d in range(self.directions)
        ]
        ends = [jnp.stack(end, 1 if self.layout else 0) for end in zip(*(ends for ends, _ in runs), strict=True)]
        Y = jnp.stack([y for _, y in runs], 1)
        return tuple(cast(y, X.dtype) for y in (Y.transpose(2, 0, 1, 3) if self.layout else Y, *ends))


def _scan(
    cell: _Cell,
    x: jax.Array,
    project: Function,
    states: States,
    going: jax.Array | None,
    backwards: bool,
) -> tuple[States, jax.Array]:
    """The final states, and the hidden state of each time step. Past the end of its sequence (where not `going`) a
    state stays as it is; so a backward scan begins at the end. An empty sequence's states end as zeros.

    Each step ends with the gates of the next one. If it began with them, XLA would read the inputs' share in the loops
    over the elements of the new states, and not vectorize these: on a CPU a step of 256 hidden elements takes 20
    instead of 24 us so, and 59 instead of 106 for a batch of 8. Biases are added there too, not in a pass of their own.
    """
    length = x.shape[0]
    if length == 0:
        return states, jnp.zeros((0, *states[0].shape), states[0].dtype)
    shares = project(jnp.roll(x, 1 if backwards else -1, axis=0))
    first = cell.gates(shares[0 if backwards else -1], states)

    def step(carried: tuple[Any, States], now: Any) -> tuple[tuple[Any, States], jax.Array]:
        (gates, states), (share, going) = carried, now
        new = cell.step(gates, states)
        y = new[0]
        if going is not None:
            new = [jnp.where(going, n, o) for n, o in zip(new, states, strict=True)]
            y = jnp.where(going, y, jnp.zeros_like(y))
        return (cell.gates(share, new), new), y

    unroll = length if isinstance(length, int) and length <= _SHORT else 1
    (_, ends), y = lax.scan(step, (first, states), (shares, going), reverse=backwards, unroll=unroll)
    if going is not None:
        ends = [jnp.where(going[:1].any(0), end, jnp.zeros_like(end)) for end in ends]
    return ends, y


def _once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a layer for eager calls, which would compile its scan each time; inside of a trace it does nothing."""
    compiled = jax.jit(function, static_argnums=0, inline=True)
    return lambda layer, *operands: compiled(layer, *(None if x is None else traced(x) for x in operands))


def _wide(*operands: jax.Array | None) -> list[Any]:
    """The operands, half-precision ones in float32."""
    return [None if x is None else cast(x, accumulator(x)) for x in operands]


def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.matmul(x, weight)


def _biases(B: jax.Array | None, R: jax.Array) -> jax.Array:
    """Those of the inputs and of the states, of shape [direction, 2, gates]."""
    shape = (R.shape[0], 2, max(R.shape[1:]))
    return jnp.zeros(shape, R.dtype) if B is None else B.reshape(shape)


@operator()
def RNN(
    X,
    W,
    R,
    B=None,
    sequence_lens=None,
    initial_h=None,
    *,
    activation_alpha,
    activation_beta,
    activations=None,
    clip,
    direction="forward",
    hidden_size,
    layout,
    output_sequence,
):
    layer = _Layer(direction, layout, activations, activation_alpha, activation_beta, clip)
    return _rnn(layer, X, W, R, B, sequence_lens, initial_h)


@_once
def _rnn(layer: _Layer, X: Any, W: Any, R: Any, B: Any, lengths: Any, h: Any) -> tuple[jax.Array, ...]:
    W, R, B = _wide(W, R, B)
    biases, functions = _biases(B, R).sum(1), layer.functions(["Tanh"])

    def cell(d: int) -> _Cell:
        (f,), recurrence = functions[d], R[d].T
        return _Cell(
            lambda share, states: share + _product(states[0], recurrence) + biases[d],
            lambda gates, states: [f(layer.clipped(gates))],
        )

    return layer.run(X, R.shape[-1], lengths, [h], [W, R, B], lambda x, d: _product(x, W[d].T), cell)


@operator()
def GRU(
    X,
    W,
    R,
    B=None,
    sequence_lens=None,
    initial_h=None,
    *,
    activation_alpha,
    activation_beta,
    activations=None,
    clip,
    direction="forward",
    hidden_size,
    layout,
    linear_before_reset,
    output_sequence,
):
    layer = _Layer(direction, layout, activations, activation_alpha, activation_beta, clip, linear_before_reset)
    return _gru(layer, X, W, R, B, sequence_lens, initial_h)


@_once
def _gru(layer: _Layer, X: Any, W: Any, R: Any, B: Any, lengths: Any, h: Any) -> tuple[jax.Array, ...]:
    W, R, B = _wide(W, R, B)
    hidden, functions = R.shape[-1], layer.functions(["Sigmoid", "Tanh"])
    at_input, at_state = _biases(B, R).transpose(1, 0, 2)
    is_candidate = (jnp.arange(3 * hidden) >= 2 * hidden) & bool(layer.variant)
    at_input, at_state = at_input + jnp.where(is_candidate, 0, at_state), at_state[:, 2 * hidden :]

    def cell(d: int) -> _Cell:
        (f, g), recurrence = functions[d], R[d].T
        to_gates, to_candidate = recurrence[:, : 2 * hidden], recurrence[:, 2 * hidden :]

        def gates(share: jax.Array, states: States) -> Any:
            """Those of update and reset, the inputs' share of the candidate, and the product that it awaits."""
            product = _product(states[0], recurrence if layer.variant else to_gates)
            added = jnp.pad(product[:, : 2 * hidden], ((0, 0), (0, hidden)))
            return share + added + at_input[d], product[:, 2 * hidden :]

        def step(gates: Any, states: States) -> States:
            (update, reset, candidate), product = jnp.split(gates[0], 3, -1), gates[1]
            update, reset = f(layer.clipped(update)), f(layer.clipped(reset))
            if layer.variant:
                candidate = candidate + reset * (product + at_state[d])
            else:
                candidate = candidate + _product(reset * states[0], to_candidate)
            return [(1 - update) * g(layer.clipped(candidate)) + update * states[0]]

        return _Cell(gates, step)

    return layer.run(X, hidden, lengths, [h], [W, R, B], lambda x, d: _product(x, W[d].T), cell)


@operator()
def LSTM(
    X,
    W,
    R,
    B=None,
    sequence_lens=None,
    initial_h=None,
    initial_c=None,
    P=None,
    *,
    activation_alpha,
    activation_beta,
    activations,
    clip,
    direction,
    hidden_size,
    input_forget,
    layout,
    output_sequence,
):
    layer = _Layer(direction, layout, activations, activation_alpha, activation_beta, clip, input_forget)
    return _lstm(layer, X, W, R, B, sequence_lens, initial_h, initial_c, P)


@_once
def _lstm(layer: _Layer, X: Any, W: Any, R: Any, B: Any, lengths: Any, h: Any, c: Any, P: Any) -> tuple[jax.Array, ...]:
    W, R, B, P = _wide(W, R, B, P)

    def recurrence(d: int) -> Function:
        weight = R[d].T
        return lambda h: _product(h, weight)

    cell = _lstm_cell(layer, recurrence, _biases(B, R), P)
    return layer.run(X, R.shape[-1], lengths, [h, c], [W, R, B, P], lambda x, d: _product(x, W[d].T), cell)


def _lstm_cell(
    layer: _Layer, recurrence: Callable[[int], Function], biases: jax.Array, P: jax.Array | None
) -> Callable[[int], _Cell]:
    """An LSTM, where `recurrence` gives a direction's product with the hidden state. As in ONNX Runtime the cell state
    is not clipped before its own activation."""
    bias = biases.sum(1)
    clipped, functions = layer.clipped, layer.functions(["Sigmoid", "Tanh", "Tanh"])

    def of(d: int) -> _Cell:
        (f, g, squash), product = functions[d], recurrence(d)
        peek_i, peek_o, peek_f = (0.0, 0.0, 0.0) if P is None else jnp.split(P[d], 3)

        def step(gates: jax.Array, states: States) -> States:
            _, c = states
            i, o, forget, candidate = jnp.split(gates, 4, -1)
            i = f(clipped(i + peek_i * c))
            forget = 1 - i if layer.variant else f(clipped(forget + peek_f * c))
            c = forget * c + i * g(clipped(candidate))
            return [f(clipped(o + peek_o * c)) * squash(c), c]

        return _Cell(lambda share, states: share + product(states[0]) + bias[d], step)

    return of


@operator(domain="com.microsoft")
def AttnLSTM(
    X,
    W,
    R,
    B=None,
    sequence_lens=None,
    initial_h=None,
    initial_c=None,
    P=None,
    QW=None,
    MW=None,
    V=None,
    M=None,
    memory_seq_lens=None,
    AW=None,
    *,
    activation_alpha=None,
    activation_beta=None,
    activations=None,
    clip=None,
    direction="forward",
    hidden_size=None,
    input_forget=0,
):
    """An LSTM that reads from a memory after each step, and sees what it has read beside the next step's input."""
    layer = _Layer(direction, 0, activations, activation_alpha, activation_beta, clip, input_forget)
    return _attentive_lstm(layer, X, W, R, B, sequence_lens, initial_h, initial_c, P, QW, MW, V, M, memory_seq_lens, AW)


@_once
def _attentive_lstm(layer: _Layer, *operands: Any) -> tuple[jax.Array, ...]:
    X, W, R, B, lengths, h, c, P, QW, MW, V, M, memory_lengths, AW = operands
    size = X.shape[-1]
    seen = positions(M.shape[1]) < (M.shape[1] if memory_lengths is None else memory_lengths[:, None])
    lstm = _lstm_cell(layer, lambda d: lambda h: _product(h, R[d].T), _biases(B, R), P)

    def cell(d: int) -> _Cell:
        inner, keys = lstm(d), _product(M, MW[d])

        def read(h: jax.Array) -> jax.Array:
            fit = jnp.sum(V[d] * jnp.tanh(keys + _product(h, QW[d])[:, None]), axis=-1)
            context = jnp.einsum("bm,bmd->bd", probabilities(masked(fit, seen)), M)
            return context if AW is None else _product(jnp.concatenate((h, context), -1), AW[d])

        def gates(share: jax.Array, states: States) -> jax.Array:
            *own, attention = states
            return inner.gates(share + _product(attention, W[d, :, size:].T), own)

        def step(gates: jax.Array, states: States) -> States:
            h, c = inner.step(gates, states[:2])
            return [h, c, read(h)]

        return _Cell(gates, step)

    nothing = jnp.zeros((layer.directions, X.shape[1], W.shape[2] - size), X.dtype)
    project = lambda x, d: _product(x, W[d, :, :size].T)
    Y, h, c, _ = layer.run(X, R.shape[-1], lengths, [h, c, nothing], operands, project, cell)
    return Y, h, c


@operator(domain="com.microsoft")
def DynamicQuantizeLSTM(
    X,
    W,
    R,
    B=None,
    sequence_lens=None,
    initial_h=None,
    initial_c=None,
    P=None,
    W_scale=None,
    W_zero_point=None,
    R_scale=None,
    R_zero_point=None,
    *,
    activation_alpha=None,
    activation_beta=None,
    activations=None,
    clip=None,
    direction="forward",
    hidden_size=None,
    input_forget=0,
):
    """Products of 8-bit integers, with all inputs quantized as one tensor, and the hidden state anew in each step. ONNX
    Runtime may split a batch among its threads and quantize each part on its own."""
    layer = _Layer(direction, 0, activations, activation_alpha, activation_beta, clip, input_forget)
    W, R = _integers(W, W_zero_point), _integers(R, R_zero_point)
    return _quantized_lstm(layer, X, W, W_scale, R, R_scale, B, sequence_lens, initial_h, initial_c, P)


@_once
def _quantized_lstm(
    layer: _Layer, X: Any, W: Any, W_scale: Any, R: Any, R_scale: Any, B: Any, lengths: Any, h: Any, c: Any, P: Any
) -> tuple[jax.Array, ...]:
    cell = _lstm_cell(layer, lambda d: lambda h: _quantized_product(h, R[d], R_scale[d]), _biases(B, R), P)
    project = lambda x, d: _quantized_product(x, W[d], W_scale[d])
    return layer.run(X, R.shape[1], lengths, [h, c], [W, W_scale, R, R_scale, B, P], project, cell)


def _integers(weight: Any, zero_point: Any) -> jax.Array:
    """A weight of shape [direction, input, gate], less its zero points, as integers in float32: it holds the sums of
    their products exactly below 2^24."""
    weight, zero_point = cast(traced(weight), np.float32), cast(traced(zero_point), np.float32)
    return weight - zero_point.reshape(weight.shape[0], 1, -1)


def _quantized_product(x: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
    """`x`, quantized to uint8 over its whole range, times a weight of integers."""
    low, high = x.min(initial=0), x.max(initial=0)
    step = jnp.where(high == low, 1, (high - low) / 255)
    zero_point = jnp.round(-low / step)
    integers = jnp.clip(jnp.round(x / step), -zero_point, 255 - zero_point)
    return _product(integers, weight) * (step * scale)
