"""Regular expressions as RE2 understands them, in terms of Python's."""

from __future__ import annotations

import functools
import re
import unicodedata

_PERL = {"d": "09", "s": "\t\n\f\r  ", "w": "09AZ__az"}
_POSIX = {
    "alnum": "09AZaz",
    "alpha": "AZaz",
    "ascii": "\0\x7f",
    "blank": "\t\t  ",
    "cntrl": "\0\x1f\x7f\x7f",
    "digit": "09",
    "graph": "!~",
    "lower": "az",
    "print": " ~",
    "punct": "!/:@[`{~",
    "space": "\t\r  ",
    "upper": "AZ",
    "word": "09AZ__az",
    "xdigit": "09AFaf",
}
"""Classes of characters, as the first and the last one of each of their ranges. All but Unicode's are of ASCII."""

_ASSERTIONS = {"z": r"\Z", "b": r"(?a:\b)", "B": r"(?:(?a:\B)|\A\Z)"}

_TOKEN = re.compile(
    r"""\\Q(?P<quoted>.*?)(?:\\E|\Z)
      | \\x\{(?P<code>[0-9A-Fa-f]+)\}
      | \\(?P<unicode>[pP])(?:\{(?P<not_named>\^?)(?P<named>\w+)\}|(?P<letter>[A-Z]))
      | \\(?P<perl>[dDsSwW])
      | \[:(?P<not_posix>\^?)(?P<posix>\w+):\]
      | \\(?P<escaped>.)
      | \(\?(?P<flags>[imsU]*(?:-[imsU]+)?)(?P<end>[:)])
      | (?P<name>\(\?P?<\w+>)
      | (?P<brace>\{(?!\d+(?:,\d*)?\}))
      | (?P<character>.)""",
    re.VERBOSE | re.DOTALL,
)


def _ranges(pairs: str, negated: bool) -> str:
    """What a class, or all but it, is between brackets."""
    bounds = [ord(c) for c in pairs]
    if negated:
        bounds = [0, *(bound + (1 if i % 2 else -1) for i, bound in enumerate(bounds)), 0x10FFFF]
    return "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in zip(bounds[::2], bounds[1::2]) if low <= high)


@functools.cache
def _category(name: str) -> str:
    """The characters of a general category of Unicode (L, Lu)."""
    inside = [name in (c[: len(name)], "Any") for c in map(unicodedata.category, map(chr, range(0x110000)))]
    edges = [i for i, (before, here) in enumerate(zip([False, *inside], [*inside, False])) if before != here]
    if not edges:
        raise ValueError(f"the class {name} of regular expressions is not supported")
    return "".join(chr(low) + chr(end - 1) for low, end in zip(edges[::2], edges[1::2]))


def _class(token: re.Match[str]) -> tuple[str, bool] | None:
    """The class that a token stands for, and whether it is negated."""
    if name := token["perl"]:
        return _PERL[name.lower()], name.isupper()
    if name := token["named"] or token["letter"]:
        return _category(name), (token["unicode"] == "P") != bool(token["not_named"])
    return None


@functools.cache
def translated(expression: str) -> str:
    """The expression as one of Python, without flags around it.

    Flags in the middle of a group hold until its end; `$` is the end of the text unless lines count; and in a class,
    characters that are plain to RE2 may not be to Python.
    """
    written: list[str] = []
    groups: list[list[str]] = [[]]  # the flags that were set in each group that is open
    lines = [False]  # whether `$` ends lines there
    in_class, at = False, 0
    while token := _TOKEN.match(expression, at):
        at = token.end()
        found = _class(token)
        literal = token["quoted"] if token["quoted"] is not None else token["code"] and chr(int(token["code"], 16))
        if in_class:
            character = token["character"]
            if name := token["posix"]:
                found = _POSIX[name], bool(token["not_posix"])
            if found or character == "]":
                in_class = bool(found)
                written.append(_ranges(*found) if found else "]")
            elif token["escaped"] or (character == "-" and written[-1] != "-"):
                written.append(token[0])
            else:
                literal = token[0] if literal is None else literal
                written.append("".join(f"\\U{ord(c):08x}" for c in literal))
        elif literal is not None:
            written.append(re.escape(literal))
        elif found:  # a class of Unicode is negated after the letters of both cases have joined it
            pairs, negated = found
            plain = f"(?-i:[{_ranges(pairs, negated)}])"
            written.append(plain if token["perl"] else f"[{'^' * negated}{_ranges(pairs, False)}]")
        elif token["escaped"]:
            written.append(_ASSERTIONS.get(token["escaped"], token[0]))
        elif token["name"]:
            written.append("(")
            groups.append([])
            lines.append(lines[-1])
        elif token["end"]:
            on, _, off = token["flags"].replace("U", "").partition("-")
            opening = f"(?{on}{'-' * bool(off)}{off}:"
            holds = "m" in on or (lines[-1] and "m" not in off)
            if token["end"] == ")":
                groups[-1].append(opening)
                lines[-1] = holds
            else:
                groups.append([])
                lines.append(holds)
            written.append(opening)
        elif token["brace"]:
            written.append(r"\{")
        elif token["posix"] or token["character"] == "[":
            at = token.start() + re.match(r"\[\^?\]?", expression[token.start() :]).end()
            written.append(expression[token.start() : at].replace("]", r"\]"))
            in_class = True
        elif token["character"] == "(":
            groups.append([])
            lines.append(lines[-1])
            written.append("(")
        elif token["character"] == ")":
            written.append(")" * (1 + len(groups.pop())))
            lines.pop()
        elif token["character"] == "|":
            written.append(")" * len(groups[-1]) + "|" + "".join(groups[-1]))
        else:
            written.append(r"\Z" if token["character"] == "$" and not lines[-1] else token[0])
    return "".join(written) + ")" * len(groups[-1])


@functools.cache
def compiled(expression: str) -> re.Pattern[str]:
    return re.compile(translated(expression))


@functools.cache
def _compiled_before(expression: str, rest: int) -> re.Pattern[str]:
    """The expression where it ends `rest` characters before the text does."""
    return re.compile(rf"(?:{translated(expression)})(?=[\s\S]{{{rest}}}\Z)")


def longest(expression: str, text: str, start: int) -> tuple[int, int] | None:
    """Where the first match from `start` on begins, and where the longest one that begins there ends."""
    found = compiled(expression).search(text, start) if start <= len(text) else None
    if found is None:
        return None
    looks_ahead = re.search(r"\$|\\[bBz]", expression)  # what it sees at its end counts, too
    for end in range(len(text), found.end(), -1):
        if looks_ahead:
            reached = _compiled_before(expression, len(text) - end).match(text, found.start())
        else:
            reached = compiled(expression).fullmatch(text, found.start(), end)
        if reached:
            return found.start(), end
    return found.span()
