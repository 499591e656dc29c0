"""Conversations of agents reach templates that refuse some of their turns, or drop them."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from model_zoo.chat.chat_template import ChatTemplate
from model_zoo.chat.messages import ImagePart, Message, ToolCall
from model_zoo.chat.template import Template
from model_zoo.chat.turn_rules import TurnRules
from tests.chat_templates import TOOLS, every_template
from tests.turn_templates import (
    IN_A_ROW,
    TURNS,
    Published,
    adapted,
    calling,
    refusing,
    refusing_all,
    said,
    system,
    user,
)

# Of published templates: Qwen 3.5, gpt-oss, DeepSeek R1, Gemma 2.
FIRST_ONLY = "m.role == 'system' and not loop.first"
DROPPED = TURNS.replace("CHECK", "{% if " + FIRST_ONLY + " %}{% continue %}{% endif %}")
LAST_ONLY = (
    "{% set given = namespace(text='') %}"
    "{% for m in messages %}{% if m.role == 'system' %}{% set given.text = m.content %}{% endif %}"
    "{% endfor %}{{ given.text }}{% for m in messages %}{% if m.role != 'system' %}"
    "<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
NEVER = "m.role == 'system'"


TALK = [
    system("S1"), system("S2"), user("U1"), system("S3"), said("A1"), said("A2"),
    system("S4"), user("U2"),
]  # fmt: skip
ONE_SYSTEM = [
    system("S1\n\nS2"), user("U1"), user("S3"), said("A1"), said("A2"), user("S4"), user("U2"),
]  # fmt: skip
ALTERNATING = [system("S1\n\nS2"), user("U1\n\nS3"), said("A1\n\nA2"), user("S4\n\nU2")]
NO_SYSTEM = [user("S1\n\nS2\n\nU1\n\nS3"), said("A1\n\nA2"), user("S4\n\nU2")]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (TURNS.replace("CHECK", ""), TALK),
        (refusing(FIRST_ONLY), ONE_SYSTEM),
        (DROPPED, ONE_SYSTEM),
        (LAST_ONLY, ONE_SYSTEM),
        (refusing_all(FIRST_ONLY, IN_A_ROW), ALTERNATING),
        (refusing_all(NEVER, IN_A_ROW), NO_SYSTEM),
    ],
    ids=["all", "first", "dropped", "last", "alternating", "never"],
)
def test_system_messages_and_roles_in_a_row_take_the_form_that_the_template_renders(
    source: str, expected: list[Message]
) -> None:
    assert adapted(source, TALK) == expected


def test_other_conversations_of_strict_templates_stay_as_they_are() -> None:
    talk = [system("S"), user("U"), said("A"), user("V")]
    assert adapted(refusing_all(FIRST_ONLY, IN_A_ROW), talk) == talk
    assert adapted(refusing_all(FIRST_ONLY, IN_A_ROW), []) == []


def test_images_stay_at_their_places_in_joined_turns() -> None:
    image, other = ImagePart(b"1"), ImagePart(b"2")
    talk = [Message("user", ("See", image)), Message("user", (other, "Or")), user("What?")]
    content = ("See", image, other, "Or\n\nWhat?")
    assert adapted(refusing(IN_A_ROW), talk) == [Message("user", content)]


ONE, TWO = ToolCall("probe", {"city": "Rome"}, "call_1"), ToolCall("probe", {"city": "Bern"}, "b")
RESULTS = [
    Message("tool", text, tool_name="probe", tool_call_id=id)
    for text, id in (("2", "b"), ("1", "call_1"))
]


AFTER_RESULT = "m.role == 'user' and loop.previtem is defined and loop.previtem.role == 'tool'"
ANSWERED = [user("U"), calling(TWO), RESULTS[0]]


@pytest.mark.parametrize(
    ("refused", "shortest"),
    [("", ""), (" or not m.content and not m.tool_calls", " "), (" or m.content == ' '", "")],
)
def test_a_short_answer_separates_the_users_words_from_a_result_where_one_must(
    refused: str, shortest: str
) -> None:
    talk = [*ANSWERED, user("V"), said("A")]
    separated = [*ANSWERED, said(shortest), user("V"), said("A")]
    assert adapted(refusing(AFTER_RESULT + refused), talk) == separated


def test_the_users_words_after_a_result_have_a_label_where_they_must_be_part_of_it() -> None:
    source = refusing(
        "m.role == 'user' and 'tool' in messages[: loop.index0] | map(attribute='role')"
    )
    joined = replace(RESULTS[0], content="2\n\n[The result ends here. Message of the user:]\n\nV")
    assert adapted(source, [*ANSWERED, user("V")]) == [*ANSWERED[:-1], joined]


# Of Mistral: calls and results do not count.
ALTERNATES = """{% set ns = namespace(at=0) %}{% for m in messages %}
{% if m.role != 'tool' and m.role != 'system' and not m.tool_calls %}
{% if (m.role == 'user') != (ns.at % 2 == 0) %}{{ raise_exception('no') }}{% endif %}
{% set ns.at = ns.at + 1 %}{% endif %}{% endfor %}"""
DROPS_WORDS = TURNS.replace("CHECK", "").replace(
    "{{ m.content }}", "{{ '' if m.tool_calls else m.content }}"
)


@pytest.mark.parametrize("source", [ALTERNATES + TURNS.replace("CHECK", ""),
                                    ALTERNATES + DROPS_WORDS])  # fmt: skip
def test_calls_do_not_count_where_the_template_does_not_count_them(source: str) -> None:
    whole = [user("U"), said("W"), *ANSWERED[1:], user("V"), said("A"), user("X")]
    assert adapted(source, whole) == whole
    assert adapted(source, [user("U"), said("W"), *ANSWERED[1:], said("A")]) == [
        user("U"), said("W"), *ANSWERED[1:], user(""), said("A")
    ]  # fmt: skip
    assert adapted(source, [*ANSWERED, *ANSWERED, user("V")]) == [
        *ANSWERED, said(""), *ANSWERED, said(""), user("V")
    ]  # fmt: skip


def test_words_before_calls_are_joined_with_them_only_where_they_must_and_may_be() -> None:
    talk = [user("U"), said("W"), *ANSWERED[1:]]
    assert adapted(refusing(IN_A_ROW), talk) == [user("U"), calling(TWO, text="W"), RESULTS[0]]
    dropping = DROPS_WORDS.replace(
        "{{ m.thinking }}", "{% if " + IN_A_ROW + " %}{{ raise_exception('') }}{% endif %}"
    )
    assert adapted(dropping, talk) == talk


def test_users_in_a_row_and_answers_in_a_row_are_joined_independently() -> None:
    talk = [user("U"), user("V"), said("A"), said("B")]
    for role, expected in (
        ("user", [user("U\n\nV"), said("A"), said("B")]),
        ("assistant", [user("U"), user("V"), said("A\n\nB")]),
    ):
        assert adapted(refusing(f"{IN_A_ROW} and m.role == '{role}'"), talk) == expected


def test_joined_turns_of_different_participants_begin_with_their_names() -> None:
    ann, bob = Message("user", "1", name="Ann"), Message("user", "2", name="Bob")
    for talk, text in (
        ([ann, bob], "Ann:\n\n1\n\nBob:\n\n2"),
        ([bob, user("U")], "Bob:\n\n2\n\nU"),
    ):
        assert adapted(refusing(IN_A_ROW), talk) == [user(text)]
    same = adapted(refusing(IN_A_ROW), [ann, replace(ann, content="3")])
    assert same == [Message("user", "1\n\n3", name="Ann")]


def test_a_short_turn_of_the_user_comes_before_an_answer_that_may_not_be_first() -> None:
    source = refusing("loop.first and m.role == 'assistant'")
    assert adapted(source, [said("A"), user("U")]) == [user(""), said("A"), user("U")]


def test_a_system_message_alone_becomes_the_users_where_it_must() -> None:
    source = refusing("messages | map(attribute='role') | unique | list == ['system']")
    assert adapted(source, [system("S")]) == [user("S")]
    assert adapted(source, [system("S"), user("U")]) == [system("S"), user("U")]


COLLECTED = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)


def test_system_messages_that_the_template_collects_at_the_beginning_keep_their_place() -> None:
    talk = [system("S"), system("T"), user("U"), system("V"), said("A")]
    kept = [*talk[:3], user("V"), said("A")]
    assert adapted(COLLECTED, talk) == kept


def test_a_system_message_after_a_result_keeps_the_thinking_before_it() -> None:
    """Of Qwen 3.5 and MiniMax M2."""
    source = "{% set at = messages | map(attribute='role') | list %}" + refusing(
        FIRST_ONLY
    ).replace("{{ m.thinking }}", "{{ m.thinking if 'user' not in at[loop.index:] }}")
    talk = [system("S"), user("U"), calling(TWO, thinking="T"), RESULTS[0], system("R")]
    reminded = "2\n\n[The result ends here. Message of the system:]\n\nR"
    assert adapted(source, talk) == [*talk[:3], replace(RESULTS[0], content=reminded)]
    assert adapted(source, [*talk[:2], said("A"), system("R")])[-1] == user("R")
    assert adapted(refusing(FIRST_ONLY), talk)[-1] == user("R")


@pytest.mark.parametrize("dropped", [False, True])
def test_parallel_calls_follow_one_another_where_they_must(dropped: bool) -> None:
    source = refusing("m.tool_calls and m.tool_calls | length > 1")
    if dropped:
        source = TURNS.replace("CHECK", "").replace(
            "m.tool_calls or []", "(m.tool_calls or [])[:1]"
        )
    lost = Message("tool", "3", tool_call_id="c")
    talk = [user("U"), calling(ONE, TWO, text="W", thinking="T"), *RESULTS, lost, said("A")]
    assert adapted(source, talk) == [
        user("U"), calling(ONE, text="W", thinking="T"), RESULTS[1], calling(TWO), RESULTS[0],
        lost, said("A"),
    ]  # fmt: skip


def test_each_of_parallel_calls_with_equal_ids_has_one_result() -> None:
    source = refusing("m.tool_calls and m.tool_calls | length > 1")
    calls = [ToolCall("probe", {"city": city}, "probe") for city in ("Rome", "Bern")]
    results = [Message("tool", text, tool_name="probe", tool_call_id="probe") for text in "12"]
    assert adapted(source, [user("U"), calling(*calls), *results]) == [
        user("U"), calling(calls[0]), results[0], calling(calls[1]), results[1]
    ]  # fmt: skip


def test_words_beside_thinking_and_calls_end_the_thinking_where_both_are_refused() -> None:
    source = refusing("m.tool_calls and m.thinking and m.content")
    talk = [user("U"), calling(TWO, text="W", thinking="T"), RESULTS[0], said("A")]
    assert adapted(source, talk)[1] == calling(TWO, thinking="T\n\nW")
    plain = [user("U"), calling(TWO, text="W"), RESULTS[0], calling(TWO, thinking="T")]
    assert adapted(source, plain) == plain


# The turns of Claude Code and Codex.
AGENT = [
    system("Word00"), system("Word01"), user("Word02"), system("Word03"),
    calling(
        ToolCall("weather", {"city": "Word04"}, "call_0123456789"),
        ToolCall("weather", {"city": "Word05"}),
        text="Spoken", thinking="Thought",
    ),
    Message("tool", "Word06", tool_name="weather", tool_call_id="call_0123456789"),
    Message("tool", "Word07", tool_name="weather"),
    user("Word08"), user("Word09"), said("Word10"), said("Word11"), system("Word12"),
    user("Word13"),
]  # fmt: skip


@pytest.mark.parametrize("name", every_template())
def test_published_templates_render_the_conversations_of_agents(name: str) -> None:
    published = Published(name)
    text = published.adapted(published.readable(AGENT))
    assert [f"Word{n:02}" for n in range(14) if f"Word{n:02}" not in text] == []


# Conversations in which a template that renders a prefix may render the next turn after it.
WORK = [
    user("Word00"),
    calling(ToolCall("weather", {"city": "Word01"}, "call00001"), text="Spoken", thinking="Hm."),
    Message("tool", "Word02", tool_name="weather", tool_call_id="call00001"),
    calling(ToolCall("weather", {"city": "Word03"}, "call00002")),
    Message("tool", "Word04", tool_name="weather", tool_call_id="call00002"),
]
WORK_ON = [
    calling(ToolCall("weather", {"city": "Word07"}, "call00003")),
    Message("tool", "Word08", tool_name="weather", tool_call_id="call00003"),
]
SOME = [
    [system("Word05"), *WORK],
    [system("Word05"), system("Word06"), *WORK, said("Word07"), user("Word08")],
    [*WORK, said("Word05"), user("Word06"), said("Word07")],
    [*WORK, user("Word05")],
    [*WORK, user("Word05"), user("Word06"), said("Word07"), said("Word08"), user("Word09")],
    [WORK[0], said("Word05"), *WORK[1:3], user("Word06")],
    [WORK[0], said("Word05"), *WORK[1:3], said("Word06"), user("Word07")],
    [said("Word05"), *WORK],
    [system("Word05"), said("Word06"), user("Word07")],
    [system("Word05"), system("Word06"), *WORK, said("Word07")],
    [system("Word05"), user("Word06"), system("Word07"), *WORK[1:], said("Word08")],
    [system("Word05"), *WORK, system("Word06"), *WORK_ON, system("Word09")],
    [WORK[0], calling(*WORK[1].tool_calls, *WORK[3].tool_calls), WORK[2], WORK[4], user("Word05")],
]


def words_of(messages: Sequence[Message]) -> list[str]:
    return [
        word
        for message in messages
        for word in (message.text, *(str(call.arguments["city"]) for call in message.tool_calls))
        if word.startswith("Word")
    ]


def whole(text: str, messages: Sequence[Message]) -> bool:
    places = [text.find(word) for word in words_of(messages)]
    return bool(text) and -1 not in places and places == sorted(places)


@pytest.mark.parametrize("name", every_template())
def test_conversations_that_a_published_template_renders_whole_keep_their_render(
    name: str,
) -> None:
    published = Published(name)
    for talk in SOME:
        messages = published.readable(talk)
        plain = published.render(messages)
        if whole(plain, talk):
            assert published.adapted(messages) == plain


@pytest.mark.parametrize("name", every_template())
def test_published_templates_render_the_texts_of_agents(name: str) -> None:
    published = Published(name)
    for talk in SOME:
        text = published.adapted(published.readable(talk))
        assert [word for word in words_of(talk) if word not in text] == []


@pytest.mark.parametrize("name", every_template())
def test_conversations_that_grow_keep_their_prefix_in_published_templates(name: str) -> None:
    published = Published(name)
    for talk in SOME:
        messages = published.readable(talk)
        plain, adapted = published.render(messages), published.adapted(messages)
        for end in range(1, len(messages)) if whole(plain, talk) else ():
            before = published.render(messages[:end])
            if before and plain.startswith(before):
                assert adapted.startswith(published.adapted(messages[:end]))


def broken(render: Callable[[Sequence[Message]], str], talk: Sequence[Message]) -> list[str]:
    """The messages that change what is before them, up to its last text: a template may end a
    prompt in another way."""
    found = []
    for end in range(2, len(talk)):
        text, (*_, last) = render(talk[:end]), words_of(talk[:end])
        begin = text.partition(last)[0]
        if last not in text or not render(talk[: end + 1]).startswith(begin + last):
            found.append(talk[end].text)
    return found


@pytest.mark.parametrize("name", every_template())
def test_system_messages_in_the_loop_of_an_agent_keep_the_prefix(name: str) -> None:
    """As the conversation without them does."""
    published = Published(name)
    talk = [system("Word05"), *WORK, system("Word06"), *WORK_ON, system("Word09")]
    if published.tools and not broken(published.render, [*WORK, *WORK_ON]):
        assert broken(published.adapted, talk) == []


@pytest.mark.parametrize("name", every_template())
def test_published_templates_render_a_system_message_alone(name: str) -> None:
    published = Published(name)
    published.tools = None
    if not published.render([user("Word")]):  # the template needs tools
        published.tools = TOOLS
    assert "Word" in published.adapted([system("Word")])


def test_a_template_that_renders_no_conversation_gets_it_unchanged() -> None:
    assert ChatTemplate("{{ messages[0].content }}").turns == TurnRules()
    assert ChatTemplate("{{ raise_exception('no') }}").turns == TurnRules()


def test_a_template_that_always_needs_tools_is_probed_with_one() -> None:
    source = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}" + refusing(FIRST_ONLY)
    assert adapted(source, TALK) == ONE_SYSTEM


def test_probes_do_not_depend_on_the_load_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    hours = itertools.count(step=3600.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(hours))
    assert adapted(refusing(FIRST_ONLY), TALK) == ONE_SYSTEM


def test_probes_of_a_slow_template_end_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    renderings: list[dict[str, Any]] = []
    render = Template.render

    def counted(template: Template, variables: dict[str, Any], **more: Any) -> str:
        renderings.append(variables)
        return render(template, variables, **more)

    monkeypatch.setattr(Template, "render", counted)
    slow = "{% for m in range(99999) %}{% for n in range(99999) %}{% endfor %}{% endfor %}"
    assert ChatTemplate(slow + refusing(FIRST_ONLY)).turns == TurnRules()
    assert len(renderings) == 1


@pytest.mark.parametrize("texts", [("", "Word"), ("Word", "")])
def test_a_turn_without_text_is_joined_without_a_blank_line(texts: tuple[str, str]) -> None:
    turns = [Message("user", text) for text in texts]
    assert TurnRules(repeated_users=False).adapted(turns) == [Message("user", "Word")]


def test_an_image_after_a_result_stays_in_a_turn_of_the_user() -> None:
    """Of Claude Code: a tool's result, and a pasted image."""
    published = Published("Mistral-Small-3.2-24B-Instruct-2506")
    talk = [*WORK, Message("user", (ImagePart(), "Word05"))]
    text = published.adapted(talk)
    assert text.endswith("[INST][IMG]Word05[/INST]")
