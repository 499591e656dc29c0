"""Templates that want too much are refused soon, with little memory; long conversations are not."""

import gc
import time
import tracemalloc
from itertools import chain

import pytest
from jinja2.sandbox import SecurityError

from model_zoo.chat import ChatTemplate, Message
from model_zoo.sandbox.budget import Budget
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
    rendered_by_transformers,
    template_source,
)

ASK = [Message("user", "Hello")]
TALK = TALKS["parallel calls, and on"]
SECONDS = 1.0
BYTES = 128 << 20

GROW = "{% set n = namespace(x='ab', l=['ab'], d={}) %}{% for i in range(99) %}"
LOOP = "{% for i in range(99999) %}{% set y = "
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
    "date": "{{ strftime_now('%999999999Y') }}",
    "repetition": "{{ 'a' * 10**9 }}",
    "repetition of a list": "{{ [1] * 10**9 }}",
    "power": "{{ 9 ** 9 ** 99 }}",
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
    "nested tuples as a key": GROW + "{% set n.l = (n.l, n.l) %}{% endfor %}{{ {n.l: 1} }}",
    "nested by dict()": GROW + "{% set n.d = dict(a=n.d, b=n.d) %}{% endfor %}{{ n.d }}",
    "namespaces": "{% set a = namespace(x=1) %}{% set b = namespace(x=a) %}{{ b }}",
    "sum of lists": "{{ [[1] * 999] * 99 | sum(start=[]) }}",
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
    "shown nested": GROW + "{% set n.l = [n.l] %}{% endfor %}{{ n.l | pprint }}",
    "shown wide": "{% set r = range(99) | list %}{{ [[[r] * 99] * 20] | pprint }}",
    "links": LOOP + "('a@' * 2000) | urlize %}{% endfor %}",
    "links in brackets": LOOP + "('(' * 2000 ~ 'www.a.b' ~ ')' * 2000) | urlize %}{% endfor %}",
    "many links": "{{ ('www.a.b ' * 9999) | urlize }}",
    "comments": LOOP + "('<!---->' * 500) | striptags %}{% endfor %}",
    "many comments": "{{ ('<!---->' * 30000) | striptags }}",
    "attributes": "{{ {'a' * 9999: 'b' * 9999} | xmlattr }}",
    "slices in a loop": "{% set t = 'a' * 200000 %}{% for i in range(99999) %}"
    "{% set y = t[1:] %}{% endfor %}",
}


@pytest.mark.parametrize("talk", [Talk(ASK), TALK], ids=["a question", "a conversation with tools"])
@pytest.mark.parametrize("about", HOSTILE)
def test_what_takes_too_much_is_refused_soon_and_with_little_memory(about: str, talk: Talk) -> None:
    tracemalloc.start()
    began = time.thread_time()
    try:
        with pytest.raises(RequestError):
            ChatTemplate(HOSTILE[about]).render(talk.messages, tools=talk.tools)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert time.thread_time() - began < SECONDS
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
def test_nothing_is_computed_while_a_template_is_compiled(source: str) -> None:
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
        "{{ " + "9" * 100 + " }}",
        "x" * (1 << 18),
        "{{ x | no_filter }}",
    ],
)
def test_what_cannot_be_compiled_is_a_model_file_error(source: str) -> None:
    with pytest.raises(ModelFileError, match="chat template"):
        ChatTemplate(source)


def test_the_allowance_grows_with_the_conversation() -> None:
    """Four thousand turns of a kilobyte, through what templates do with messages."""
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
def test_a_long_conversation_with_many_tools_is_no_hostility(name: str) -> None:
    """Two hundred questions with a call each, a hundred tools; Gemma 4 looks back at each turn."""
    template = ChatTemplate(template_source(name), bos_token="<s>", eos_token="</s>")
    tools = [TIME if "Hermes" not in name else WEATHER] * 100
    asked = [Message("user", f"What is it like in city {number}?") for number in range(201)]
    turns = [SYSTEM, *chain.from_iterable((ask, CALLS, RESULT, THINKING) for ask in asked)]
    if "gemma-2" in name:  # it knows neither
        tools, turns = None, [*chain.from_iterable((ask, THINKING) for ask in asked)]
    text = template.render(turns, tools=tools)
    assert all(text.count(ask.text) == 1 for ask in asked)


def test_collecting_garbage_costs_no_time(monkeypatch) -> None:
    """It walks over the whole process, whoever sets it off."""
    now = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: now[0])

    def slow(phase: str, info: object) -> None:
        now[0] += 100.0 if phase == "start" else 0.0

    budget = Budget({})
    with budget.not_counting_collections():
        gc.callbacks.append(slow)
        gc.collect()
        gc.callbacks.remove(slow)
        budget.step(99)
        now[0] += 1.0
        with pytest.raises(SecurityError, match="takes longer"):
            budget.step(99)


def test_a_template_may_look_back_over_all_messages_at_each() -> None:
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
    ],
)
def test_rarer_filters_and_functions_do_what_they_do_in_transformers(source: str) -> None:
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
def test_what_python_types_can_do_stays_out_of_reach(source: str) -> None:
    assert rendered_by_transformers(source, []) is None
    with pytest.raises(RequestError):
        ChatTemplate(source).render(ASK)


def test_loops_know_their_length_and_ends_as_before() -> None:
    source = (
        "{% for a in 'xyz' %}{{ loop.index }}/{{ loop.length }}{{ '.' if loop.last else ',' }}"
        "{{ loop.nextitem }}{% else %}none{% endfor %}"
        "{% for k, v in {'a': 1}.items() if v %}{{ k }}{% endfor %}"
        "{% for a in missing %}{% else %}none{% endfor %}"
    )
    assert ChatTemplate(source).render(ASK) == "1/3,y2/3,z3/3.anone"
