"""Parsing and rendering of Modelfiles, and the errors of invalid ones."""

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


def test_a_complete_modelfile_is_parsed():
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
def test_line_ends_and_byte_order_marks_are_accepted(end):
    assert read(f"\ufefffrom a{end}") == [(1, "from", None, "a")]


def test_quoted_text_may_span_lines_and_be_followed_by_blanks():
    assert read('FROM a\nSYSTEM "one\n\n two"  \nLICENSE ""')[1:] == [
        (2, "system", None, "one\n\n two"),
        (5, "license", None, ""),
    ]


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("", "has no FROM line"),
        ("SYSTEM hi", "has no FROM line"),
        ("FROM", "line 1: FROM has no value"),
        (
            "\nFROM a\nNONSENSE b",
            "line 3: 'NONSENSE' is not a command; use one of FROM, ADAPTER, PARAM",
        ),
        ("FROM a\nADAPTER", "line 2: ADAPTER has no value"),
        ("FROM a\nrenderer x", "line 2: RENDERER is not served"),
        ("FROM a\nPARAMETER", "line 2: PARAMETER must be followed by a name"),
        ("FROM a\nPARAMETER top_k", "line 2: PARAMETER has no value"),
        ("FROM a\nMESSAGE", "line 2: MESSAGE must be followed by a role"),
        (
            "FROM a\nMESSAGE tool x",
            "line 2: the role of a message must be one of system",
        ),
        ('FROM a\nSYSTEM """never\nclosed', 'line 2: the quoted text has no closing """'),
        ('FROM a\nSYSTEM """', 'line 2: the quoted text has no closing """'),
        ('FROM a\nSYSTEM "', 'line 2: the quoted text has no closing "'),
        ("x" * (9 << 20), "has 9,437,184 characters"),
        ("FROM a\n" * 10_001 + "NONSENSE", "has more than 10,000 commands"),
    ],
)
def test_errors_name_the_line(text, reported):
    with pytest.raises(RequestError) as caught:
        parse_modelfile(text)
    assert reported in str(caught.value) and len(str(caught.value)) < 300


def test_parsing_time_is_linear():
    text = 'FROM a\nSYSTEM """' + "line\n" * 1_000_000 + '"""'
    assert len(parse_modelfile(text)[1].value) == 5_000_000


WRITABLE = st.text(alphabet=st.sampled_from('a" \n\x0b\u2028#é'), max_size=12).filter(
    lambda text: '"""' not in text
)


@given(system=WRITABLE, said=WRITABLE, stop=WRITABLE)
def test_a_rendered_modelfile_parses_to_the_same(system, said, stop):
    parameters: list[tuple[str, object]] = [("top_k", 3), *([("stop", stop)] if stop else [])]
    text = render_modelfile(
        "base:7b",
        adapters=["one.gguf", "@sha256-0"],
        system=system,
        parameters=parameters,
        messages=[Message("user", said)],
    )
    found = [(c.name, c.key, c.value) for c in parse_modelfile(text)]
    expected = [("from", None, "base:7b")]
    expected += [("adapter", None, "one.gguf"), ("adapter", None, "@sha256-0")]
    expected += [("system", None, system)] if system else []
    expected += [("parameter", name, str(value)) for name, value in parameters]
    expected += [("message", "user", said)]
    assert found == expected
