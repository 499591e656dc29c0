"""Converted Go templates render the same text as Go itself.

`expected.json` is the output of Go's `text/template` (Go 1.19): `go run render.go` in this folder
writes it from `cases.json`. "error" stands for a template that fails.
"""

import json
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from model_zoo.chat.chat_template import ChatTemplate
from model_zoo.chat.formats.reply_format import format_of
from model_zoo.chat.go_templates.converter import jinja_source
from runtime.errors import ModelFileError, RequestError

FOLDER = Path(__file__).parent
GIVEN = json.loads((FOLDER / "cases.json").read_text())
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
BY_ABOUT = {case["about"]: case for case in GIVEN["cases"]}
NOW = datetime(2026, 3, 1)


@lru_cache(maxsize=1)  # the cases of a template are beside each other
def converted(source: str) -> ChatTemplate:
    return ChatTemplate(jinja_source(source))


def rendered(source: str, talk: dict[str, Any]) -> str:
    template = converted(source)
    variables: dict[str, Any] = {"tools": talk.get("tools")}
    if "think" in talk:
        variables["enable_thinking"] = talk["think"]
    if "level" in talk:
        variables["reasoning_effort"] = talk["level"]
    if "suffix" in talk:
        variables |= {"prompt": talk["prompt"], "suffix": talk["suffix"]}
    try:
        return template.render_values(talk["messages"], variables, now=NOW)
    except RequestError:
        return "error"


def test_all_cases_have_been_rendered_by_go() -> None:
    assert BY_ABOUT.keys() == EXPECTED.keys()


@pytest.mark.parametrize("about", EXPECTED)
def test_the_text_is_that_of_go(about: str) -> None:
    case = BY_ABOUT[about]
    assert rendered(case["template"], GIVEN["talks"][case["talk"]]) == EXPECTED[about]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("a\n{{ .Weather }}", r"line 2: the field \.Weather"),
        ("{{ .Prompt }}\n\n{{ js .Prompt }}", "line 3: the function `js`"),
        ("{{ call .Prompt }}", "function `call`"),
        ("{{ if .Prompt }}x", "no {{ end }}"),
        ("{{ end }}", "unexpected {{ end }}"),
        ("{{ if .Prompt }}{{ else }}{{ else }}{{ end }}", "{{ end }} is expected"),
        ("{{ range .Messages }}{{ else if .Tools }}{{ end }}", "`else if` after `range`"),
        ("{{ $x }}", r"line 1: the variable \$x is not defined"),
        ("{{ $x = 1 }}", r"the variable \$x is not defined"),
        ("{{ range $a, $b, $c := .Messages }}{{ end }}", "sets 3 variables"),
        ('{{ template "x" . }}', "'x' is not defined"),
        ('{{ define "x" }}{{ end }}{{ define "x" }}{{ end }}', "defined twice"),
        ("{{ break }}", "`break` outside"),
        ("{{ }}", "empty"),
        ("{{ .Prompt | .System }}", "only functions take arguments"),
        ("{{ .Prompt .System }}", "only functions take arguments"),
        ("{{ ( .Prompt }}", "parenthesis is not closed"),
        ("{{ .Prompt ) }}", "unexpected '\\)'"),
        ("{{ .Prompt | }}", "a command is missing"),
        ("{{ ..Prompt }}", "unexpected '.Prompt'"),
        ('{{ "a', "cannot be read"),
        ("{{ .Prompt", "cannot be read"),
        ("{{/* a", "comment is not closed"),
        ('{{ "\\q" }}', "escape sequence"),
        ("{{ 'ab' }}", "2 characters"),
        ("{{ " + "1" * 31 + " }}", "too long"),
        ("{{ " + "(" * 99 + "1" + ")" * 99 + " }}", "parentheses are nested"),
        ("{{ if 1 }}" * 99 + "{{ end }}" * 99, "blocks are nested"),
        ("{{ $" + ".Function" * 9_999 + " }}", "fields are nested"),
        ("{{ not }}", "`not` with 0 arguments"),
        ("{{ range .Messages }}{{ .Images }}{{ end }}", r"\.Images"),
    ],
)
def test_what_is_not_supported_is_refused_by_line_and_name(source: str, reason: str) -> None:
    with pytest.raises(ModelFileError, match=reason):
        jinja_source(source)


def test_converted_templates_read_what_chat_templates_read() -> None:
    source = next(c["template"] for c in GIVEN["cases"] if c["about"].startswith("chatml with"))
    template = ChatTemplate(jinja_source(source))
    assert template.supports_tools and template.reads("tool_calls")
    assert not template.supports_images and not template.reads("suffix")
    replies = format_of(template.source)
    assert replies.name == "tag" and replies.tools and replies.thinks
    plain = ChatTemplate(jinja_source("{{ .Prompt }}"))
    assert not plain.supports_tools and not format_of(plain.source).thinks


@pytest.mark.parametrize(
    "source",
    [
        '{{ define "x" }}{{ template "x" . }}{{ end }}{{ template "x" . }}',
        '{{ printf "%999999999s" "a" }}',
        "{{ range $a := .Messages }}"
        + "{{ range $.Messages }}" * 8
        + "{{ end }}" * 8
        + "{{ end }}",
    ],
)
def test_a_costly_template_is_refused_while_it_renders(source: str) -> None:
    messages = [{"role": role, "content": "x"} for role in ("user", "assistant") * 9]
    with pytest.raises(RequestError):
        ChatTemplate(jinja_source(source)).render_values(messages, {})
