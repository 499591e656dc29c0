"""A model's own system text and messages, and when they are said."""

from model_zoo.chat.messages import Message
from serve_app.gateway.tasks import Conversation, RawText, TokenIds
from serve_app.replica.prompt_defaults import PromptDefaults

OWN = Message("system", "Be brief.")
EXAMPLE = (Message("user", "2+2?"), Message("assistant", "4"))
ASKED = Message("user", "hi")


def opened(opening: PromptDefaults, *messages: Message, **further) -> tuple[Message, ...]:
    prompt = opening.apply(Conversation(messages, **further))
    assert isinstance(prompt, Conversation)
    return prompt.messages


def test_a_system_text_goes_before_conversations_without_one() -> None:
    opening = PromptDefaults("Be brief.", EXAMPLE)
    assert opened(opening, ASKED) == (OWN, *EXAMPLE, ASKED)


def test_a_conversations_own_instructions_go_first_and_replace_the_models() -> None:
    opening = PromptDefaults("Be brief.", EXAMPLE)
    for role in ("system", "developer"):
        given = Message(role, "Be long.")
        assert opened(opening, given, ASKED) == (given, *EXAMPLE, ASKED)


def test_a_saved_session_begins_with_its_system_text_once() -> None:
    """`/save` after `/set system` sends the text twice, and some templates take only one."""
    saved = PromptDefaults("Be brief.", (OWN, *EXAMPLE))
    assert opened(saved, ASKED) == (OWN, *EXAMPLE, ASKED)
    given = Message("system", "Be long.")
    assert opened(saved, given, ASKED) == (given, *EXAMPLE, ASKED)


def test_a_system_text_and_another_among_the_messages_are_both_said() -> None:
    opening = PromptDefaults("Be brief.", (Message("system", "Be kind."), *EXAMPLE))
    both = Message("system", "Be brief.\n\nBe kind.")
    assert opened(opening, ASKED) == (both, *EXAMPLE, ASKED)
    assert opened(PromptDefaults(None, opening.messages), ASKED) == (*opening.messages, ASKED)


def test_what_goes_on_after_an_earlier_answer_has_the_messages_already() -> None:
    assert opened(PromptDefaults("Be brief.", EXAMPLE), ASKED, after=(1, 2)) == (OWN, ASKED)


def test_everything_else_of_a_conversation_stays() -> None:
    prompt = Conversation((ASKED,), thinking=False, after=(1, 2))
    opening = PromptDefaults("Be brief.").apply(prompt)
    assert isinstance(opening, Conversation)
    assert (opening.thinking, opening.after) == (False, (1, 2))


def test_prompts_that_no_template_touches_stay_as_they_are() -> None:
    for prompt in (RawText("x"), TokenIds((1, 2))):
        assert PromptDefaults("Be brief.", EXAMPLE).apply(prompt) is prompt


def test_without_an_opening_a_conversation_stays_as_it_is() -> None:
    assert opened(PromptDefaults(), ASKED) == (ASKED,)
