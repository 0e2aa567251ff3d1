"""com.microsoft: tokens and hashes of strings, which are Python."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax

from transmuter.lowering import re2
from transmuter.lowering.arrays import Array, is_string
from transmuter.lowering.registry import operator
from transmuter.lowering.text import table

operator = functools.partial(operator, domain="com.microsoft")

# ---- tokens --------------------------------------------------------------------------------------------------------


@operator()
def Tokenizer(X, *, mark, mincharnum, pad_value, separators=None, tokenexp=None):
    """A separator that matches nothing at a place takes away the character that is there, as in ONNX Runtime."""
    if X.ndim not in (1, 2):
        raise ValueError(f"the shape is {X.shape}, neither [C] nor [N, C]")
    if bool(separators) == bool(tokenexp):
        raise ValueError("either separators or tokenexp is to be set")
    if mincharnum < 1:
        raise ValueError(f"mincharnum is {mincharnum}, not positive")
    if not X.size:
        return np.empty((*X.shape[:-1], 0), object)
    if tokenexp == "." or tuple(separators or ()) == ("",):
        if mincharnum > 1:
            raise ValueError("characters as tokens have no mincharnum of more than 1")
        rows = [list(s) for s in X.flat]
    elif separators:
        rows = [_between(s, separators, mincharnum) for s in X.flat]
    else:
        rows = [_matching(s, tokenexp, mincharnum) for s in X.flat]
    if mark and any(rows):
        rows = [["\x02", *row, "\x03"] for row in rows]
    return table(rows, pad_value, X.shape)


def _between(text: str, separators: Sequence[str], minimum: int) -> list[str]:
    """What is left between separators, of at least `minimum` characters."""
    tokens = [text]
    for separator in separators:
        whole, tokens = tokens, []
        for part in whole:
            start = 0
            while match := re2.longest(separator, part, start):
                tokens.append(part[start : match[0]])
                start = max(match[1], match[0] + 1)
            tokens.append(part[start:])
        tokens = [token for token in tokens if len(token) >= minimum]
    return tokens


def _matching(text: str, expression: str, minimum: int) -> list[str]:
    """The matches of at least `minimum` characters; after a shorter one, the search goes on one character further."""
    tokens, start = [], 0
    while match := re2.longest(expression, text, start):
        begin, end = match
        is_token = end - begin >= minimum
        tokens += [text[begin:end]] * is_token
        start = end if is_token else begin + 1
    return tokens


# ---- hashes --------------------------------------------------------------------------------------------------------


@operator()
def MurmurHash3(X, *, positive=1, seed=0):
    """Numbers are hashed as the bytes that JAX holds: with x64 off, those of 32 bits."""
    if is_string(X):
        texts = [s.encode() for s in X.flat]
        hashes = np.concatenate([_hash_of_bytes(text, seed) for text in texts] or [np.zeros(0, np.uint32)])
    else:
        words = _words(X)
        hashes = _murmur([words[:, i] for i in range(words.shape[1])], None, 4 * words.shape[1], seed)
    return _bits(hashes, np.uint32 if positive else np.int32).reshape(X.shape)


def _bits(x: Array, kind: type) -> Array:
    return lax.bitcast_convert_type(x, kind) if isinstance(x, jax.Array) else x.view(kind)


def _words(x: Array) -> Array:
    """The 32-bit words of each number, the lowest first: [numbers, words]."""
    if isinstance(x, jax.Array):
        return lax.bitcast_convert_type(x, np.uint32).reshape(x.size, -1 if x.size else x.dtype.itemsize // 4)
    return np.ascontiguousarray(x).view(np.uint32).reshape(x.size, x.dtype.itemsize // 4)


def _hash_of_bytes(text: bytes, seed: int) -> np.ndarray:
    words = np.frombuffer(text + bytes(-len(text) % 4), "<u4").reshape(-1, 1)
    whole = len(text) // 4
    return _murmur(list(words[:whole]), words[whole] if len(text) % 4 else None, len(text), seed)


def _murmur(words: Sequence[Array], tail: Array | None, length: int, seed: int) -> Array:
    """MurmurHash3 of 32 bits, of many keys at once: their 32-bit words, and what does not fill one, at the end."""
    size = (words[0] if len(words) else np.zeros(1) if tail is None else tail).shape
    h = np.full(size, seed % 2**32, np.uint32)
    for word in words:
        h = _rotated(h ^ _scrambled(word), 13) * np.uint32(5) + np.uint32(0xE6546B64)
    if tail is not None:
        h = h ^ _scrambled(tail)
    h = h ^ np.uint32(length)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ (h >> np.uint32(shift))) * np.uint32(factor)
    return h ^ (h >> np.uint32(16))


def _scrambled(word: Array) -> Array:
    return _rotated(word * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)


def _rotated(x: Array, by: int) -> Array:
    return (x << np.uint32(by)) | (x >> np.uint32(32 - by))
