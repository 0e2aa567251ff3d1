"""ai.onnx.ml: what scikit-learn, XGBoost and LightGBM pipelines consist of.

Numbers are traced as everywhere. Strings and maps are Python: an operator that makes some of traced numbers needs their
contents, so that the engine runs it between compiled segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter.lowering.arrays import Array, cast, contents, is_float, is_string, readable, xp
from transmuter.lowering.registry import operator

_DOMAIN = "ai.onnx.ml"


def _strings(values: Sequence[str]) -> np.ndarray:
    """A string tensor of `values`."""
    return np.array(values, object)


def _one_of(**choices: Any) -> Any:
    """The one attribute that is set."""
    given = [value for value in choices.values() if value is not None]
    if len(given) != 1:
        raise ValueError(f"{len(given)} of the attributes {', '.join(choices)} are set, but exactly one has to be")
    return given[0]


def _float(x: Array) -> jax.Array:
    """`x` as a JAX array of floats: integers become float32."""
    return cast(jnp.asarray(x), x.dtype if is_float(x) else np.float32)


def _rows(x: Array) -> jax.Array:
    """`x` as rows of features in floats; a vector is one row."""
    return _float(x).reshape(1, -1) if x.ndim == 1 else _float(x)


# ---- tables ---------------------------------------------------------------------------------------------------------


def _place(x: Array, keys: np.ndarray) -> Array:
    """Where each element of `x` stands in `keys`: `len(keys)` if nowhere, the last place if there are several (where
    ONNX Runtime takes the first)."""
    if is_string(x):
        places = {key: place for place, key in enumerate(keys)}
        return np.array([places.get(v, len(keys)) for v in x.reshape(-1)], np.int32).reshape(x.shape)
    if keys.dtype == object or not len(keys):
        raise ValueError(f"{x.dtype} is looked up among {len(keys)} keys of another type")
    count = len(keys)
    keys, last = np.unique(cast(keys, x.dtype)[::-1], return_index=True)
    at = xp.minimum(xp.searchsorted(keys, x), len(keys) - 1)
    held = xp.take(keys, at)
    same = (held == x) | ((held != held) & (x != x))
    return xp.where(same, xp.take(cast(count - 1 - last, np.int32), at), np.int32(count))


def _mapped(x: Array, keys: np.ndarray, values: np.ndarray, default: Any) -> Array:
    """The value that stands at the place of each element of `x` among `keys`."""
    if len(keys) != len(values):
        raise ValueError(f"{len(keys)} keys and {len(values)} values")
    place = _place(x, keys)
    table = np.append(values, np.array([default], values.dtype))
    return table[readable(place, "X")] if table.dtype == object else cast(xp.take(table, place), table.dtype)


@operator(domain=_DOMAIN)
def LabelEncoder(X, *, classes_strings, default_int64, default_string):
    if is_string(X):
        return _mapped(X, _strings(classes_strings), np.arange(len(classes_strings)), default_int64)
    return _mapped(X, np.arange(len(classes_strings)), _strings(classes_strings), default_string)


@operator(domain=_DOMAIN, differentiable=False)
def LabelEncoder_2(
    X,
    *,
    keys_floats,
    keys_int64s,
    keys_strings,
    values_floats,
    values_int64s,
    values_strings,
    default_float,
    default_int64,
    default_string,
    keys_tensor,
    values_tensor,
    default_tensor,
):
    keys = _table(keys_floats, keys_int64s, keys_strings, keys_tensor)
    values = _table(values_floats, values_int64s, values_strings, values_tensor)
    kinds = {"f": default_float, "i": default_int64, "O": default_string}
    default = kinds[values.dtype.kind] if default_tensor is None else default_tensor.reshape(-1)[0]
    return _mapped(X, keys, values, default)


def _table(floats: Any, int64s: Any, strings: Any, tensor: np.ndarray | None) -> np.ndarray:
    """The keys or values of a LabelEncoder."""
    _one_of(floats=floats, int64s=int64s, strings=strings, tensor=tensor)
    if tensor is not None:
        return tensor.reshape(-1)
    return _strings(strings) if strings is not None else _numbers(floats, int64s)


def _numbers(floats: Sequence[float] | None, int64s: Sequence[int] | None) -> np.ndarray:
    return np.array(floats, np.float32) if floats is not None else np.array(int64s, np.int64)


@operator(domain=_DOMAIN)
def CategoryMapper(X, *, cats_int64s, cats_strings, default_int64, default_string):
    numbers, names = np.array(cats_int64s, np.int64), _strings(cats_strings)
    return _mapped(X, names, numbers, default_int64) if is_string(X) else _mapped(X, numbers, names, default_string)


@operator(domain=_DOMAIN, differentiable=False)
def OneHotEncoder(X, *, cats_int64s, cats_strings, zeros):
    categories = _one_of(cats_int64s=cats_int64s, cats_strings=cats_strings)
    place = _place(X, _strings(categories)) if is_string(X) else _place(cast(X, np.int64), np.array(categories))
    if not zeros and (readable(place, "X") == len(categories)).any():
        raise ValueError("an element is none of the categories, and zeros is 0")
    return cast(place[..., None] == np.arange(len(categories), dtype=np.int32), np.float32)


# ---- maps -----------------------------------------------------------------------------------------------------------


@operator(domain=_DOMAIN, differentiable=False)
def CastMap(X, *, cast_to, map_form, max_map):
    values = dict(sorted(X.items()))
    if map_form == "SPARSE":
        if values and not 0 <= min(values) <= max(values) < max_map:
            raise ValueError(f"a key is not between 0 and max_map - 1 = {max_map - 1}")
        blank = "" if values and isinstance(next(iter(values.values())), str) else 0
        values = {key: values.get(key, blank) for key in range(max_map)}
    if cast_to == "TO_STRING":
        return _strings([v if isinstance(v, str) else f"{v:f}" for v in values.values()])[None]
    convert, kind = {"TO_FLOAT": (float, np.float32), "TO_INT64": (int, np.int64)}[cast_to]
    return np.array([[convert(v or 0) for v in values.values()]], kind)


@operator(domain=_DOMAIN, differentiable=False)
def DictVectorizer(X, *, int64_vocabulary, string_vocabulary):
    vocabulary = _one_of(int64_vocabulary=int64_vocabulary, string_vocabulary=string_vocabulary)
    if unknown := X.keys() - set(vocabulary):
        raise ValueError(f"the key {min(unknown)!r} is not in the vocabulary")
    sample = next(iter(X.values()), 0.0)
    kind = (
        object
        if isinstance(sample, str)
        else getattr(sample, "dtype", np.int64 if isinstance(sample, int) else np.float32)
    )
    return np.array([[X.get(key, "" if kind is object else 0) for key in vocabulary]], kind)


@operator(domain=_DOMAIN, known=("X",))
def ZipMap(X, *, classlabels_int64s, classlabels_strings):
    labels = _one_of(classlabels_int64s=classlabels_int64s, classlabels_strings=classlabels_strings)
    rows = X.reshape(-1, X.shape[-1])
    if rows.shape[1] != len(labels):
        raise ValueError(f"{rows.shape[1]} columns for {len(labels)} labels")
    return [dict(zip(labels, row)) for row in rows.tolist()]


# ---- features -------------------------------------------------------------------------------------------------------


@operator(domain=_DOMAIN)
def ArrayFeatureExtractor(X, Y):
    Y = readable(Y, "Y") if is_string(X) else Y
    held = contents(Y)
    if held is not None and held.size and not 0 <= held.min() <= held.max() < X.shape[-1]:
        raise ValueError(f"features {held.min()} to {held.max()} are wanted of {X.shape[-1]}")
    picked = xp.take(X, Y.reshape(-1), axis=-1)
    return picked.reshape(1, -1) if X.ndim == 1 else picked


@operator(domain=_DOMAIN, differentiable=False)
def Binarizer(X, *, threshold):
    return cast(jnp.greater(X, cast(np.float32(threshold), X.dtype)), X.dtype)


@operator(domain=_DOMAIN)
def FeatureVectorizer(*X, inputdimensions):
    rows = [cast(_rows(x), np.float32) for x in X]
    widths = tuple(r.shape[1] for r in rows)
    if inputdimensions is not None and widths != tuple(inputdimensions):
        raise ValueError(f"the inputs have {widths} columns, but inputdimensions says {tuple(inputdimensions)}")
    return jnp.concatenate(rows, axis=1)


@operator(domain=_DOMAIN)
def Imputer(X, *, imputed_value_floats, imputed_value_int64s, replaced_value_float, replaced_value_int64):
    floats = is_float(X)
    imputed = imputed_value_floats if floats else imputed_value_int64s
    replaced = np.array(replaced_value_float if floats else replaced_value_int64, X.dtype)
    missing = jnp.isnan(X) if np.isnan(replaced) else jnp.equal(X, replaced)
    return jnp.where(missing, np.array(imputed, X.dtype), X)


@operator(domain=_DOMAIN)
def Scaler(X, *, offset, scale):
    x = _float(X)
    return cast((x - np.array(offset, x.dtype)) * np.array(scale, x.dtype), np.float32)


@operator(domain=_DOMAIN)
def Normalizer(X, *, norm):
    """L1 sums magnitudes and L2 keeps signs, as ONNX Runtime does: the formulas of the specification do neither."""
    x = _float(X)
    sizes = {
        "MAX": lambda: jnp.max(x, axis=-1, keepdims=True),
        "L1": lambda: jnp.sum(jnp.abs(x), axis=-1, keepdims=True),
        "L2": lambda: jnp.sum(x * x, axis=-1, keepdims=True),
    }
    if norm not in sizes:
        raise ValueError(f"norm is {norm!r}, not MAX, L1 or L2")
    size = sizes[norm]()
    size = jnp.where(size == 0, 1, size)
    return cast(x / (jnp.sqrt(size) if norm == "L2" else size), np.float32)


# ---- scores ---------------------------------------------------------------------------------------------------------

_TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")


def _transformed(scores: jax.Array, post_transform: str) -> jax.Array:
    """Scores of shape [N, classes] after their post transform.

    It holds for a single score too, where ONNX Runtime ignores all but PROBIT.
    """
    match post_transform:
        case "NONE":
            return scores
        case "LOGISTIC":
            return jax.nn.sigmoid(scores)
        case "SOFTMAX":
            return jax.nn.softmax(scores, axis=-1)
        case "SOFTMAX_ZERO":  # a softmax in which zeros have no part, and stay
            present = jnp.abs(scores) > 1e-7
            powers = jnp.where(present, jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True)), 0)
            total = jnp.sum(powers, axis=-1, keepdims=True)
            return powers / jnp.where(total > 0, total, 1)
        case "PROBIT":
            return _probit(scores)
    raise ValueError(f"post_transform is {post_transform!r}, not one of {', '.join(_TRANSFORMS)}")


def _probit(p: jax.Array) -> jax.Array:
    """The quantile function of the normal distribution, in the approximation of the inverse error function that
    implementations share (Winitzki's, to 2 parts in 1000)."""
    a = 0.147
    y = 2 * p - 1
    log = jnp.log((1 - y) * (1 + y))
    half = 2 / (np.pi * a) + log / 2
    return 2**0.5 * jnp.sign(y) * jnp.sqrt(jnp.sqrt(half * half - log / a) - half)


def _two_scores(score: jax.Array, post_transform: str, is_probability: bool) -> jax.Array:
    """The scores of both classes from the second one's, of shape [N, 1]: the first one's is the complement of a
    probability, else the opposite. A softmax is not taken of them, as in ONNX Runtime."""
    if post_transform == "LOGISTIC":
        return jax.nn.sigmoid(jnp.concatenate([-score, score], axis=1))
    if post_transform == "PROBIT":
        return _probit(jnp.concatenate([1 - score, score], axis=1))
    return jnp.concatenate([1 - score if is_probability else -score, score], axis=1)


def _of_two(score: jax.Array, post_transform: str, is_probability: bool) -> tuple[jax.Array, jax.Array]:
    """Which of two classes it is by the second one's score, and both scores."""
    place = cast(score[:, 0] > (0.5 if is_probability else 0), np.int32)
    return place, _two_scores(score, post_transform, is_probability)


def _top(scores: jax.Array, eligible: Any = True) -> jax.Array:
    """The place of the best score in each row, the first one of equals."""
    return jnp.argmax(jnp.where(eligible, scores, -jnp.inf), axis=1)


def _labels(place: jax.Array, int64s: Sequence[int] | None, strings: Sequence[str] | None) -> Array:
    """The labels at those places."""
    if strings:
        return _strings(strings)[readable(place, "X")]
    return cast(jnp.take(cast(jnp.asarray(np.array(int64s, np.int64)), np.int64), place), np.int64)


# ---- linear models --------------------------------------------------------------------------------------------------


def _linear(X: Array, coefficients: Sequence[float], intercepts: Sequence[float] | None, count: int) -> jax.Array:
    """`count` scores for each row of `X`, in float32. Coefficients of more features than there are have no effect."""
    x = cast(_rows(X), np.float32)
    coefficients = np.array(coefficients[: count * x.shape[1]], np.float32).reshape(count, -1)
    scores = jnp.matmul(x, jnp.asarray(coefficients.T))
    return scores if intercepts is None else scores + np.array(intercepts, np.float32)


@operator(domain=_DOMAIN)
def LinearRegressor(X, *, coefficients, intercepts, post_transform, targets):
    return _transformed(_linear(X, coefficients, intercepts, targets), post_transform)


@operator(domain=_DOMAIN)
def LinearClassifier(
    X, *, classlabels_ints, classlabels_strings, coefficients, intercepts, multi_class, post_transform
):
    labels = classlabels_ints or classlabels_strings
    count = len(intercepts) if intercepts else len(coefficients) // X.shape[-1]
    scores = _linear(X, coefficients, intercepts, count)
    if scores.shape[1] == 1 and len(labels) == 2:
        place = cast(scores[:, 0] > 0, np.int32)
        scores = _two_scores(scores, post_transform, True)
    else:
        place = jnp.argmax(scores, axis=1)
        scores = _transformed(scores, post_transform)
    return _labels(place, classlabels_ints, classlabels_strings), scores


# ---- support vector machines ----------------------------------------------------------------------------------------


def _kernel(x: jax.Array, vectors: np.ndarray, kernel_type: str, kernel_params: Sequence[float] | None) -> jax.Array:
    """The kernel of each row of `x` with each support vector."""
    gamma, coef0, degree = kernel_params or (0.0, 0.0, 0.0)
    vectors = jnp.asarray(vectors)
    if kernel_type == "RBF":
        difference = x[:, None, :] - vectors
        return jnp.exp(-gamma * jnp.sum(difference * difference, axis=-1))
    product = jnp.matmul(x, vectors.T)
    if kernel_type == "LINEAR":
        return product
    if kernel_type == "POLY":
        return (gamma * product + coef0) ** (int(degree) if degree == int(degree) else degree)
    if kernel_type == "SIGMOID":
        return jnp.tanh(gamma * product + coef0)
    raise ValueError(f"kernel_type is {kernel_type!r}, not LINEAR, POLY, RBF or SIGMOID")


@operator(domain=_DOMAIN)
def SVMRegressor(
    X, *, coefficients, kernel_params, kernel_type, n_supports, one_class, post_transform, rho, support_vectors
):
    x, coefficients = cast(_rows(X), np.float32), np.array(coefficients, np.float32)
    if n_supports:
        vectors = np.array(support_vectors, np.float32).reshape(n_supports, -1)
        x = _kernel(x, vectors, kernel_type, kernel_params)
    scores = jnp.matmul(x, jnp.asarray(coefficients[:, None])) + np.float32(rho[0])
    if one_class:
        return jnp.where(scores > 0, jnp.float32(1), jnp.float32(-1))
    return _transformed(scores, post_transform)


@operator(domain=_DOMAIN)
def SVMClassifier(
    X,
    *,
    classlabels_ints,
    classlabels_strings,
    coefficients,
    kernel_params,
    kernel_type,
    post_transform,
    prob_a,
    prob_b,
    rho,
    support_vectors,
    vectors_per_class,
):
    x, labels = cast(_rows(X), np.float32), classlabels_ints or classlabels_strings
    rho = np.array(rho, np.float32)
    if vectors_per_class:
        first = np.cumsum([0, *vectors_per_class])
        vectors = np.array(support_vectors, np.float32).reshape(first[-1], -1)
        weights, pairs = _one_against_one(np.array(coefficients, np.float32).reshape(-1, first[-1]), first)
        scores = jnp.matmul(_kernel(x, vectors, kernel_type, kernel_params), jnp.asarray(weights.T)) + rho
        votes = sum(
            jax.nn.one_hot(jnp.where(scores[:, n] > 0, i, j), len(labels), dtype=jnp.int32)
            for n, (i, j) in enumerate(pairs)
        )
        place = jnp.argmax(votes, axis=1)
        if prob_a:
            scores = _coupled(
                jax.nn.sigmoid(-(scores * np.array(prob_a, np.float32) + np.array(prob_b, np.float32))), pairs
            )
    else:
        scores = jnp.matmul(x, jnp.asarray(np.array(coefficients, np.float32).reshape(len(labels), -1).T)) + rho[0]
        place = jnp.argmax(scores, axis=1)
    if scores.shape[1] == 1:
        scores = _two_scores(scores, post_transform, post_transform != "NONE")
    else:
        scores = _transformed(scores, post_transform)
    return _labels(place, classlabels_ints, classlabels_strings), scores


def _one_against_one(coefficients: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """The weights of the support vectors, row by row for each pair of classes, and the pairs."""
    count = len(first) - 1
    pairs = [(i, j) for i in range(count) for j in range(i + 1, count)]
    weights = np.zeros((len(pairs), coefficients.shape[1]), np.float32)
    for row, (i, j) in zip(weights, pairs):
        row[first[i] : first[i + 1]] = coefficients[j - 1, first[i] : first[i + 1]]
        row[first[j] : first[j + 1]] = coefficients[i, first[j] : first[j + 1]]
    return weights, pairs


def _coupled(wins: jax.Array, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """Probabilities of classes from those that one of a pair beats the other, [N, pairs] (Wu, Lin and Weng 2004)."""
    count = max(j for _, j in pairs) + 1
    wins = jnp.clip(wins, 1e-7, 1 - 1e-7)
    beats = jnp.zeros((len(wins), count, count), wins.dtype)
    for n, (i, j) in enumerate(pairs):
        beats = beats.at[:, i, j].set(wins[:, n]).at[:, j, i].set(1 - wins[:, n])
    q = -jnp.swapaxes(beats, 1, 2) * beats
    diagonal = jnp.sum(beats * beats, axis=1)
    q = jnp.where(jnp.eye(count, dtype=bool), diagonal[:, :, None], q)

    def improve(p: jax.Array, _: None) -> tuple[jax.Array, None]:
        qp = jnp.einsum("nij,nj->ni", q, p)
        total = jnp.sum(p * qp, axis=1)
        done = jnp.max(jnp.abs(qp - total[:, None]), axis=1) < 0.005 / count
        better = p
        for t in range(count):
            step = (total - qp[:, t]) / diagonal[:, t]
            better = better.at[:, t].add(step)
            total = (total + step * (step * diagonal[:, t] + 2 * qp[:, t])) / (1 + step) ** 2
            qp = (qp + step[:, None] * q[:, t]) / (1 + step)[:, None]
            better = better / (1 + step)[:, None]
        return jnp.where(done[:, None], p, better), None

    return lax.scan(improve, jnp.full((len(wins), count), 1 / count, wins.dtype), None, length=max(100, count))[0]


# ---- trees ----------------------------------------------------------------------------------------------------------

_MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ", "BRANCH_MEMBER")
_TAKEN = np.array([[1, 1, 0], [1, 0, 0], [0, 1, 1], [0, 0, 1], [0, 1, 0], [1, 0, 1]], bool)
"""For each mode, whether a feature less than, equal to or greater than the threshold takes the true branch."""


class _Forest:
    """Trees as arrays over their nodes.

    Where a node leads depends on how its feature compares with its threshold: the columns of `following` stand for
    less, equal, greater and missing. A leaf leads to itself, so that after `depth` steps every row has arrived.
    """

    def __init__(self, feature: Any, threshold: Any, following: np.ndarray, roots: Any):
        self.feature, self.threshold = np.asarray(feature, np.int32), np.asarray(threshold)
        self.following, self.roots = following.astype(np.int32), np.asarray(roots, np.int32)
        self.is_leaf = (following == np.arange(len(following))[:, None]).all(axis=1)
        level, self.depth = self.roots, 0
        while len(level := np.unique(level[~self.is_leaf[level]])):
            if self.depth == len(following):
                raise ValueError("a branch leads back to a node above it")
            level, self.depth = self.following[level].reshape(-1), self.depth + 1

    def arrive(self, x: jax.Array) -> jax.Array:
        """The leaf that each row of `x` reaches in each tree, [N, trees]."""
        x = lax.stop_gradient(x)
        feature, following = jnp.asarray(self.feature), jnp.asarray(self.following)
        threshold = jnp.asarray(self.threshold.astype(x.dtype))

        def step(_: Any, at: jax.Array) -> jax.Array:
            value, bound = jnp.take_along_axis(x, feature[at], axis=1), threshold[at]
            relation = jnp.where(value < bound, 0, jnp.where(value == bound, 1, jnp.where(value > bound, 2, 3)))
            return following[at, relation]

        return lax.fori_loop(0, self.depth, step, jnp.broadcast_to(self.roots, (len(x), len(self.roots))))

    def scores(self, x: jax.Array, votes: _Votes, aggregate: str) -> tuple[jax.Array, jax.Array]:
        """What the trees' leaves add up to for each target, [N, targets], and which targets have votes at all."""
        start, combine = {"MIN": (np.inf, np.minimum), "MAX": (-np.inf, np.maximum)}.get(aggregate, (0, np.add))
        shape, row = (self.is_leaf.sum(), votes.count), np.cumsum(self.is_leaf) - 1
        table, is_voted = np.full(shape, start, x.dtype), np.zeros(shape, bool)
        at = row[votes.node], votes.target
        combine.at(table, at, votes.weight)
        is_voted[at] = True
        leaves = jnp.asarray(row)[self.arrive(x)]
        given, voted = jnp.asarray(table)[leaves], jnp.any(jnp.asarray(is_voted)[leaves], axis=1)
        if aggregate in ("MIN", "MAX"):
            best = jnp.min(given, axis=1) if aggregate == "MIN" else jnp.max(given, axis=1)
            return jnp.where(voted, best, 0), voted
        total = jnp.sum(given, axis=1)
        return total / len(self.roots) if aggregate == "AVERAGE" else total, voted


@dataclass(frozen=True)
class _Votes:
    """The votes of leaves (by node), each with its weight, for one of `count` targets."""

    node: np.ndarray
    target: np.ndarray
    weight: np.ndarray
    count: int


def _following(mode: np.ndarray, true: np.ndarray, false: np.ndarray, missing_true: Any) -> np.ndarray:
    """`_Forest.following` of inner nodes."""
    missing = np.zeros(len(mode), bool) if missing_true is None else np.asarray(missing_true, bool)
    missing = missing | (mode == _MODES.index("BRANCH_NEQ"))  # NaN is unequal to everything
    return np.where(np.append(_TAKEN[mode], missing[:, None], axis=1), true[:, None], false[:, None])


def _legacy(
    votes: tuple[Any, Any, Any, Any], count: int, *, trees, ids, features, modes, values, trues, falses, missing
):
    """The forest and votes of the operators before version 5, whose nodes go by a tree's id and one of their own."""
    trees, ids, modes = np.array(trees, np.int64), np.array(ids, np.int64), np.array(modes)
    span = int(max(*ids, *trues, *falses, 0)) + 1
    numbers = trees * span + ids
    order = np.argsort(numbers, kind="stable")

    def place(tree: Any, node: Any) -> np.ndarray:
        number = np.array(tree, np.int64) * span + np.array(node, np.int64)
        found = order[np.minimum(np.searchsorted(numbers[order], number), len(order) - 1)]
        if (numbers[found] != number).any():
            raise ValueError("a tree refers to a node that it does not have")
        return found

    own, inner = np.arange(len(trees)), modes != "LEAF"
    if unknown := set(modes[inner]) - set(_MODES[:6]):
        raise ValueError(f"{min(unknown)!r} is no mode of a node")
    mode = np.array([_MODES.index(m) if m in _MODES else 0 for m in modes])
    true, false = (place(trees, np.where(inner, branch, ids)) for branch in (trues, falses))
    following = np.where(inner[:, None], _following(mode, true, false, missing), own[:, None])
    vote_trees, vote_nodes, targets, weights = votes
    forest = _Forest(features, values, following, np.unique(trees, return_index=True)[1])
    return forest, _Votes(place(vote_trees, vote_nodes), np.array(targets), np.asarray(weights), count)


def _floats(values: Sequence[float] | None, tensor: np.ndarray | None = None) -> np.ndarray | None:
    """An attribute of floats, or its twin for doubles."""
    return np.array(values, np.float32) if values is not None else None if tensor is None else tensor.reshape(-1)


@operator(domain=_DOMAIN, differentiable=False)
def TreeEnsembleRegressor(
    X,
    *,
    aggregate_function,
    base_values,
    base_values_as_tensor,
    n_targets,
    nodes_falsenodeids,
    nodes_featureids,
    nodes_hitrates,
    nodes_hitrates_as_tensor,
    nodes_missing_value_tracks_true,
    nodes_modes,
    nodes_nodeids,
    nodes_treeids,
    nodes_truenodeids,
    nodes_values,
    nodes_values_as_tensor,
    post_transform,
    target_ids,
    target_nodeids,
    target_treeids,
    target_weights,
    target_weights_as_tensor,
):
    """A target without a vote has its base value, where ONNX Runtime has 0."""
    x = _rows(X)
    forest, votes = _legacy(
        (target_treeids, target_nodeids, target_ids, _floats(target_weights, target_weights_as_tensor)),
        n_targets,
        trees=nodes_treeids,
        ids=nodes_nodeids,
        features=nodes_featureids,
        modes=nodes_modes,
        values=_floats(nodes_values, nodes_values_as_tensor),
        trues=nodes_truenodeids,
        falses=nodes_falsenodeids,
        missing=nodes_missing_value_tracks_true,
    )
    scores, _ = forest.scores(x, votes, aggregate_function)
    base = _floats(base_values, base_values_as_tensor)
    if base is not None:
        scores = scores + base.astype(x.dtype)
    return cast(_transformed(scores, post_transform), np.float32)


@operator(domain=_DOMAIN, differentiable=False)
def TreeEnsembleClassifier(
    X,
    *,
    base_values,
    base_values_as_tensor,
    class_ids,
    class_nodeids,
    class_treeids,
    class_weights,
    class_weights_as_tensor,
    classlabels_int64s,
    classlabels_strings,
    nodes_falsenodeids,
    nodes_featureids,
    nodes_hitrates,
    nodes_hitrates_as_tensor,
    nodes_missing_value_tracks_true,
    nodes_modes,
    nodes_nodeids,
    nodes_treeids,
    nodes_truenodeids,
    nodes_values,
    nodes_values_as_tensor,
    post_transform,
):
    """Two classes of which only the first has votes have one score, the second one's: a probability if no weight is
    negative, else a margin. If the second one has votes too, the larger score names the class; ONNX Runtime goes by
    whether the second one is positive. A class without votes is not the top one, unless there are base values."""
    x, labels = _rows(X), classlabels_int64s or classlabels_strings
    weights = _floats(class_weights, class_weights_as_tensor)
    is_binary = len(labels) == 2 and set(class_ids) == {0}
    forest, votes = _legacy(
        (class_treeids, class_nodeids, class_ids, weights),
        1 if is_binary else len(labels),
        trees=nodes_treeids,
        ids=nodes_nodeids,
        features=nodes_featureids,
        modes=nodes_modes,
        values=_floats(nodes_values, nodes_values_as_tensor),
        trues=nodes_truenodeids,
        falses=nodes_falsenodeids,
        missing=nodes_missing_value_tracks_true,
    )
    scores, voted = forest.scores(x, votes, "SUM")
    base = _floats(base_values, base_values_as_tensor)
    if base is not None:
        scores, voted = scores + base[-scores.shape[1] :].astype(x.dtype), True
    if is_binary:
        place, scores = _of_two(scores, post_transform, is_probability=bool((weights >= 0).all()))
    else:
        place, scores = _top(scores, voted), _transformed(scores, post_transform)
    return _labels(place, classlabels_int64s, classlabels_strings), cast(scores, np.float32)


def _split_at_nan(values: np.ndarray) -> list[list[float]]:
    parts = np.split(values, np.flatnonzero(np.isnan(values)) + 1)
    return [part[~np.isnan(part)].tolist() for part in parts]


@operator(domain=_DOMAIN, differentiable=False)
def TreeEnsemble_5(
    X,
    *,
    aggregate_function,
    leaf_targetids,
    leaf_weights,
    membership_values,
    n_targets,
    nodes_falseleafs,
    nodes_falsenodeids,
    nodes_featureids,
    nodes_hitrates,
    nodes_missing_value_tracks_true,
    nodes_modes,
    nodes_splits,
    nodes_trueleafs,
    nodes_truenodeids,
    post_transform,
    tree_roots,
):
    """A node that tests membership becomes a chain of nodes that each test one member."""
    inner = len(nodes_modes)
    missing = nodes_missing_value_tracks_true or [0] * inner
    true, false = (
        [
            node + inner * leaf for node, leaf in zip(nodes, leaves)
        ]  # leaves stand after the inner nodes, chains after them
        for nodes, leaves in ((nodes_truenodeids, nodes_trueleafs), (nodes_falsenodeids, nodes_falseleafs))
    )
    nodes = [list(n) for n in zip(nodes_featureids, nodes_splits.tolist(), nodes_modes.tolist(), true, false, missing)]
    leaves = [[0, 0.0, 4, inner + n, inner + n, 0] for n in range(len(leaf_targetids))]
    chains: list[list[Any]] = []
    members = iter(_split_at_nan(membership_values) if membership_values is not None else ())
    for node in nodes:
        if node[2] == _MODES.index("BRANCH_MEMBER"):
            values = next(members)
            node[1:3] = values[0], _MODES.index("BRANCH_EQ")
            ends = node[4]
            for value in values[1:]:
                chain = [node[0], value, node[2], node[3], ends, node[5]]
                node[4] = inner + len(leaves) + len(chains)
                chains.append(node := chain)
    feature, split, mode, true, false, missing = map(np.array, zip(*nodes, *leaves, *chains))
    roots = [true[r] if nodes_trueleafs[r] and nodes_falseleafs[r] and true[r] == false[r] else r for r in tree_roots]
    forest = _Forest(feature, split, _following(mode, true, false, missing), roots)
    votes = _Votes(inner + np.arange(len(leaves)), np.array(leaf_targetids), leaf_weights, n_targets)
    x = _rows(X)
    scores, _ = forest.scores(x, votes, ("AVERAGE", "SUM", "MIN", "MAX")[aggregate_function])
    return _transformed(scores, _TRANSFORMS[post_transform])
