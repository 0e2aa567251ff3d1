"""Jinja templates of strangers, rendered within bounds.

Jinja's own sandbox keeps a template from Python's internals. It does not keep it from running for ever, or from filling
the memory: nested loops, `10 ** 10 ** 9`, a text that doubles itself, a list of lists of lists whose string has 2 ** 40
characters. Here whatever a template does is paid for before it is done, from a budget that grows with the template's
input. What costs nothing by itself (looking up a name, say) is paid for by the loop, macro or block around it, whose
bodies are changed to pay at each turn. A budget, unlike a deadline, ends a template at the same place on every machine,
and it also ends one call into C that would never come back.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, MappingView, Sized
from contextvars import ContextVar
from datetime import datetime
from typing import Any

from jinja2 import Template, Undefined, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, TemplateReference
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer

_STEP = 100
"""What a step (a call, an operation, a turn of a loop) costs: as much as copying so many characters does at most."""
_LARGEST_NUMBER = 1_000_000
"""Numbers above this are no arguments: they are widths and counts, of which a call makes a text that long."""
_BITS = 4096
"""Of the largest integer that an operation may give."""
_DEPTH = 200
"""How deeply lists may be nested in what is compared, hashed or printed: Python hashes tuples without a limit."""
_SOURCE = 1 << 17
"""Characters of the longest template."""

_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        [
            "capitalize",
            "casefold",
            "center",
            "count",
            "endswith",
            "find",
            "format",
            "index",
            "isalnum",
            "isalpha",
            "isascii",
            "isdecimal",
            "isdigit",
            "islower",
            "isnumeric",
            "isspace",
            "istitle",
            "isupper",
            "join",
            "ljust",
            "lower",
            "lstrip",
            "partition",
            "removeprefix",
            "removesuffix",
            "replace",
            "rfind",
            "rindex",
            "rjust",
            "rpartition",
            "rsplit",
            "rstrip",
            "split",
            "splitlines",
            "startswith",
            "strip",
            "swapcase",
            "title",
            "upper",
            "zfill",
        ]
    ),
    dict: frozenset(["copy", "get", "items", "keys", "values"]),
    list: frozenset(["copy", "count", "index"]),
    tuple: frozenset(["count", "index"]),
    bool: frozenset(),
    int: frozenset(),
    float: frozenset(["is_integer"]),
}
"""The methods that a template may call, all of which take a time and give a result that is known beforehand."""
_INTERNAL = (BlockReference, Cycler, Joiner, LoopContext, Macro, Namespace, TemplateReference, Undefined)
"""Jinja's own objects, whose attributes the sandbox judges by their names."""
_NO_FILTERS = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
_LAZY_FILTERS = frozenset(
    [
        "attr",
        "batch",
        "count",
        "d",
        "default",
        "first",
        "items",
        "last",
        "length",
        "list",
        "map",
        "random",
        "reject",
        "rejectattr",
        "reverse",
        "safe",
        "select",
        "selectattr",
        "slice",
    ]
)
"""Filters that do not look into the elements of their value."""
_SORTING_FILTERS = frozenset(["dictsort", "groupby", "max", "min", "sort", "unique"])


class TooMuch(TemplateError):
    """A template does more than its budget allows."""


class Refused(TemplateError):
    """A template refuses its input, by `raise_exception`."""


class _Budget:
    """What a template may still do."""

    def __init__(self, amount: int):
        self.left = amount

    def spend(self, amount: int) -> None:
        self.left -= amount
        if self.left < 0:
            raise TooMuch("it does not come to an end, or makes too much text")

    def weigh(self, *values: Any) -> None:
        """Pays for looking at everything that is in some values."""
        self.spend(weight(values, self.left))


_budget: ContextVar[_Budget] = ContextVar("budget")


def weight(value: Any, limit: int) -> int:
    """About how many characters the string of a value has.

    Raises:
        TooMuch: More than `limit`, or it is nested too deeply.
    """
    total, level = 0, [value]
    for _ in range(_DEPTH):
        inner: list[Any] = []
        for held in level:
            if isinstance(held, str):
                total += len(held) + 1
            elif isinstance(held, (list, tuple, MappingView)):
                total += (6 if isinstance(held, MappingView) else 3) * len(held) + 1
                if total <= limit:
                    inner += held
            elif isinstance(held, range):
                total += len(held) // 4 + 1
            elif isinstance(held, dict):
                total += 6 * len(held) + 1
                if total <= limit:
                    inner += held
                    inner += held.values()
            else:
                total += 1
            if total > limit:
                raise TooMuch("it does not come to an end, or makes too much text")
        if not inner:
            return total
        level = inner
    raise TooMuch("its lists are nested too deeply")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, Sized) else 1


class _Namespace(Namespace):
    """Jinja's, whose string does not show what it holds: that would be a way around weighing."""

    def __repr__(self) -> str:
        return "<Namespace>"


# ---- paying in the template's code ---------------------------------------------------------------------------------


class _Payments(NodeTransformer):
    """Changes a template so that it pays for what the environment does not see."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        # counted before anything is put in; what is nested pays again at its own turns
        cost = _cost(node.body)
        self.generic_visit(node)
        node.body.insert(0, _statement(cost, node.lineno))
        if node.test is not None:  # which is evaluated for elements that are left out, too
            node.test = nodes.And(_call("tick", nodes.Const(cost)), node.test).set_lineno(node.lineno)
        return node

    def _visit_body(self, node: Any) -> Any:
        cost = _cost(node.body)
        self.generic_visit(node)
        node.body.insert(0, _statement(cost, node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_Block = _visit_body

    def visit_Concat(self, node: nodes.Concat) -> nodes.Concat:
        self.generic_visit(node)
        node.nodes = [n if isinstance(n, nodes.Const) else _call("weighed", n) for n in node.nodes]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        node.expr = _call("compared", node.expr)
        for operand in node.ops:
            operand.expr = _call("searched" if operand.op in ("in", "notin") else "compared", operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Getitem:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _call("sliced", node.node)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _call("weighed", node.key)
        return node


def _cost(body: list[nodes.Node]) -> int:
    """What a turn through a body costs: its literal text, and its nodes."""
    holder = nodes.Scope(body)
    text = sum(len(data.data) for data in holder.find_all(nodes.TemplateData))
    return _STEP + text + 10 * sum(1 for _ in holder.find_all(nodes.Node))


def _call(name: str, *arguments: nodes.Expr) -> nodes.Call:
    call = nodes.Call(nodes.EnvironmentAttribute(name), list(arguments), [], None, None)
    return call.set_lineno(arguments[0].lineno or 1)


def _statement(cost: int, line: int) -> nodes.ExprStmt:
    return nodes.ExprStmt(_call("tick", nodes.Const(cost))).set_lineno(line)


class _Generation(Extension):
    """`{% generation %}`, which marks what the assistant says; here it leaves it as it is."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


# ---- paying in the environment -------------------------------------------------------------------------------------


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with the settings and globals of transformers' chat templates
    (`transformers.utils.chat_template_utils`), within a budget."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
            finalize=_pay_for_output,
            optimized=False,  # folding constants would run what is not paid for
            cache_size=0,
        )
        self.globals = {name: self.globals[name] for name in ("range", "dict", "cycler", "joiner")}
        self.globals |= {"namespace": _Namespace, "raise_exception": _refuse, "strftime_now": _now}
        self.filters = {
            name: _paid_filter(name, filter) for name, filter in self.filters.items() if name not in _NO_FILTERS
        }
        self.filters["tojson"] = _paid_filter("tojson", _to_json)
        self.tests = {name: _paid_test(test) for name, test in self.tests.items()}

    def compiled(self, source: str) -> Template:
        """A template that pays. Raises whatever Jinja and Python raise for a malformed one."""
        if len(source) > _SOURCE:
            raise TooMuch("it is longer than any that comes to an end")
        tree = _Payments().visit(self.parse(source))
        return Template.from_code(self, self.compile(tree), self.make_globals(None), None)

    def rendered(self, template: Template, variables: dict[str, Any], amount: int) -> str:
        """The text of a template, within a budget. Raises whatever it raises."""
        token = _budget.set(_Budget(amount))
        try:
            # what handles a template's exceptions in Jinja would look for its source
            return "".join(template.root_render_func(template.new_context(variables)))
        finally:
            _budget.reset(token)

    # -- what the changed code calls

    def tick(self, cost: int) -> bool:
        return True

    def weighed(self, value: Any) -> Any:
        _budget.get().weigh(value)
        return value

    def compared(self, value: Any) -> Any:
        if isinstance(value, str):
            _budget.get().spend(len(value) // 16)
        elif isinstance(value, (list, tuple, dict, range, MappingView)):
            _budget.get().weigh(value)
        return value

    def searched(self, value: Any) -> Any:
        return value if isinstance(value, dict) else self.compared(value)

    def sliced(self, value: Any) -> Any:
        _budget.get().spend(_length(value))
        return value

    # -- what Jinja calls

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        if getattr(__obj, "__self__", None) is __self:
            if __obj.__name__ == "tick":
                budget.spend(args[0])
            return __obj(*args)
        budget.spend(_STEP)
        if not isinstance(__obj, Macro):
            args = tuple(_held(argument) for argument in args)
            budget.weigh(args, kwargs)
            budget.spend(_numbers((*args, *kwargs.values())))
            target = getattr(__obj, "__wrapped__", __obj)
            receiver, name = getattr(target, "__self__", None), getattr(target, "__name__", "")
            if isinstance(receiver, str):
                budget.spend(len(receiver) + _growth(name, receiver, args, kwargs))
            elif isinstance(receiver, (list, tuple)) and name in ("count", "index"):
                budget.weigh(receiver)
            else:
                budget.spend(_length(receiver) if name == "copy" else 0)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget.get()
        budget.spend(_STEP)
        if isinstance(left, (int, float)) and isinstance(right, (int, float)):
            if isinstance(left, int) and isinstance(right, int):
                bits = left.bit_length() + right.bit_length()
                if operator == "**":
                    bits = left.bit_length() * abs(right)
                if bits > _BITS:
                    raise TooMuch("its numbers become too large")
        elif operator == "*":
            text, count = (right, left) if isinstance(left, int) else (left, right)
            budget.spend(_length(text) * max(count, 0) if isinstance(count, int) else 0)
        elif operator == "%" and isinstance(left, str):
            budget.spend(_growth("%", left, right if isinstance(right, tuple) else (right,), {}))
        else:
            budget.spend(_length(left) + _length(right))
        return super().call_binop(context, operator, left, right)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, (tuple, list, dict)):
            _budget.get().weigh(argument)
        return super().getitem(obj, argument)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        # Jinja gives something undefined, which prints as nothing
        raise SecurityError(f"it reads {attribute!r} of a {type(obj).__name__}, which it may not")

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        kind = next((kind for kind in _METHODS if isinstance(obj, kind)), None)
        if kind is not None and not isinstance(obj, _INTERNAL):
            return attr in _METHODS[kind]
        return isinstance(obj, _INTERNAL) and super().is_safe_attribute(obj, attr, value)


@pass_context
def _pay_for_output(context: Context, value: Any) -> Any:
    _budget.get().weigh(value)
    return value


def _held(value: Any) -> Any:
    """A value, in which what would be made on the way is made now, and paid for."""
    if isinstance(value, Iterator) and not isinstance(value, LoopContext):
        return list(value)
    return value


def _numbers(values: Any) -> int:
    """What numbers among arguments may cost: they are widths and counts."""
    numbers = [abs(value) for value in values if isinstance(value, int)]
    if max(numbers, default=0) > _LARGEST_NUMBER:
        raise TooMuch("its numbers are too large")
    return sum(numbers)


def _growth(name: str, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How much longer than its text and arguments the result of a method or filter may be."""
    given = (*args, *kwargs.values())
    if name == "replace":
        old, new = (str(value) for value in (*given, "", "")[:2])
        return (text.count(old) if old else len(text) + 1) * len(new)
    if name == "join":
        return len(text) * _length(given[0]) if given else 0
    if name in ("format", "%"):
        if re.search(r"\d{5}", text) or re.search(r"\{[^{}]*:[^{}]*\{|%[^a-zA-Z%]*\*", text):
            raise TooMuch("its formats have widths that are too large, or come from elsewhere")
        places = text.count("%" if name == "%" else "{") + 1
        return places * (1000 + weight(given, _budget.get().left))
    return 0


def _paid_filter(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    first = 1 if hasattr(filter, "jinja_pass_arg") else 0  # after what Jinja itself gives

    @functools.wraps(filter)
    def paid(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.spend(_STEP)
        value = _held(args[first]) if len(args) > first else None
        given = tuple(_held(argument) for argument in args[first + 1 :])
        budget.weigh(given, kwargs)
        budget.spend(_numbers((*given, *kwargs.values())))
        if not isinstance(value, str):  # each element is a step of Python's
            budget.spend(_STEP // 4 * _length(value))
        if name in _LAZY_FILTERS:
            budget.spend(_length(value))
        else:
            size = weight(value, budget.left)
            budget.spend(size * (8 if name in _SORTING_FILTERS else 2))
            others = (*given, *kwargs.values())
            if name == "indent" and isinstance(value, str):
                width = others[0] if others else 4
                budget.spend((value.count("\n") + 1) * (width if isinstance(width, int) else _length(width)))
            elif name == "tojson":
                budget.spend(size * max((_length(o) if isinstance(o, str) else int(o or 0) for o in others), default=0))
            elif name == "sum":
                if any(not isinstance(v, (int, float, str)) for v in others) or not all(
                    isinstance(v, (int, float, dict, Undefined)) for v in (value if isinstance(value, list) else ())
                ):
                    raise TooMuch("it sums what are no numbers")
            elif name == "round":
                if _numbers(others) > 100:
                    raise TooMuch("its numbers are too large")
            elif name == "join":
                separator = str(others[0]) if others else ""
                budget.spend(_length(value) * len(separator))
            elif name in ("replace", "format"):
                budget.spend(_growth("%" if name == "format" else name, str(value), given, kwargs))
        return filter(*args[:first], value, *given, **kwargs)

    return paid


def _paid_test(test: Callable[..., Any]) -> Callable[..., Any]:
    first = 1 if hasattr(test, "jinja_pass_arg") else 0

    @functools.wraps(test)
    def paid(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.spend(_STEP // 4)
        if len(args) > first + 1:  # a comparison
            for value in args[first:]:
                if isinstance(value, (list, tuple, dict, range, MappingView)):
                    budget.weigh(value)
                else:
                    budget.spend(_length(value) // 16 if isinstance(value, str) else 1)
        return test(*args, **kwargs)

    return paid


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: Any) -> None:
    raise Refused(str(message)[:500])


def _now(format: Any) -> str:
    if re.search(r"%\d", str(format)):  # glibc pads to such a width
        raise SecurityError("strftime_now takes no widths")
    return datetime.now().strftime(str(format))
