"""A model's own system text and messages, and when they are inserted."""

from model_zoo.chat.messages import Message
from serve_app.messages.tasks import Conversation, RawText, TokenIds
from serve_app.replica.prompt_defaults import PromptDefaults

OWN = Message("system", "Be brief.")
EXAMPLE = (Message("user", "2+2?"), Message("assistant", "4"))
ASKED = Message("user", "hi")


def opened(opening: PromptDefaults, *messages: Message, **further) -> tuple[Message, ...]:
    prompt = opening.apply(Conversation(messages, **further))
    assert isinstance(prompt, Conversation)
    return prompt.messages


def test_a_system_text_is_inserted_into_conversations_without_one() -> None:
    opening = PromptDefaults("Be brief.", EXAMPLE)
    assert opened(opening, ASKED) == (OWN, *EXAMPLE, ASKED)


def test_instructions_of_a_conversation_replace_those_of_the_model() -> None:
    opening = PromptDefaults("Be brief.", EXAMPLE)
    given = Message("system", "Be long.")
    assert opened(opening, given, ASKED) == (given, *EXAMPLE, ASKED)


def test_a_saved_session_begins_with_its_system_text_once() -> None:
    """`/save` after `/set system` sends the text twice, and some templates take only one."""
    saved = PromptDefaults("Be brief.", (OWN, *EXAMPLE))
    assert opened(saved, ASKED) == (OWN, *EXAMPLE, ASKED)
    given = Message("system", "Be long.")
    assert opened(saved, given, ASKED) == (given, *EXAMPLE, ASKED)


def test_a_system_text_and_one_among_the_messages_are_both_kept() -> None:
    opening = PromptDefaults("Be brief.", (Message("system", "Be kind."), *EXAMPLE))
    both = Message("system", "Be brief.\n\nBe kind.")
    assert opened(opening, ASKED) == (both, *EXAMPLE, ASKED)
    assert opened(PromptDefaults(None, opening.messages), ASKED) == (*opening.messages, ASKED)


def test_a_continued_conversation_already_has_the_messages() -> None:
    assert opened(PromptDefaults("Be brief.", EXAMPLE), ASKED, after=(1, 2)) == (OWN, ASKED)


def test_other_fields_of_a_conversation_are_unchanged() -> None:
    prompt = Conversation((ASKED,), thinking=False, after=(1, 2))
    opening = PromptDefaults("Be brief.").apply(prompt)
    assert isinstance(opening, Conversation)
    assert (opening.thinking, opening.after) == (False, (1, 2))


def test_prompts_without_a_template_are_unchanged() -> None:
    for prompt in (RawText("x"), TokenIds((1, 2))):
        assert PromptDefaults("Be brief.", EXAMPLE).apply(prompt) is prompt


def test_without_defaults_a_conversation_is_unchanged() -> None:
    assert opened(PromptDefaults(), ASKED) == (ASKED,)
