"""Compiled models: where the graph breaks, what is compiled between breaks, and the cache of it."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from transmuter.lowering.few_bits import Packing
from transmuter.model import Model
from transmuter.segments.buckets import BucketedModel, Buckets
from transmuter.segments.cache import CacheInfo, Counts, use_persistent_cache
from transmuter.segments.executor import CompiledModel
from transmuter.segments.explanation import BreakReport, Explanation, SegmentReport
from transmuter.staging import differentiated, exact_dtypes, transposed_exactly

__all__ = [
    "BreakReport",
    "BucketedModel",
    "Buckets",
    "CacheInfo",
    "CompiledModel",
    "Counts",
    "Explanation",
    "SegmentReport",
    "compile",
    "run",
]


def run(
    model: Model,
    inputs: Mapping[str, Any] | Sequence[Any],
    *,
    outputs: Sequence[str] | None = None,
    key: jax.Array | None = None,
) -> dict[str, Any]:
    """Runs a model eagerly, node after node, on its own params.

    Args:
        model: From `transmuter.load`.
        inputs: Arrays by input name, or in the order of `model.inputs`.
        outputs: Names of graph outputs or internal values; what they do not need is not run. None is all outputs.
        key: A JAX random key for random operators. None is that of the model's seed.

    Returns:
        Arrays by output name, in the model's dtypes whatever `jax_enable_x64` says.

    Raises:
        InputError: An input has the wrong name, dtype or shape.
        UnsupportedOperatorError: The graph needs an operator without a lowering; nothing has run then.
        LoweringError: A node failed: its operands do not fit its operator.
    """
    held = model.bind_inputs(inputs)
    x64 = jax.config.jax_enable_x64
    with exact_dtypes():
        followed = [v for v, x in held.items() if not x64 and differentiated([x])]
        call = lambda arrays: model.apply_bound({**held, **dict(zip(followed, arrays))}, outputs=outputs, key=key)
        return transposed_exactly(call, [held[v] for v in followed]) if followed else call([])


def compile(
    model: Model,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None = None,
    *,
    cache_size: int = 8,
    static_inputs: Sequence[str] = (),
    outputs: Sequence[str] | None = None,
    packed_weights: Packing = "auto",
    persistent_cache: str | os.PathLike[str] | None = None,
    buckets: Buckets | Mapping[str, Sequence[int]] | None = None,
) -> CompiledModel:
    """Compiles a model with `jax.jit`, in as few segments as its graph allows.

    Args:
        model: From `transmuter.load`.
        example_inputs: Inputs to compile for now (and run once on). Without them, the first call compiles.
        cache_size: For how many signatures (shapes, dtypes, contents of static inputs) each segment stays compiled;
            those used least recently go first.
        static_inputs: Inputs whose contents are part of the signature, so that what depends on them is computed while
            tracing. Integer and boolean scalars and short vectors that decide a shape or a branch are static by
            themselves. No gradient flows to a static input.
        outputs: Names of graph outputs or internal values; what they do not need is not compiled. None is all outputs.
        packed_weights: What becomes of weights of few bits, in blocks that share a scale. `"keep"`: they stay packed,
            and each call unpacks them, in registers or in pieces that fit a cache. `"unpack"`: they become float32
            once, which takes 4 (for 8 bits) or 8 times (for 4 bits) as much memory, besides theirs. `"auto"`: on a CPU
            those of MatMulNBits and QMoE stay packed; others become float32, if that takes less than half of the free
            memory.
        persistent_cache: A folder in which executables are kept, so that later processes need not compile them, nor
            trace graphs without breaks. A process has one such folder, for all that it compiles: this sets JAX's own
            `jax_compilation_cache_dir`. Segments are kept there however quickly they compile; for the rest of the
            process JAX's limit of a second stays (`jax_persistent_cache_min_compile_time_secs`; one of your own holds
            for segments too). What is in it is run: let nobody write to it whom you would not let run code. None is the
            environment variable TRANSMUTER_CACHE_DIR, unless JAX has a folder already; without either there is none.
        buckets: Lengths that symbolic axes are padded to, so that many lengths share an executable:
            `{"sequence_length": [32, 128, 512]}`, or `Buckets`, which says more. Outputs are cropped. Each combination
            of buckets is a signature, so that `cache_size` should hold those that are used.

    Returns:
        The compiled model; call it with a dict of inputs.

    Raises:
        InputError: A name is unknown, an example input does not fit, or no input masks what `buckets` pads.
        UnsupportedOperatorError, LoweringError, ExecutionError: What a call raises, where example inputs are given.
        ValueError: JAX keeps executables in another folder than `persistent_cache` already.
    """
    kind = CompiledModel if buckets is None else functools.partial(BucketedModel, buckets=buckets)
    compiled = kind(
        model,
        cache_size=cache_size,
        static_inputs=static_inputs,
        outputs=outputs,
        packed_weights=packed_weights,
        keeps_executables=use_persistent_cache(persistent_cache),
    )
    if example_inputs is not None:
        compiled(example_inputs) if isinstance(example_inputs, Mapping) else compiled(*example_inputs)
    return compiled
