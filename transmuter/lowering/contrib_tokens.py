"""Operators of ONNX Runtime on tokens, words and alignments: n-grams in generated text, embeddings of words by their
characters, time warping."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

from transmuter.lowering.convolution import convolve
from transmuter.lowering.registry import operator
from transmuter.lowering.windows import window

operator = functools.partial(operator, domain="com.microsoft")


@operator()
def NGramRepeatBlock(input_ids, scores, *, ngram_size):
    if input_ids.shape[1] < ngram_size:
        return scores
    last = input_ids.shape[1] - ngram_size + 1  # where the n-gram begins that the next token ends
    repeats = jnp.ones((input_ids.shape[0], last), bool)
    for i in range(ngram_size - 1):
        repeats = repeats & (input_ids[:, i : i + last] == input_ids[:, last + i, None])
    vocabulary = scores.shape[1]
    banned = jnp.where(repeats, input_ids[:, ngram_size - 1 :], vocabulary)
    rows = jnp.arange(scores.shape[0])[:, None]
    return scores.at[rows, banned].set(-jnp.inf, mode="drop")


@operator(known=("src_tokens", "cur_tokens", "prev_suffix_match_idx", "pred_tokens"), differentiable=False)
def BifurcationDetector(
    src_tokens, cur_tokens, prev_suffix_match_idx, pred_tokens=None, *, max_ngram_size=3, min_ngram_size=1
):
    """The index of a match is that of its end, as ONNX Runtime has it. A longer n-gram without a match leaves a shorter
    one's."""
    tokens = cur_tokens
    if pred_tokens is not None:
        source = src_tokens[int(prev_suffix_match_idx.reshape(())) :]
        if len(pred_tokens) != len(source) + 1:
            raise ValueError(f"{len(pred_tokens)} predicted tokens where {len(source)} tokens of the source are left")
        agreed = np.logical_and.accumulate(pred_tokens[:-1] == source).sum()
        tokens = np.concatenate((cur_tokens, pred_tokens[: agreed + 1]))
    match = -1
    for size in range(min_ngram_size, min(max_ngram_size, len(tokens), len(src_tokens)) + 1):
        grams = np.lib.stride_tricks.sliding_window_view(src_tokens, size)
        (places,) = (grams == tokens[-size:]).all(axis=1).nonzero()
        if not len(places):
            break
        match = places[0] + size if len(places) == 1 else -1
    return tokens, np.full(prev_suffix_match_idx.shape, match, np.int64)


@operator(known=("input",), differentiable=False)
def DynamicTimeWarping(input):
    """Of equal costs, a step within the row (in columns alone) is taken first."""
    steps = input.reshape(input.shape[-2:])
    rows, columns = steps.shape
    cost = np.full((rows + 1, columns + 1), np.inf, steps.dtype)
    cost[0, 0] = 0
    moves = np.zeros(cost.shape, np.int8)
    for diagonal in range(2, rows + columns + 1):
        i = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        j = diagonal - i
        both, down, along = cost[i - 1, j - 1], cost[i - 1, j], cost[i, j - 1]
        moves[i, j] = np.where((both < down) & (both < along), 0, np.where((down < both) & (down < along), 1, 2))
        cost[i, j] = np.choose(moves[i, j], (both, down, along)) + steps[i - 1, j - 1]
    path, i, j = [], rows, columns
    while i > 0 and j > 0:
        path.append((i - 1, j - 1))
        move = moves[i, j]
        i, j = i - (move != 2), j - (move != 1)
    return np.array(path[::-1], np.int32).reshape(-1, 2).T


@operator()
def WordConvEmbedding(Sequence, W, B, C, *, char_embedding_size=None, conv_window_size=None, embedding_size=None):
    """The convolution sees as many characters of a word as are positive, but at least as many as its kernel. A word
    whose first character is not positive has the embedding 0; ONNX Runtime leaves it undefined."""
    width = W.shape[2]
    characters = jnp.swapaxes(jnp.take(C, Sequence, axis=0), 1, 2)
    y = convolve(characters, jnp.swapaxes(W[:, 0], 1, 2), window(characters.shape[2:], (width,)))
    y = jnp.tanh(y + B[:, None])
    used = jnp.maximum(jnp.sum(Sequence > 0, axis=1, dtype=np.int32), width) - width + 1
    is_used = jnp.arange(y.shape[2], dtype=np.int32) < used[:, None]
    best = jnp.max(jnp.where(is_used[:, None], y, -jnp.inf), axis=2)
    return jnp.where(Sequence[:, :1] > 0, best, 0)
