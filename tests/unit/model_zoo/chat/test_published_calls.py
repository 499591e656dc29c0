"""The calls that published templates render are allowed by the grammars of their families."""

import pytest

from model_zoo.chat.chat_template import ChatTemplate
from model_zoo.chat.formats.allowed_calls import AllowedCalls
from model_zoo.chat.formats.call_forms import call_form
from model_zoo.chat.formats.reply_format import ReplyFormat, format_of
from model_zoo.chat.formats.reply_grammar import reply_grammar
from model_zoo.grammars.token_grammar import TokenGrammar, TokenGrammars
from tests.byte_tokenizer import TOKEN, ByteTokenizer
from tests.chat_templates import every_template, template_source
from tests.reply_parsing import parsed, replied
from tests.unit.model_zoo.chat.test_published_templates import (
    DECLARED,
    WITHOUT_CALLS,
    rendered_replies,
)


def longest_reply(grammar: TokenGrammar, tokenizer: ByteTokenizer, text: str) -> str:
    """The longest beginning of `text` that the grammar allows as a reply."""
    matcher, reply = grammar.matcher(), ""
    tokens = tokenizer.encode(text, parse_special=True)
    for count, token in enumerate([*tokens, *tokenizer.end_tokens]):
        mask = bytearray(4 * grammar.words)
        matcher.allowed(memoryview(mask))
        (end,) = tokenizer.end_tokens
        if mask[end // 8] >> end % 8 & 1:
            reply = tokenizer.text(tokens[:count])
        if token == end or not mask[token // 8] >> token % 8 & 1:
            break
        matcher.accept(token)
    return reply


def grammar_of(form: ReplyFormat, source: str, tokenizer: ByteTokenizer, *, thinks: bool) -> str:
    return reply_grammar(
        tokenizer.vocabulary.control,
        form,
        may_think=True,
        thinks=thinks,
        answer=None,
        calls=AllowedCalls(DECLARED, required=True, parallel=True),
        form=call_form(form.name, source),
    )


@pytest.mark.parametrize("name", every_template())
def test_what_a_published_template_renders_of_a_call_is_allowed(name: str) -> None:
    source = template_source(name)
    form = format_of(source)
    harmony = form.name == "harmony"
    if name in WITHOUT_CALLS:
        pytest.skip(WITHOUT_CALLS[name])
    tokenizer = ByteTokenizer(
        *sorted({token for text in form.markup for token in TOKEN.findall(text)})
    )
    grammars = TokenGrammars(tokenizer)  # type: ignore[arg-type]
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    for calls, text, thinks in rendered_replies(template, form):
        grammar = grammars.compile(grammar_of(form, source, tokenizer, thinks=thinks))
        # White space that the template writes before the reply.
        rendered = text if thinks or form.of_messages else text.lstrip()
        allowed = longest_reply(grammar, tokenizer, rendered)
        reply = parsed(replied(form, [allowed], tools=DECLARED, thinks=thinks))
        expected = [(call.name, dict(call.arguments)) for call in calls if call.name in text]
        assert [call[:2] for call in reply.calls] == expected[: 1 if harmony else None]
