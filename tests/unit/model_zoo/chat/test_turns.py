"""Conversations of agents reach templates that refuse some of their turns, or drop them."""

from collections.abc import Sequence

import pytest

from model_zoo.chat.formats.generic import generic_messages
from model_zoo.chat.messages import ChatTemplate, ImagePart, Message, ToolCall
from model_zoo.chat.turns import TurnRules
from tests.chat_templates import TOOLS, every_template, template_source

TURNS = (
    "{% for m in messages %}CHECK<{{ m.role }}>{{ m.thinking }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}"
)


def refusing(condition: str) -> str:
    return TURNS.replace(
        "CHECK", f"{{% if {condition} %}}{{{{ raise_exception('no') }}}}{{% endif %}}"
    )


def refusing_all(*conditions: str) -> str:
    return refusing(" or ".join(f"({condition})" for condition in conditions))


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
IN_A_ROW = "loop.previtem is defined and m.role == loop.previtem.role"


def system(text: str) -> Message:
    return Message("system", text)


def user(text: str) -> Message:
    return Message("user", text)


def said(text: str) -> Message:
    return Message("assistant", text)


TALK = [
    system("S1"), Message("developer", "S2"), user("U1"), system("S3"), said("A1"), said("A2"),
    system("S4"), user("U2"),
]  # fmt: skip
ONE_SYSTEM = [
    system("S1\n\nS2"), user("U1"), user("S3"), said("A1"), said("A2"), user("S4"), user("U2"),
]  # fmt: skip
ALTERNATING = [system("S1\n\nS2"), user("U1\n\nS3"), said("A1\n\nA2"), user("S4\n\nU2")]
NO_SYSTEM = [user("S1\n\nS2\n\nU1\n\nS3"), said("A1\n\nA2"), user("S4\n\nU2")]


def adapted(source: str, messages: Sequence[Message]) -> list[Message]:
    return list(ChatTemplate(source).turns.adapted(messages))


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
RESULTS = [Message("tool", "2", tool_call_id="b"), Message("tool", "1", tool_call_id="call_1")]


def calling(*calls: ToolCall, text: str = "", thinking: str | None = None) -> Message:
    return Message("assistant", text, thinking=thinking, tool_calls=calls)


def test_the_users_words_after_a_result_are_part_of_it_where_they_must_be() -> None:
    source = refusing("m.role == 'user' and loop.previtem is defined and "
                      "loop.previtem.role == 'tool'")  # fmt: skip
    talk = [user("U"), calling(TWO), RESULTS[0], user("V"), said("A")]
    joined = Message("tool", "2\n\nV", tool_call_id="b")
    assert adapted(source, talk) == [user("U"), calling(TWO), joined, said("A")]


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


STRICT_IDS = refusing(
    "(m.tool_calls and m.tool_calls | map(attribute='id') | map('default', '') | map('length')"
    " | reject('eq', 9) | list) or (m.role == 'tool' and m.tool_call_id | length != 9)"
)


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
    template = ChatTemplate(template_source(name), bos_token="<s>", eos_token="</s>")
    messages: Sequence[Message] = AGENT
    if not template.supports_tools:
        messages = generic_messages(messages, TOOLS)
    text = template.render(
        template.turns.adapted(messages), tools=TOOLS if template.supports_tools else None
    )
    assert [f"Word{n:02}" for n in range(14) if f"Word{n:02}" not in text] == []


def test_a_template_that_renders_no_conversation_gets_it_unchanged() -> None:
    assert ChatTemplate("{{ messages[0].content }}").turns == TurnRules()
    assert ChatTemplate("{{ raise_exception('no') }}").turns == TurnRules()
