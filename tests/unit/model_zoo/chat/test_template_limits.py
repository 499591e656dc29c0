"""Templates that exceed their limits are refused; long conversations are not."""

import gc
import time
import tracemalloc
from itertools import chain
from typing import Any

import pytest

from model_zoo.chat import template as limits
from model_zoo.chat.chat_template import ChatTemplate
from model_zoo.chat.messages import Message, ToolCall
from runtime.errors import ModelFileError, RequestError
from tests.chat_templates import (
    CALLS,
    RESULT,
    SYSTEM,
    TALKS,
    TEMPLATES,
    THINKING,
    TIME,
    WEATHER,
    Talk,
    plain,
    rendered_by_transformers,
    template_source,
)

ASK = [Message("user", "Hello")]
TALK = TALKS["parallel calls, and on"]
# Limits of the thread that asks for a rendering; the kernel limits the rendering process.
SECONDS = 0.1  # of processor time
BYTES = 4 << 20

GROW = "{% set n = namespace(x='ab', l=['ab'], d={}) %}{% for i in range(99) %}"
LOOP = "{% for i in range(99999) %}{% set y = "
DIVIDE = (
    "{% set a = ('f' * 120000) | int(0, 16) %}{% set b = ('e' * 60000) | int(0, 16) %}"
    "{% for i in range(99) %}"
)
HOSTILE = {
    "center": "{{ 'a' | center(10**9) }}",
    "center by name": "{{ 'a' | center(width=10**9) }}",
    "padding method": "{{ 'a'.ljust(10**9) }}",
    "zeros": "{{ '1'.zfill(10**9) }}",
    "tabs": "{{ '\\t'.expandtabs(10**9) }}",
    "bytes": "{{ (1).to_bytes(10**9, 'big') }}",
    "indent": "{{ ('a\\n' * 9999) | indent(10**6) }}",
    "indent by a text": "{{ ('a\\n' * 9999) | indent('x' * 99999) }}",
    "wordwrap": "{{ ('a ' * 9999) | wordwrap(1, wrapstring='x' * 9999) }}",
    "batch": "{{ [1] | batch(10**9, 'x') | list }}",
    "slice": "{{ [1] | slice(10**9) | list }}",
    "round": "{{ 1.5 | round(10**9, 'ceil') }}",
    "replace": "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "replace nothing": "{{ ('a' * 99999) | replace('', 'b' * 99999) }}",
    "replace method": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "join": "{{ range(99999) | join('b' * 99999) }}",
    "join method": "{{ ('b' * 99999).join(range(99999) | map('string')) }}",
    "translate": "{{ ('a' * 99999).translate({97: 'b' * 99999}) }}",
    "format filter": "{{ '%999999999s' | format('a') }}",
    "format repeats": "{{ ('%(a)s' * 9999) | format(a='a' * 99999) }}",
    "format operator": "{{ '%*s' % (999999999, 'a') }}",
    "format method": "{{ '{:>999999999}'.format('a') }}",
    "format width from a value": "{{ '{:{}}'.format('a', 999999999) }}",
    "format method repeats": "{{ ('{0}' * 9999).format('a' * 99999) }}",
    "json indent": "{{ range(99999) | list | tojson(indent=99999) }}",
    "repetition": "{{ 'a' * 10**9 }}",
    "repetition of a list": "{{ [1] * 10**9 }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "large products": "{% set n = namespace(x=9**9) %}{% for i in range(99) %}"
    "{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
    "doubling by plus": GROW + "{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling by tilde": GROW + "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling by join": GROW + "{% set n.x = [n.x, n.x] | join %}{% endfor %}",
    "doubling by format": GROW + "{% set n.x = '%s%s' % (n.x, n.x) %}{% endfor %}",
    "doubling in a block": GROW
    + "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}",
    "doubling lists": GROW + "{% set n.l = n.l + n.l %}{% endfor %}",
    "nested lists": GROW + "{% set n.l = [n.l, n.l] %}{% endfor %}{{ n.l }}",
    "nested lists compared": "{% set n = namespace(a=[1], b=[1]) %}{% for i in range(60) %}"
    "{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% endfor %}{{ n.a == n.b }}",
    "nested dicts": GROW + "{% set n.d = {'a': n.d, 'b': n.d} %}{% endfor %}{{ n.d | tojson }}",
    "nested tuples as a key": GROW + "{% set n.x = (n.x, n.x) %}{% endfor %}{{ {n.x: 1} }}",
    "nested by dict()": GROW + "{% set n.d = dict(a=n.d, b=n.d) %}{% endfor %}{{ n.d }}",
    "sum of lists": "{{ ([[1] * 999] * 9999) | sum(start=[]) | length }}",
    "empty loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "empty loops over a list": "{% set r = range(9999) | list %}{% for a in r %}{% for b in r %}"
    "{% for c in r %}{% endfor %}{% endfor %}{% endfor %}",
    "constant text in loops": "{% for a in range(9999) %}{% for b in range(99) %}"
    + "x" * 999
    + "{% endfor %}{% endfor %}",
    "text in a macro": "{% macro m() %}{% for a in range(99999) %}"
    + "x" * 999
    + "{% endfor %}{% endmacro %}{{ m() | length }}",
    "two calls each": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursive loop": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "lazy filters": "{{ range(99999) | map('string') | map('center', 999) | list | length }}",
    "sorting long texts": "{% set t = 'a' * 99999 %}"
    "{{ ([t ~ 'b', t ~ 'a'] * 9999) | sort | length }}",
    "lists in a loop": LOOP + "range(99999) | list %}{% endfor %}",
    "dicts in a loop": LOOP + "dict.fromkeys(range(99999)) %}{% endfor %}",
    "shown": LOOP + "range(1300) | list | pprint %}{% endfor %}",
    "shown nested": GROW + "{% set n.l = [n.l] * 99 %}{% endfor %}{{ n.l | pprint }}",
    "shown wide": "{% set r = range(99) | list %}{{ [[[r] * 99] * 20] | pprint }}",
    "links": LOOP + "('a@' * 2000) | urlize %}{% endfor %}",
    "links in brackets": LOOP + "('(' * 2000 ~ 'www.a.b' ~ ')' * 2000) | urlize %}{% endfor %}",
    "many links": "{{ ('www.a.b ' * 999999) | urlize }}",
    "comments": LOOP + "('<!---->' * 500) | striptags %}{% endfor %}",
    "many comments": "{{ ('<!---->' * 999999) | striptags }}",
    "attributes": "{{ {'a': '<' * 9999999} | xmlattr }}",
    "slices in a loop": "{% set t = 'a' * 2000000 %}{% for i in range(99999) %}"
    "{% set y = t[1:] %}{% endfor %}",
    # A single call into C, which Python cannot interrupt.
    "stripped": "{% set a = '…' * 120000 %}{{ a.strip('Ħ' * 120000 ~ '…') | length }}",
    "trimmed": "{% set a = '…' * 120000 %}{{ a | trim('Ħ' * 120000 ~ '…') | length }}",
    "found from behind": "{{ ('a' * 120000).rfind('ab' ~ 'a' * 40000) }}",
    "split from behind": "{{ ('a' * 120000).rsplit('ab' ~ 'a' * 40000) | length }}",
    "divided": DIVIDE + "{% set c = a // b %}{% endfor %}",
    "divisible": DIVIDE + "{% set c = a is divisibleby(b) %}{% endfor %}",
}


@pytest.mark.parametrize("about", HOSTILE)
def test_a_template_that_exceeds_a_limit_is_refused(
    about: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a conversation, whose limits are wider than those of a question. The limit of time is
    reached sooner than in the product."""
    monkeypatch.setattr(limits, "_SECONDS", 0.05)
    template = ChatTemplate(HOSTILE[about])
    gc.disable()  # a collection may take longer, and cleans up after other tests
    tracemalloc.start()
    began = time.thread_time()
    try:
        with pytest.raises(RequestError):
            template.render(TALK.messages, tools=TALK.tools)
        took = time.thread_time() - began
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert took < SECONDS
    assert peak < BYTES


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**9 }}",
        "{{ 'a' | center(10**9) }}",
        "{% if 'a' | center(10**9) %}{% endif %}",
        "{% set x = 9 ** 9 ** 99 %}",
        "{{ ('a' ~ 'b') * 10**9 }}",
    ],
)
def test_compiling_folds_no_constants(source: str) -> None:
    tracemalloc.start()
    ChatTemplate(source)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}",
        "{{ " + "-" * 9999 + "1 }}",
        "{% if 1 %}" * 200 + "{% endif %}" * 200,
        "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
        "{{ 1" + "0" * 5000 + " }}",
        "x" * (1 << 18),
        "{{ x | no_filter }}",
    ],
)
def test_a_template_that_does_not_compile_is_a_model_file_error(source: str) -> None:
    with pytest.raises(ModelFileError, match="chat template"):
        ChatTemplate(source)


def test_limits_grow_with_the_conversation() -> None:
    """Four thousand turns of a kilobyte through common filters."""
    source = (
        "{% set n = namespace(last='') %}{% for m in messages %}"
        "{% if loop.first %}{% set n.last = m.role | trim %}{% endif %}"
        "<|{{ m.role }}|>{{ (m.content | trim).split('</think>')[-1] | replace('q', 'k') }}"
        "{{ {'a': m.content} | tojson(indent=4) ~ '\n' }}{% endfor %}"
    )
    messages = [Message("user", "quick brown fox " * 64)] * 4000
    text = ChatTemplate(source).render(messages)
    assert len(text) > 2 * 4000 * 1024 and text.endswith('"\n}\n')


@pytest.mark.parametrize("name", TEMPLATES)
def test_published_templates_render_a_long_conversation_with_many_tools(name: str) -> None:
    """Two hundred questions with a call each, and a hundred tools."""
    template = ChatTemplate(template_source(name), bos_token="<s>", eos_token="</s>")
    tools = [TIME if "Hermes" not in name else WEATHER] * 100
    asked = [Message("user", f"What is it like in city {number}?") for number in range(201)]
    turns = [SYSTEM, *chain.from_iterable((ask, CALLS, RESULT, THINKING) for ask in asked)]
    if "gemma-2" in name:  # it knows neither
        tools, turns = None, [*chain.from_iterable((ask, THINKING) for ask in asked)]
    text = template.render(turns, tools=tools)
    assert all(text.count(ask.text) == 1 for ask in asked)


def offering(count: int, **parameters: Any) -> list[dict[str, Any]]:
    described = {"type": "object", "properties": {"city": {"type": "string", **parameters}}}
    functions = [{"name": f"f{n}", "parameters": described} for n in range(count)]
    return [{"type": "function", "function": function} for function in functions]


def steps(count: int) -> Talk:
    """`count` calls, each followed by its result."""
    ids = [f"call{number:05}" for number in range(count)]
    turns = [
        (
            Message("assistant", tool_calls=(ToolCall("f0", {"city": "Bern"}, name),)),
            Message("tool", "sunny", tool_call_id=name),
        )
        for name in ids
    ]
    return Talk([*ASK, *chain.from_iterable(turns)], offering(1))


def parallel(count: int) -> Talk:
    calls = [ToolCall("f0", {"city": f"B{n}"}, f"call{n:05}") for n in range(count)]
    results = [Message("tool", "sunny", tool_call_id=call.id) for call in calls]
    return Talk([*ASK, Message("assistant", tool_calls=tuple(calls)), *results], offering(1))


# Constructs of published templates that extend a text or a list step by step, or search each
# result among all calls.
GROWING_TEXT = (
    "{% set ns = namespace(out='') %}{% for m in messages %}{% set ns.out = ns.out ~ '<|' ~ m.role"
    " ~ '|>' ~ m.content %}{% for call in m.tool_calls or [] %}"
    "{% set ns.out = ns.out ~ call.function.name ~ (call.function.arguments | tojson) %}"
    "{% endfor %}{% set ns.out = ns.out ~ '\n' %}{% endfor %}{{ ns.out }}"
)
GROWING_TOOLS = (
    "{% set ns = namespace(list='') %}{% for tool in tools %}"
    "{% set ns.list = ns.list + '\n' + (tool | tojson) %}{% endfor %}"
    "{{ ns.list }}{% for m in messages %}{{ m.content }}{% endfor %}"
)
GROWING_LIST = (
    "{% macro type(schema) %}{% set ns = namespace(values=[]) %}{% for value in schema.enum %}"
    "{% set ns.values = ns.values + ['\"' ~ value ~ '\"'] %}{% endfor %}"
    "{{ ns.values | join(' | ') }}{% endmacro %}{% for tool in tools %}"
    "{{ type(tool.function.parameters.properties.city) }}{% endfor %}"
)
RESULTS_BY_CALL = (
    "{% for m in messages if m.tool_calls %}{% for call in m.tool_calls %}"
    "{% set ns = namespace(before=[]) %}{% for result in messages %}"
    "{% if result.role == 'tool' %}{% set ns.before = ns.before + [result] %}"
    "{% if result.tool_call_id == call.id %}{{ call.function.arguments | tojson }}"
    "{{ result.content }}{% endif %}{% endif %}{% endfor %}{% endfor %}{% endfor %}"
)
LARGE = {
    "3,000 messages": (GROWING_TEXT, Talk([Message("user", "Where is Bern? " * 9)] * 3000)),
    "2,000 steps of an agent": (GROWING_TEXT, steps(2000)),
    "2,000 tools": (GROWING_TOOLS, Talk(ASK, offering(2000))),
    "4,000 values": (GROWING_LIST, Talk(ASK, offering(1, enum=[*map(str, range(4000))]))),
    "300 parallel calls": (RESULTS_BY_CALL, parallel(300)),
}


@pytest.mark.parametrize("about", LARGE)
def test_large_conversations_are_rendered_as_in_transformers(about: str) -> None:
    source, talk = LARGE[about]
    chat = [plain(message) for message in talk.messages]
    expected = rendered_by_transformers(source, chat, talk.tools)
    assert expected
    assert ChatTemplate(source).render(talk.messages, tools=talk.tools) == expected


def test_a_template_may_loop_over_all_earlier_messages_for_each_message() -> None:
    source = (
        "{% for m in messages %}{% for before in messages[:loop.index0] %}"
        "{% if before.role == 'tool' %}{{ before.content }}{% endif %}{% endfor %}.{% endfor %}"
    )
    messages = [Message("user", "hi")] * 800
    assert ChatTemplate(source).render(messages) == "." * 800


@pytest.mark.parametrize(
    "source",
    [
        "{{ {'a': [1, 2, 'x' * 100], 'b': none} | pprint }}",
        "{{ '<b>x</b> <!-- c --> y &amp; z' | striptags }}",
        "{{ 'www.example.org (http://a.b/c) a@b.cd' | urlize(20, true, target='_blank') }}",
        "<a{{ {'class': 'x y', 'id': none, 't': '<'} | xmlattr }}>",
        "{{ dict(a=1) }}{{ dict([('b', 2)], c=3) }}{{ dict.fromkeys('ab', 4) }}",
        "{% set n = namespace({'a': 1}, self=2) %}{% set n.c = 3 %}{{ n.a }}{{ n.self }}{{ n.c }}",
        "[{{ strftime_now('%999999999Y') }}]",
        "{% set n = namespace(l=[]) %}{% for i in range(9) %}{% set n.l = [n.l, n.l] %}{% endfor %}"
        "{{ n.l }}",
    ],
)
def test_rarer_filters_and_functions_behave_as_in_transformers(source: str) -> None:
    chat = [{"role": "user", "content": "Hello"}]
    expected = rendered_by_transformers(source, chat)
    assert expected and ChatTemplate(source).render(ASK) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ dict.mro() }}",
        "{{ namespace.mro() }}",
        "{% set n = namespace(_a=1) %}",
        "{% set n = namespace({'__class__': 1}) %}",
        "{% set n = namespace() %}{% set n.__call__ = 1 %}",
    ],
)
def test_attributes_of_python_types_are_not_accessible(source: str) -> None:
    assert rendered_by_transformers(source, []) is None
    with pytest.raises(RequestError):
        ChatTemplate(source).render(ASK)


def test_loop_variables_are_available() -> None:
    source = (
        "{% for a in 'xyz' %}{{ loop.index }}/{{ loop.length }}{{ '.' if loop.last else ',' }}"
        "{{ loop.nextitem }}{% else %}none{% endfor %}"
        "{% for k, v in {'a': 1}.items() if v %}{{ k }}{% endfor %}"
        "{% for a in missing %}{% else %}none{% endfor %}"
    )
    assert ChatTemplate(source).render(ASK) == "1/3,y2/3,z3/3.anone"
