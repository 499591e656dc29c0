"""Results of tools reach the calls that they answer, in the form of ids that a template demands."""

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from model_zoo.chat.messages import ImagePart, Message, ToolCall
from tests.turn_templates import (
    IN_A_ROW,
    STRICT_IDS,
    TURNS,
    Published,
    adapted,
    calling,
    refusing,
    said,
    user,
)

ONE, TWO = ToolCall("probe", {"city": "Rome"}, "call_1"), ToolCall("probe", {"city": "Bern"}, "b")
RESULTS = [
    Message("tool", text, tool_name="probe", tool_call_id=id)
    for text, id in (("2", "b"), ("1", "call_1"))
]


def ids_of(messages: Sequence[Message]) -> list[str | None]:
    calls = [call.id for message in messages for call in message.tool_calls]
    return calls + [message.tool_call_id for message in messages if message.role == "tool"]


def test_ids_take_the_form_that_the_template_demands() -> None:
    first, second, *answered = ids_of(adapted(STRICT_IDS, [user("U"), calling(ONE, TWO), *RESULTS]))
    assert answered == [second, first]
    assert first is not None and len(first) == 9 and first.isalnum()
    kept = ToolCall("probe", {}, "abcdef123")
    assert ids_of(adapted(STRICT_IDS, [user("U"), calling(kept)])) == ["abcdef123"]


def test_calls_without_ids_get_some_which_their_results_share() -> None:
    """Ollama's clients send none."""
    calls = calling(ToolCall("time", {}), ToolCall("probe", {}))
    results = [Message("tool", "1", tool_name="probe"), Message("tool", "2")]
    talk = [user("U"), calls, *results]
    found = ids_of(adapted(STRICT_IDS, talk))
    assert found == ["call00100", "call00101", "call00101", "call00100"]
    assert found == ids_of(adapted(refusing("m.tool_calls and not m.tool_calls[0].id"), talk))


def test_ids_are_invented_only_where_they_are_needed() -> None:
    optional = STRICT_IDS.replace("m.tool_calls and", "m.tool_calls and m.tool_calls[0].id and")
    optional = optional.replace("m.role == 'tool' and", "m.role == 'tool' and m.tool_call_id and")
    result = Message("tool", "1", tool_name="probe")
    talk = [user("U"), calling(ToolCall("probe", {})), result]
    assert adapted(optional, talk) == talk
    assert adapted(refusing("m.tool_calls and m.tool_calls | length > 1"), talk) == talk


def test_an_empty_id_is_none() -> None:
    talk = [user("U"), calling(ToolCall("probe", {}, "")), Message("tool", "1", tool_call_id="")]
    assert ids_of(adapted(STRICT_IDS, talk)) == ["call00100", "call00100"]


PARALLEL = calling(ToolCall("turn_on", {"city": "hall"}), ToolCall("weather", {"city": "Rome"}))
LATER = [user("And now?"), calling(ToolCall("set_timer", {"city": "3"})), Message("tool", "SET")]
NAMED = ["turn_on", "weather", "set_timer"]


def named(messages: Sequence[Message]) -> list[str | None]:
    return [message.tool_name for message in messages if message.role == "tool"]


@pytest.mark.parametrize("names", [(None, None), ("turn_on", "weather")])
def test_results_without_ids_answer_the_calls_of_their_turn_in_order(
    names: Sequence[str | None],
) -> None:
    """`ollama` and Home Assistant send no ids, and no names either."""
    results = [Message("tool", text, tool_name=n) for text, n in zip("12", names, strict=True)]
    talk = [user("U"), PARALLEL, *results, said("A"), *LATER]
    for source in (TURNS.replace("CHECK", ""), STRICT_IDS, refusing(IN_A_ROW)):
        assert named(adapted(source, talk)) == NAMED
        assert named(adapted(source, talk[:5])) == NAMED[:2]


def test_a_result_has_the_name_of_the_call_with_its_id() -> None:
    one, two = ToolCall("time", {"city": "Rome"}, "1"), ToolCall("weather", {"city": "Rome"}, "2")
    results = [Message("tool", text, tool_call_id=text) for text in ("2", "1", "3")]
    late = [user("V"), Message("tool", "", tool_call_id="1")]
    again = [calling(replace(two, id="1")), results[1]]
    talk = [user("U"), calling(one, two), *results, *late, *again]
    found = adapted(TURNS.replace("CHECK", ""), talk)
    assert named(found) == ["weather", "time", None, "time", "weather"]
    assert ids_of(found)[3:] == ["2", "1", "3", "1", "1"]


def test_the_name_of_a_results_author_tells_which_call_it_answers() -> None:
    """Some of OpenAI's clients send it in place of an id."""
    result = Message("tool", "1", name="weather")
    assert named(adapted(STRICT_IDS, [user("U"), PARALLEL, result])) == ["weather"]


RESULTS_OF = {
    "meta-llama-Llama-3.1-8B-Instruct": r"hall.*12:30.*Rome.*Hot",
    "meta-llama-Llama-3.2-3B-Instruct": r"hall.*12:30.*Rome.*Hot",
    "openai-gpt-oss-120b": r"functions\.turn_on to=[^<]*<[^<]*<\|message\|>\"12:30.*"
    r"functions\.weather to=[^<]*<[^<]*<\|message\|>\"Hot",
    "google-gemma-4-31B-it": r"response:turn_on\{[^}]*12:30[^}]*\}.*response:weather\{[^}]*Hot",
    "Mistral-Small-3.2-24B-Instruct-2506": r"turn_on\[CALL_ID\](\w+).*weather\[CALL_ID\](\w+)"
    r".*\1\[TOOL_CONTENT\]12:30.*\2\[TOOL_CONTENT\]Hot",
    "mistralai-Mistral-Nemo-Instruct-2407": r"turn_on[^]]*\"id\": \"(\w+)\"[^]]*weather[^]]*"
    r"\"id\": \"(\w+)\".*12:30[^]]*\1.*Hot[^]]*\2",
}


@pytest.mark.parametrize("names", [(None, None), ("turn_on", "weather")])
@pytest.mark.parametrize("name", RESULTS_OF)
def test_published_templates_give_each_result_to_its_call(
    name: str, names: Sequence[str | None]
) -> None:
    published = Published(name)
    texts = zip(("12:30", "Hot"), names, strict=True)
    results = [Message("tool", text, tool_name=each) for text, each in texts]
    for later in ([], [said("A"), *LATER]):
        text = published.adapted([user("U"), PARALLEL, *results, *later])
        assert re.search(RESULTS_OF[name], text, re.DOTALL), text


IMAGE, OTHER = ImagePart(b"1"), ImagePart(b"2")
# Of templates that render images in turns of the user.
SHOWS = (
    "{% macro text(m) %}{% for p in m.content if m.content is not string %}"
    "{{ '<img>' if p.type == 'image' and (m.role == 'user' or RESULTS) else p.text }}{% endfor %}"
    "{{ m.content if m.content is string }}{% endmacro %}"
    + TURNS.replace("CHECK", "").replace("m.content", "text(m)")
)
DROPS, PICTURES = SHOWS.replace("RESULTS", "false"), SHOWS.replace("RESULTS", "true")
PRINTS = DROPS.replace("{{ text(m) }}", "{{ m.content if m.role == 'tool' else text(m) }}")


def seen(text: str, *images: ImagePart, name: str | None = "probe") -> Message:
    content = (text, *images) if text else images
    return Message("tool", content if images else text, tool_name=name)


@pytest.mark.parametrize("source", [DROPS, PRINTS, DROPS + "{{ messages[0].tool_call_id }}"])
def test_images_of_results_follow_them_where_the_template_does_not_show_them(source: str) -> None:
    calls = [user("U"), calling(ToolCall("probe", {}), ToolCall("look", {}))]
    results = [seen("1", IMAGE), seen("", OTHER, name="look")]
    shown = ("[Images in the result of probe:]", IMAGE, "[Images in the result of look:]", OTHER)
    expected = [
        *calls, seen("1"), seen("[The images follow.]", name="look"), Message("user", shown)
    ]  # fmt: skip
    for later in ([], [said("A"), user("V")]):
        found = adapted(source, [*calls, *results, *later])
        assert [(m.role, m.content) for m in found] == [
            (m.role, m.content) for m in (*expected, *later)
        ]


def test_images_of_results_stay_where_the_template_shows_them() -> None:
    talk = [user("U"), calling(ToolCall("probe", {})), seen("1", IMAGE), said("A")]
    assert adapted(PICTURES, talk) == talk
    assert adapted(TURNS.replace("CHECK", ""), talk) == talk  # gets images as text


@pytest.mark.parametrize(
    ("name", "marker"),
    [
        ("Mistral-Small-3.2-24B-Instruct-2506", "[IMG]"),
        ("google-gemma-4-31B-it", "<|image|>"),
    ],
)
def test_published_templates_show_the_images_of_results(name: str, marker: str) -> None:
    published = Published(name)
    calls = calling(ToolCall("weather", {"city": "Rome"}), ToolCall("time", {"city": "Bern"}))
    results = [seen("Hot", IMAGE, name="weather"), seen("12:30", OTHER, name="time")]
    text = published.adapted([user("U"), calls, *results])
    assert text.count(marker) == 2 and "'image'" not in text
    assert text.index("12:30") < text.index(marker)
    assert published.adapted([user("U"), calls, *results, said("A"), user("V")]).count(marker) == 2
