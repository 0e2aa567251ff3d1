"""What is chosen by the platform that computes: which form of an operation is fast there, how XLA is to compile it."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import jaxlib
import jaxlib.utils
import numpy as np

from transmuter import native
from transmuter.lowering.arrays import HALVES

_FEW_ROWS = range(2, 32)
"""For matrices of so many rows, YNNPACK's products are faster than Eigen's."""
_LOOPS = {"scan", "while"}
_OWN = {"cpu_product", "cpu_convolution"}
"""What kernels of our own compute."""
_CONVOLUTIONS = {"conv_general_dilated", "cpu_convolution"}
_PRODUCTS = {"dot_general", *_CONVOLUTIONS, *_OWN}
_NOTHING: Mapping[str, str] = MappingProxyType({})
_NO_YNNPACK: Mapping[str, str] = MappingProxyType({"xla_cpu_experimental_ynn_fusion_type": ""})
_YNNPACK_REDUCES: Mapping[str, str] = MappingProxyType(
    {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}
)
_FEW_CONVOLUTIONS = 0.1
"""A share of the work that convolutions may have beside YNNPACK's reductions."""
_WIDE: Mapping[str, str] = MappingProxyType({"xla_cpu_prefer_vector_width": "512"})
"""Lets LLVM use the widest registers that there are, where it otherwise keeps to 256 bits."""
_IN_ORDER: Mapping[str, str] = MappingProxyType({"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"})
"""Lets XLA compute what takes little memory first, not what can run beside something else."""
_FEW_PARTS: Mapping[str, str] = MappingProxyType(
    {"xla_cpu_parallel_codegen_split_count": str(min(2 * (os.cpu_count() or 1), 32))}
)
"""In so many parts a graph is compiled. XLA's own 32 take no less time on few cores, but more memory: 35 MB for a
ResNet-101."""
_IN_PIECES: Mapping[str, str] = MappingProxyType({"xla_multiheap_size_constraint_per_heap": str(30 << 20)})
"""Temporaries are allocated in pieces of so many bytes, or what the largest array takes. What is freed of up to 32 MiB
glibc has ready for the next call; larger pieces go back to the system, which has to clear each of their pages anew."""
_KNOWING = {"0.10.2"}
"""Versions of jaxlib whose XLA has all of these options."""
_LOG_LEVELS = {"DEBUG": 0, "INFO": 0, "WARN": 1, "WARNING": 1, "ERROR": 2, "CRITICAL": 3, "FATAL": 3}
"""XLA's levels by the names that `jax_logging_level` takes."""


def on_cpu() -> bool:
    """Whether XLA compiles for the CPU."""
    return jax.default_backend() == "cpu"


def has_kernels() -> bool:
    """Whether there are kernels of our own for the platform."""
    return on_cpu() and native.available()


def has_float64() -> bool:
    """Whether the platform computes in float64."""
    return jax.default_backend() != "tpu"


def compiler_options(equations: Iterable[jex.JaxprEqn]) -> Mapping[str, str]:
    """The options with which XLA compiles these operations best.

    On the CPU it leaves matrix products, convolutions and reductions to YNNPACK, which packs weights anew in every
    call. With Eigen's products, ViT-S takes 0.9 of the time, but MiniLM for 8 tokens 1.2. A reduction draws what leads
    to it into YNNPACK too: ResNet-50 takes 0.85 of the time without all of it, 0.95 without its products alone.
    Products of integers are fast in YNNPACK alone: without it they take 40 times as long.

    The products of a loop read the same weights in each step, from the core's own cache, which is faster by wider
    registers: a step of an LSTM of 256 hidden elements takes 13 us, not 17. So is taking weights of few bits from
    words: a 4-bit decoder's step takes 0.84 of the time. It makes no difference to other models.

    Products in half precision widen their operands. By default all weights are widened ahead of the first product, and
    take three times their memory; in order, each is before its own. What else has large temporaries takes them in
    pieces: MobileNetV2 for four images 0.75 of the time.
    """
    if not on_cpu():
        return _NOTHING
    equations = list(equations)
    products = list(_products(equations))
    eigen = _by_eigen(products)
    has_loops = any(_products(loop for loop in equations if loop.primitive.name in _LOOPS))
    has_integers = any(equation.primitive.name == "cpu_integer_product" for equation in equations)
    wide = _WIDE if has_loops or has_integers or any(map(_unpacks, equations)) else _NOTHING
    in_order = _IN_ORDER if any(_is_half(product) for product in products) else _IN_PIECES
    return {**eigen, **wide, **in_order, **_FEW_PARTS} if _are_known() else _NOTHING


def training_options(*, in_order: bool = False) -> Mapping[str, str]:
    """The options with which XLA compiles a step of training best; `in_order`, with the least memory.

    Products and convolutions are fast in Eigen, as in inference, and sums over channels in YNNPACK: a step of ResNet-18
    takes 0.65 of the time. Much more memory is temporary than in inference: in pieces, that step takes 0.9 of the time,
    and one of MiniLM 1.07 of the memory. Wide registers are 1 to 3% of both.
    """
    if not (on_cpu() and _are_known()):
        return _NOTHING
    return {**_YNNPACK_REDUCES, **_WIDE, **_FEW_PARTS, **(_IN_ORDER if in_order else _IN_PIECES)}


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """A context in which XLA does not say of each array that is larger than a piece of the temporaries that it is."""
    name = jax.config.jax_logging_level
    level = _LOG_LEVELS[name] if name in _LOG_LEVELS else int(os.environ.get("TF_CPP_MIN_LOG_LEVEL", 1))
    jaxlib.utils.absl_set_min_log_level(max(level, _LOG_LEVELS["ERROR"]))
    try:
        yield
    finally:
        jaxlib.utils.absl_set_min_log_level(level)


def _unpacks(equation: jex.JaxprEqn) -> bool:
    """Whether an operation takes weights of few bits from words (`few_bits`)."""
    return equation.primitive.name == "shift_right_logical" and equation.invars[0].aval.dtype == np.int32


def _is_half(product: jex.JaxprEqn) -> bool:
    return all(operand.aval.dtype in HALVES for operand in product.invars)


def _by_eigen(products: Iterable[jex.JaxprEqn]) -> Mapping[str, str]:
    """What leaves products to Eigen, if that computes most of them faster."""
    total = few_rows = convolutions = 0
    for equation in products:
        if jnp.issubdtype(equation.invars[0].aval.dtype, jnp.integer):
            return _NOTHING
        rows, multiplications = _product(equation)
        total += multiplications
        if rows in _FEW_ROWS and equation.primitive.name not in _OWN:
            few_rows += multiplications
        if equation.primitive.name in _CONVOLUTIONS:
            convolutions += multiplications
    if 2 * few_rows >= total:
        return _NOTHING
    return _NO_YNNPACK if convolutions > _FEW_CONVOLUTIONS * total else _YNNPACK_REDUCES


@functools.cache
def _are_known() -> bool:
    """Whether this version of XLA has the options. Asking it takes 60 ms, a fifth of a first call from a cache."""
    if jaxlib.__version__ in _KNOWING:
        return True
    try:
        options = {**_YNNPACK_REDUCES, **_WIDE, **_IN_ORDER, **_FEW_PARTS, **_IN_PIECES}
        jax.jit(lambda x: x, compiler_options=options).lower(np.float32(0)).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _products(equations: Iterable[jex.JaxprEqn]) -> Iterator[jex.JaxprEqn]:
    """The matrix products and convolutions among operations and the bodies of those."""
    for equation in equations:
        if equation.primitive.name in _PRODUCTS:
            yield equation
        for body in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(body, "eqns"):
                yield from _products(body.eqns)


def _product(equation: jex.JaxprEqn) -> tuple[int, int]:
    """How many rows a product's result has, in each matrix of a stack, and how many multiplications it takes."""
    left, right = (v.aval.shape for v in equation.invars)
    result = equation.outvars[0].aval.shape
    if equation.primitive.name == "cpu_product":
        form = equation.params["form"]
        rows_end = len(form.left) - form.depth
        rows = math.prod(left[i] for i in form.left[form.batch : rows_end])
        return rows, math.prod(result) * math.prod(left[i] for i in form.left[rows_end:])
    if equation.primitive.name == "cpu_convolution":
        how = equation.params["how"]
        return how.batch * math.prod(how.output), math.prod(result) * math.prod(how.kernel) * how.channels
    if equation.primitive.name == "conv_general_dilated":
        numbers = equation.params["dimension_numbers"]
        outputs = right[numbers.rhs_spec[0]]
        return math.prod(result) // max(outputs, 1), math.prod(result) * math.prod(right) // max(outputs, 1)
    (contracted, _), (batch, _) = equation.params["dimension_numbers"]
    rows = math.prod(n for i, n in enumerate(left) if i not in (*contracted, *batch))
    return rows, math.prod(result) * math.prod(left[i] for i in contracted)
