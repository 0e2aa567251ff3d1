"""Chat templates: what they give, and how those of strangers are kept within bounds."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import MATERIAL
from tiny_repositories import make_repository

from transmuter import InputError, ModelError
from transmuter.serving import ChatTemplate, Tokenizer

pytest.importorskip("jinja2")

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " Hello! "}]
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m['content'] | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _recorded() -> list[Any]:
    paths = sorted((MATERIAL / "zoo").glob("*/tokenizer_reference.json"))
    found = [path.parent.name for path in paths if "chat" in json.loads(path.read_text(encoding="utf-8"))]
    if not found:
        reason = f"no recorded repositories at {MATERIAL}; TRANSMUTER_MATERIAL names their folder"
        return [pytest.param("", marks=pytest.mark.skip(reason=reason))]
    return found


@pytest.mark.parametrize("name", _recorded())
def test_equals_transformers(name: str) -> None:
    chat = json.loads((MATERIAL / "zoo" / name / "tokenizer_reference.json").read_text(encoding="utf-8"))["chat"]
    text = ChatTemplate.load(MATERIAL / "zoo" / name).render(chat["messages"], add_generation_prompt=True)
    assert text == chat["text"]
    assert Tokenizer.load(MATERIAL / "zoo" / name).encode(text, add_special_tokens=False).ids == chat["ids"]


def render(source: str, messages: Any = CHAT, **variables: Any) -> str:
    return ChatTemplate(source).render(messages, **variables)


# ---- what templates may do -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (CHATML, "<|user|>Hi<|end|>\n<|assistant|>Hello!<|end|>\n"),
        # blocks take their line with them, as in transformers
        ("{% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "Hi"}'),
        ("{{ {'a': 'é<'} | tojson(indent=1) }}", '{\n "a": "é<"\n}'),
        ("{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ loop.index0 }}{% endfor %}", "0"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("{% macro say(x, y='!') %}{{ x ~ y }}{% endmacro %}{{ say('a') }}{{ say('b', y='?') }}", "a!b?"),
        ("{% generation %}{{ messages[1].content }}{% endgeneration %}", " Hello! "),
        ("{{ messages | map(attribute='role') | join(', ') }}", "user, assistant"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ messages[1:][0].content.strip().split('l') }}", "['He', '', 'o!']"),
        ("{% for m in messages if m.role != 'user' %}{{ m.role }}{% endfor %}", "assistant"),
        (
            "{{ messages[::-1][0].role }}{{ 'Hi' in messages[0].content }}{{ 'content' in messages[0] }}",
            "assistantTrueTrue",
        ),
        ("{{ '%s-%05.1f' % ('a', 2) }}{{ '{}{x}'.format(1, x=2) }}", "a-002.012"),
        ("{{ none_given is defined }}{{ tools is none }}{{ documents }}", "FalseTrueNone"),
        ("{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}", "role=user;content=Hi;"),
        ("{% for x in [[1, [2]], 3] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "123"),
        ("{{ 7 // 2 }} {{ 2 ** 10 }} {{ 1.5 * 2 }} {{ -(3) }} {{ 'ab' * 2 }}", "3 1024 3.0 -3 abab"),
        ("{% set x %}a{{ 1 }}{% endset %}{% filter upper %}{{ x }}b{% endfilter %}", "A1B"),
        ("{{ raise_exception('no') if false else 'yes' }}", "yes"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_what_they_give(source: str, text: str) -> None:
    assert render(source) == text


def test_variables_and_special_tokens(tmp_path: Path) -> None:
    source = "{{ cls_token }}{{ thinking }}{{ add_generation_prompt }}{{ tools[0].name }}{{ documents[0].text }}"
    folder = make_repository(tmp_path / "repo", tokenizer_config={"chat_template": source})
    text = ChatTemplate.load(folder).render([], thinking="no", tools=[{"name": "f"}], documents=[{"text": "d"}])
    assert text == "[CLS]noFalsefd"


def test_where_templates_are(tmp_path: Path) -> None:
    def found(name: str, files: dict[str, Any], **tokenizer_config: Any) -> ChatTemplate | None:
        folder = make_repository(tmp_path / name, files=files, tokenizer_config=tokenizer_config)
        return ChatTemplate.find(folder)

    assert found("a", {}) is None
    with pytest.raises(ModelError, match="has no chat template"):
        ChatTemplate.load(tmp_path / "a")
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    template = found("b", {}, chat_template=named)
    assert (template.source, template.render([]), template.render([], tools=[])) == ("d", "d", "t")
    assert template.render([], name="tool_use") == "t"
    with pytest.raises(InputError, match=r"no chat template 'x'\. Give one of: default, tool_use"):
        template.render([], name="x")
    beside = {"chat_template.jinja": "jinja", "additional_chat_templates/rag.jinja": "rag"}
    template = found("c", beside, chat_template="config")
    assert (template.render([]), template.render([], name="rag")) == ("jinja", "rag")
    assert found("d", {"chat_template.json": {"chat_template": "json"}}).render([]) == "json"
    for broken in (3, ["x"], [{"name": "a"}], {"a": 1}):
        with pytest.raises(ModelError, match=r"'chat_template' in tokenizer_config\.json of .* must be a text"):
            found("e", {}, chat_template=broken)


def test_going_on_with_the_last_message() -> None:
    source = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    trimmed = "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}"
    assert render(source, continue_final_message=True) == "<Hi>< Hello! "
    assert render(trimmed, continue_final_message=True) == "<Hi><Hello!"
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    assert render("{{ messages[0].content[0].text }}!", parts, continue_final_message=True) == "Hi"
    assert parts[0]["content"][0]["text"] == "Hi"
    with pytest.raises(InputError, match="leaves out the end"):
        render("x", continue_final_message=True)
    with pytest.raises(InputError, match="no text to go on with"):
        render("x", [{"role": "user"}], continue_final_message=True)
    with pytest.raises(InputError, match="exclude each other"):
        render("x", continue_final_message=True, add_generation_prompt=True)


@pytest.mark.parametrize("messages", ["Hi", [1], None, {"role": "user"}])
def test_malformed_messages(messages: Any) -> None:
    with pytest.raises(InputError, match="messages must be a list of dicts"):
        render(CHATML, messages)


def test_messages_in_a_circle() -> None:
    message: dict[str, Any] = {"role": "user"}
    message["content"] = [message]
    with pytest.raises(InputError, match="nested too deeply"):
        render(CHATML, [message])


def test_refused_messages() -> None:
    with pytest.raises(InputError, match=r"refuses the messages: roles must alternate\. Give"):
        render("{{ raise_exception('roles must alternate') }}")


def test_long_conversations_are_within_bounds() -> None:
    chat = [{"role": "user", "content": f"message {i} " * 20} for i in range(2000)]
    assert render(CHATML, chat).count("<|end|>") == 2000
    long = "word " * 400_000
    assert len(render(CHATML, [{"role": "user", "content": long}])) > 1_900_000


def test_threads_have_budgets_of_their_own() -> None:
    template = ChatTemplate("{% for i in range(5000) %}{{ messages[0].content }}{% endfor %}")
    ready = threading.Barrier(8)

    def one(i: int) -> str:
        ready.wait()
        return template.render([{"role": "user", "content": str(i)}])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(8))) == [str(i) * 5000 for i in range(8)]


# ---- what they may not do ------------------------------------------------------------------------------------------

_GROWING = (
    "{{% set ns = namespace(x={start}) %}}{{% for i in range({turns}) %}}{{% set ns.x = {step} %}}{{% endfor %}}{end}"
)


def _grown(start: str, step: str, end: str = "", turns: int = 100) -> str:
    return _GROWING.format(start=start, step=step, end=end, turns=turns)


ENDLESS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a loop of a long literal": "{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}",
    "a loop that skips": "{% for i in range(9999) %}{% for j in range(9999) if false %}{% endfor %}{% endfor %}",
    "a loop that breaks": "{% for i in range(99999) %}{% for j in range(99999) %}{% break %}{% endfor %}{% endfor %}",
    "a loop over ranges": "{% for i in range(99999) %}{{ range(99999) | list | length }}{% endfor %}",
    "recursive loops": "{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "a macro that branches": "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n else 1 }}{% endmacro %}{{ f(60) }}",
    "a macro without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a macro of a long literal": "{% macro f() %}"
    + "x" * 9999
    + "{% endmacro %}{% for i in range(99999) %}{{ f() }}{% endfor %}",
    "a block again and again": "{% block b %}"
    + "x" * 9999
    + "{% endblock %}{% for i in range(99999) %}{{ self.b() }}{% endfor %}",
    "powers": "{{ 9 ** (9 ** 9) }}",
    "products": _grown("9", "ns.x * ns.x"),
    "a repeated text": "{{ 'a' * 10 ** 10 }}",
    "a repeated list": "{{ 10 ** 8 * [0] }}",
    "a text that doubles": _grown("'aa'", "ns.x ~ ns.x"),
    "a text that is added": _grown("'aa'", "ns.x + ns.x"),
    "a text that is replaced": _grown("'aa'", "ns.x.replace('a', 'aa')"),
    "a text that is joined": _grown("'aa'", "ns.x.join([ns.x, ns.x])"),
    "a text that is formatted": _grown("'aa'", "'%s%s' % (ns.x, ns.x)"),
    "a text that is captured": "{% set ns = namespace(x='a') %}{% for i in range(99) %}"
    "{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = x %}{% endfor %}",
    "slices": "{% set a = 'x' * 900000 %}{% for i in range(99999) %}{% set b = a[1:] %}{% endfor %}",
    "lists of lists": _grown("[1]", "[ns.x, ns.x]", "{{ ns.x }}", 60),
    "comparing lists of lists": _grown("[1]", "[ns.x, ns.x]", "{{ ns.x == [ns.x[0]] }}", 60),
    "lists of lists as JSON": _grown("[1]", "[ns.x, ns.x]", "{{ ns.x | tojson }}", 60),
    "views of dicts of dicts": _grown("{}", "{1: ns.x, 2: ns.x}", "{{ ns.x.items() }}", 60),
    "hashing deep tuples": _grown("()", "(ns.x,)", "{{ {ns.x: 1} }}", 90000),
    "looking deep tuples up": _grown("()", "(ns.x,)", "{{ {}[ns.x] }}", 90000),
    "deep tuples among keys": _grown("()", "(ns.x,)", "{{ ns.x in {} }}", 90000),
    "padding": "{{ 'x'.ljust(10 ** 10) }}",
    "padding again and again": "{% for i in range(99999) %}{% set x = 'x'.center(999999) %}{% endfor %}",
    "centring": "{{ range(99999) | map('string') | map('center', 999999) | list | length }}",
    "widths": "{{ '%1000000000d' % 1 }}",
    "widths from elsewhere": "{{ '%*d' % (1000000000, 1) }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format from elsewhere": "{{ '{:{w}}'.format(1, w='1000000000') }}",
    "the filter format": "{{ '%1000000000d' | format(1) }}",
    "replace": "{{ ('a' * 999999) | replace('a', 'b' * 999999) }}",
    "indent": "{{ ('a\n' * 99999) | indent('x' * 999999) }}",
    "indented JSON": "{{ range(99999) | list | tojson(indent=999999) }}",
    "a sum of lists": "{{ ([[1]] * 99999) | sum(start=[]) }}",
    "long numbers": "{{ " + "9" * 9999 + " }}",
    "rounding": "{{ 1.5 | round(999999, 'floor') }}",
    "looking for what is not in a range": "{% for i in range(99999) %}{% set x = 'a' in range(99999) %}{% endfor %}",
    "dates": "{{ strftime_now('%1000000000d') }}",
    "parentheses": "{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}",
    "signs": "{{ " + "-" * 99999 + "1 }}",
    "blocks": "{% if 1 %}" * 999 + "{% endif %}" * 999,
    "a long template": "x" * 200_000,
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS.keys())
def test_what_does_not_end_is_ended(source: str) -> None:
    with pytest.raises(ModelError, match="The chat template fails: "):
        render(source)


FORBIDDEN = [
    "{{ ''.__class__ }}",
    "{{ messages.__class__.__mro__ }}",
    "{{ messages[0]['__class__'] }}",
    "{{ messages | attr('__class__') }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{{ messages | map('attr', '__class__') | list }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ '{x.__class__}'.format_map({'x': messages}) }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ self.__init__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ loop.__class__ }}{% for x in [1] %}{{ loop.__class__ }}{% endfor %}",
    "{% macro f() %}{% endmacro %}{{ f.__call__ }}",
    "{{ x.__class__ }}",
    "{{ thing.secret }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ messages[0].content.encode() }}",
    "{{ messages[0].content.translate({72: 'x'}) }}",
    "{{ 1 .to_bytes(9, 'big') }}",
    "{{ lipsum() }}",
    "{{ messages | pprint }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends '/etc/passwd' %}",
    "{{ x.y }}",
    "{{ 1 / 0 }}",
    "{% for %}",
]


class Thing:
    """What a caller may have put among the messages."""

    secret = "secret"


@pytest.mark.parametrize("source", FORBIDDEN)
def test_what_is_forbidden_is_an_error(source: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(ModelError, match="The chat template fails: "):
        render(source, messages, thing=Thing())
    assert messages == [{"role": "user", "content": "Hi"}]
