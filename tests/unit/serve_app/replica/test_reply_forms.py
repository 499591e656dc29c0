"""Forms of replies on the demo model and a real engine, and what is refused."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from model_zoo.chat.formats.call_forms import call_form
from model_zoo.chat.formats.reply_format import format_of
from model_zoo.chat.messages import Message
from model_zoo.chat_model import Prompt
from model_zoo.grammars.constraint import CallRule, OutputForm, OutputKind
from model_zoo.registry import load
from runtime.engine.assembly import EngineOptions, assemble
from runtime.engine.request import FinishReason, ResumeState, SamplingParams
from runtime.errors import RequestError
from serve_app.gateway.tasks import ChatDelta, ChatTask, Conversation, RawText, merge
from serve_app.replica.replica import ModelReplica, model_card
from serve_app.replica.reply_forms import ReplyForms
from tests.byte_tokenizer import ByteTokenizer
from tests.checkout import DEMO_MODEL
from tests.patience import HANG_S

SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "n": {"type": "integer", "maximum": 99}},
    "required": ["color", "n"],
    "additionalProperties": False,
}
ADD = {
    "type": "function",
    "function": {"name": "add", "description": "", "parameters": {"properties": {"a": SCHEMA}}},
}


def form(kind: OutputKind, source: Any) -> OutputForm:
    text = source if isinstance(source, str) else json.dumps(source)
    return OutputForm(kind, text, "format")


def asked(output: OutputForm | None, *, tools=(), **more) -> ChatTask:
    prompt = Conversation((Message("user", "What is 3 plus 4?"),), tools=tools)
    sampling = SamplingParams(temperature=1.2, seed=5)
    return ChatTask("t", "demo", prompt, sampling, max_tokens=100, output=output, **more)


JSON_TASK = asked(form(OutputKind.JSON_SCHEMA, SCHEMA))


@pytest.fixture(scope="module")
def replica() -> Iterator[ModelReplica]:
    cpu = torch.device("cpu")
    model = load(Path(DEMO_MODEL), device=cpu, dtype=torch.float32)
    options = EngineOptions(context_tokens=512, max_sequences=4, depth=2)
    engine, memory = assemble(
        model.decoder, model.tokenizer.token_bytes, device=cpu, options=options
    )
    engine.start()
    card = model_card(
        model,
        name="demo",
        context_tokens=512,
        device="cpu",
        reserved_bytes=memory.reserved_bytes,
    )
    replica = ModelReplica(model, engine, card)
    yield replica
    replica.close()


async def deltas(replica: ModelReplica, task: ChatTask) -> list[ChatDelta]:
    async with asyncio.timeout(HANG_S):
        return [delta async for delta in replica.generate(task)]


async def reply(replica: ModelReplica, task: ChatTask) -> ChatDelta:
    return merge(await deltas(replica, task))


@pytest.mark.parametrize(
    ("kind", "source", "expected"),
    [
        (OutputKind.REGEX, "[0-9]{3}-[a-c]", r"[0-9]{3}-[a-c]"),
        (OutputKind.REGEX, "a/b", "a/b"),
        (OutputKind.LARK, 'start: "x" WORD\nWORD: /[ab]{2}/', "x[ab]{2}"),
        (OutputKind.GBNF, 'root ::= "x" word\nword ::= [ab]', "x[ab]"),
    ],
)
async def test_a_reply_has_the_form(replica, kind, source, expected) -> None:
    done = await reply(replica, asked(form(kind, source)))
    assert done.finish is FinishReason.STOP
    jsonschema.validate(done.text, {"type": "string", "pattern": f"^({expected})$"})


async def test_replies_beside_each_other_are_those_of_single_requests(replica) -> None:
    free = asked(None)
    raw = replace(JSON_TASK, prompt=RawText("A color:"), sampling=SamplingParams(logprobs=2))
    penalised = replace(JSON_TASK, sampling=SamplingParams(repeat_penalty=1.5, top_k=0, seed=8))
    tasks = [free, JSON_TASK, raw, penalised]
    alone = [await reply(replica, task) for task in tasks]
    together = await asyncio.gather(*(reply(replica, task) for task in tasks))
    for one, other in zip(alone, together, strict=True):
        assert (one.text, one.tokens) == (other.text, other.tokens)
    for done in alone[1:]:
        jsonschema.validate(json.loads(done.text), SCHEMA)
        assert done.finish is FinishReason.STOP
    assert "".join(entry.drawn.raw.decode() for entry in alone[2].logprobs) == alone[2].text


async def test_a_reply_continued_on_another_replica_is_the_same(replica) -> None:
    whole = await reply(replica, JSON_TASK)
    for count in (1, len(whole.tokens) // 2, len(whole.tokens) - 1):
        begun = replace(JSON_TASK, begun=ResumeState(whole.tokens[:count]))
        rest = await reply(replica, begun)
        assert rest.text == whole.text
        assert rest.tokens == whole.tokens[count:]


async def test_stop_strings_and_max_tokens_end_a_form_early(replica) -> None:
    stopped = await reply(replica, replace(JSON_TASK, stop=('"n"',)))
    assert stopped.finish is FinishReason.STOP and '"color"' in stopped.text
    assert '"n"' not in stopped.text
    cut = await reply(replica, replace(JSON_TASK, max_tokens=3))
    assert cut.finish is FinishReason.LENGTH and len(cut.tokens) == 3


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        (
            OutputKind.JSON_SCHEMA,
            {"properties": {"a": {"items": {"uniqueItems": True}}}},
            'field "format" cannot be compiled at "/properties/a/items": .*uniqueItems',
        ),
        (
            OutputKind.JSON_SCHEMA,
            {"$ref": "#/nowhere"},
            'field "format" cannot be compiled: .*nowhere',
        ),
        (OutputKind.REGEX, "(a", 'field "format" cannot be compiled: .*unclosed group'),
        (OutputKind.REGEX, "a(?=b)", "look-around"),
        (OutputKind.LARK, "start: nothing", "unknown name"),
        (OutputKind.GBNF, "root ::= nothing", "'nothing' not found"),
        (OutputKind.GBNF, "root ::= (", 'field "format" cannot be compiled'),
        (OutputKind.GBNF, f"root ::= {'(' * 60_000}", 'field "format" cannot be compiled'),
    ],
)
async def test_what_cannot_be_compiled_is_refused(replica, kind, source, message) -> None:
    with pytest.raises(RequestError, match=message):
        await reply(replica, asked(form(kind, source)))


async def test_strict_calls_are_checked_before_they_are_compiled(replica) -> None:
    bad = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}
    rule = CallRule(("f",), ("f",), required=True, parallel=False, field="tool_choice")
    with pytest.raises(RequestError, match=r'field "tools\[1\]" cannot be compiled: .*not'):
        await reply(replica, asked(None, tools=(ADD, bad), calls=rule))


def pretend_prompt(template: str) -> Prompt:
    return Prompt((1,), reply_format=format_of(template))


def forms_of(tokenizer: ByteTokenizer, **more) -> ReplyForms:
    return ReplyForms(tokenizer, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("template", ["tools <|tool_call>", "tools <tool_call> <function="])
async def test_families_whose_calls_have_no_grammar_are_refused_by_name(template: str) -> None:
    forms, prompt = forms_of(ByteTokenizer()), pretend_prompt(template)
    rule = CallRule(("add",), ("add",), required=True, parallel=True, field="tool_choice")
    message = f'field "tool_choice".*format "{format_of(template).name}"'
    task = asked(None, tools=(ADD,), calls=rule)
    assert call_form(format_of(template).name, template) is None
    with pytest.raises(RequestError, match=message):
        await forms.grammar(task, prompt)
    with pytest.raises(RequestError, match=r'field "format".*with tools'):
        await forms.grammar(replace(JSON_TASK, prompt=task.prompt), prompt)


async def test_replies_of_messages_without_a_grammar_are_refused_by_name() -> None:
    prompt = pretend_prompt(">>>all >>>${recipient}")
    with pytest.raises(RequestError, match=r'field "format": .*the format "functionary"'):
        await forms_of(ByteTokenizer()).grammar(JSON_TASK, prompt)


async def test_a_form_that_takes_too_long_to_compile_is_refused() -> None:
    forms = forms_of(ByteTokenizer(), limit_s=0)
    with pytest.raises(RequestError, match='field "format": the form takes longer than 0 s'):
        await forms.grammar(JSON_TASK, pretend_prompt(""))
    forms.close()


async def test_a_model_without_an_end_token_is_refused() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.end_tokens = frozenset()
    with pytest.raises(RequestError, match="no end token"):
        await forms_of(tokenizer).grammar(JSON_TASK, pretend_prompt(""))
