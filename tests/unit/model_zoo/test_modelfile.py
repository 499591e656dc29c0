"""Modelfiles as their users write them, and what is told of those that are wrong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_zoo.chat.messages import Message
from model_zoo.store.modelfile import parse_modelfile, render_modelfile
from runtime.errors import RequestError

WHOLE = '''# a comment
FROM llama3.2:1b

parameter temperature 0.5
PARAMETER stop "<|end|>"
Parameter   stop   two words
SYSTEM """You are a parrot.
  # no comment here
FROM is no command here."""
TEMPLATE "{{ messages[0].content }}"
MESSAGE user What's up?
MESSAGE assistant """
Not "much".
"""
LICENSE MIT
LICENSE """two
lines"""
'''


def read(text: str) -> list[tuple]:
    return [(c.line, c.name, c.key, c.value) for c in parse_modelfile(text)]


def test_a_whole_modelfile_is_read():
    assert read(WHOLE) == [
        (2, "from", None, "llama3.2:1b"),
        (4, "parameter", "temperature", "0.5"),
        (5, "parameter", "stop", "<|end|>"),
        (6, "parameter", "stop", "two words"),
        (
            *(7, "system", None),
            "You are a parrot.\n  # no comment here\nFROM is no command here.",
        ),
        (10, "template", None, "{{ messages[0].content }}"),
        (11, "message", "user", "What's up?"),
        (12, "message", "assistant", '\nNot "much".\n'),
        (15, "license", None, "MIT"),
        (16, "license", None, "two\nlines"),
    ]


@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
def test_any_line_end_and_a_byte_order_mark_will_do(end):
    assert read(f"\ufefffrom a{end}") == [(1, "from", None, "a")]


def test_a_quoted_text_may_go_on_over_lines_and_end_with_blanks_behind():
    assert read('FROM a\nSYSTEM "one\n\n two"  \nLICENSE ""')[1:] == [
        (2, "system", None, "one\n\n two"),
        (5, "license", None, ""),
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has no FROM line"),
        ("SYSTEM hi", "has no FROM line"),
        ("FROM", "line 1: FROM is without a value"),
        ("\nFROM a\nNONSENSE b", "line 3: 'NONSENSE' is no command; there are FROM, PARAMETER"),
        ("FROM a\nADAPTER ./lora.gguf", "line 2: ADAPTER is not served; take a model that has"),
        ("FROM a\nrenderer x", "line 2: RENDERER is not served"),
        ("FROM a\nPARAMETER", "line 2: after PARAMETER a name is wanted"),
        ("FROM a\nPARAMETER top_k", "line 2: PARAMETER is without a value"),
        ("FROM a\nMESSAGE", "line 2: after MESSAGE a role is wanted"),
        ("FROM a\nMESSAGE tool x", "line 2: a message's role is one of system, user, assistant"),
        ('FROM a\nSYSTEM """never\nclosed', 'line 2: the text that begins there has no end """'),
        ('FROM a\nSYSTEM """', 'line 2: the text that begins there has no end """'),
        ('FROM a\nSYSTEM "', 'line 2: the text that begins there has no end "'),
        ("x" * (9 << 20), "has 9,437,184 characters"),
        ("FROM a\n" * 10_001, "has 10,001 commands"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(text, told):
    with pytest.raises(RequestError) as caught:
        parse_modelfile(text)
    assert told in str(caught.value) and len(str(caught.value)) < 300


def test_a_long_text_of_many_lines_takes_no_longer_than_its_length():
    text = 'FROM a\nSYSTEM """' + "line\n" * 1_000_000 + '"""'
    assert len(parse_modelfile(text)[1].value) == 5_000_000


WRITABLE = st.text(alphabet=st.sampled_from('a" \n\x0b\u2028#é'), max_size=12).filter(
    lambda text: '"""' not in text
)


@given(system=WRITABLE, said=WRITABLE, stop=WRITABLE)
def test_what_is_rendered_is_read_again(system, said, stop):
    parameters: list[tuple[str, object]] = [("top_k", 3), *([("stop", stop)] if stop else [])]
    text = render_modelfile(
        "base:7b",
        system=system,
        parameters=parameters,
        messages=[Message("user", said)],
    )
    found = [(c.name, c.key, c.value) for c in parse_modelfile(text)]
    expected = [("from", None, "base:7b")]
    expected += [("system", None, system)] if system else []
    expected += [("parameter", name, str(value)) for name, value in parameters]
    expected += [("message", "user", said)]
    assert found == expected
