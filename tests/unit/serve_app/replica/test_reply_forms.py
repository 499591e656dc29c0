"""Forms of replies on the demo model and a real engine, and what is refused."""

import asyncio
import contextlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import torch

from model_zoo.chat.formats.call_forms import call_form
from model_zoo.chat.formats.reply_format import format_of
from model_zoo.chat.messages import Message, ReplyStart
from model_zoo.chat_model import ChatModel, Prompt
from model_zoo.grammars.constraint import CallRule, OutputForm, OutputKind
from model_zoo.registry import load
from runtime.engine.assembly import assemble
from runtime.engine.async_engine import AsyncEngine
from runtime.engine.engine_options import EngineOptions
from runtime.engine.request import FinishReason, ResumeState, SamplingParams
from runtime.errors import RequestError
from serve_app.api.output_forms import MAX_GRAMMAR_CHARACTERS
from serve_app.messages.tasks import ChatTask, Conversation, RawText
from serve_app.replica.model_cards import model_card
from serve_app.replica.model_files import ModelFiles
from serve_app.replica.model_plan import ModelPlan
from serve_app.replica.replica import ModelReplica
from serve_app.replica.reply_forms import ReplyForms
from tests.byte_tokenizer import ByteTokenizer
from tests.checkout import DEMO_MODEL
from tests.reply_parsing import parsed
from tests.unit.serve_app.answers import answer_of

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


@contextmanager
def serving(context_tokens: int = 512, **more: Any) -> Iterator[tuple[ModelReplica, AsyncEngine]]:
    """`more`: options of the engine."""
    cpu = torch.device("cpu")
    model = load(Path(DEMO_MODEL), device=cpu, dtype=torch.float32)
    options = EngineOptions(context_tokens, max_sequences=4, depth=2, **more)
    engine, memory = assemble(
        model.decoder, model.tokenizer.token_bytes, device=cpu, options=options
    )
    engine.start()
    plan = ModelPlan(model, ModelFiles(Path(DEMO_MODEL)), options, cpu)
    card = model_card(plan, "demo", reserved_bytes=memory.reserved_bytes)
    replica = ModelReplica(model, engine, card)
    yield replica, engine
    replica.close()


@pytest.fixture(scope="module")
def replica() -> Iterator[ModelReplica]:
    with serving() as (replica, _):
        yield replica


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
    done = await answer_of(replica, asked(form(kind, source)))
    assert done.finish is FinishReason.STOP
    jsonschema.validate(done.text, {"type": "string", "pattern": f"^({expected})$"})


async def test_replies_beside_each_other_are_those_of_single_requests(replica) -> None:
    free = asked(None)
    raw = replace(JSON_TASK, prompt=RawText("A color:"), sampling=SamplingParams(logprobs=2))
    penalised = replace(JSON_TASK, sampling=SamplingParams(repeat_penalty=1.5, top_k=0, seed=8))
    tasks = [free, JSON_TASK, raw, penalised]
    alone = [await answer_of(replica, task) for task in tasks]
    together = await asyncio.gather(*(answer_of(replica, task) for task in tasks))
    for one, other in zip(alone, together, strict=True):
        assert (one.text, one.tokens) == (other.text, other.tokens)
    for done in alone[1:]:
        jsonschema.validate(json.loads(done.text), SCHEMA)
        assert done.finish is FinishReason.STOP
    assert "".join(entry.drawn.raw.decode() for entry in alone[2].logprobs) == alone[2].text


async def test_a_reply_continued_on_another_replica_is_the_same(replica) -> None:
    whole = await answer_of(replica, JSON_TASK)
    for count in (1, len(whole.tokens) // 2, len(whole.tokens) - 1):
        begun = replace(JSON_TASK, resume=ResumeState(whole.tokens[:count]))
        rest = await answer_of(replica, begun)
        assert rest.text == whole.text
        assert rest.tokens == whole.tokens[count:]


async def test_replies_with_forms_are_the_same_after_preemption(replica) -> None:
    digits = form(OutputKind.REGEX, "([0-9] ?){60}")
    tasks = [
        replace(asked(digits), max_tokens=60, sampling=SamplingParams(temperature=2.0, seed=seed))
        for seed in range(3)
    ]
    tasks.append(replace(tasks[0], output=None))
    alone = [await answer_of(replica, task) for task in tasks]
    with serving(160, cache_tokens=160, prefix_cache=False) as (crowded, engine):
        together = await asyncio.gather(*(answer_of(crowded, task) for task in tasks))
        assert engine.statistics().preemptions_total > 0
    for one, other in zip(alone, together, strict=True):
        assert (one.text, one.tokens) == (other.text, other.tokens)
    assert all(re.fullmatch("([0-9] ?)+", each.text) for each in together[:3])


# A tool of each form of calls, after which the prompts of this test are formed.
CALLED = {
    "coder": "tools <tool_call> <function=",
    "gemma": "tools <|tool_call>",
    "python": "tools <|tool_list_start|>",
}


async def test_calls_of_all_forms_are_the_same_after_preemption_and_elsewhere(
    replica, monkeypatch
) -> None:
    """The demo model's vocabulary has no markers of these forms, which are texts then."""
    prepare = ChatModel.prepare

    def prepared(model, messages, *, tools=(), **more):
        formed = pretend_prompt(CALLED[tools[0]["function"]["name"]])
        prompt = prepare(model, messages, tools=tools, **more)
        return replace(prompt, reply_format=formed.reply_format, call_form=formed.call_form)

    monkeypatch.setattr(ChatModel, "prepare", prepared)
    parameters = {"properties": {"a": SCHEMA, "c": {"enum": ["red", "blue"]}}, "required": ["a"]}
    tasks = [
        replace(
            asked(
                None,
                tools=(tool(name, parameters),),
                calls=CallRule((name,), (name,), required=True, parallel=False, field="tools"),
            ),
            max_tokens=250,
        )
        for name in CALLED
    ]
    alone = [await answer_of(replica, task) for task in tasks]
    for name, done in zip(CALLED, alone, strict=True):
        assert done.opening is not None and done.opening.guided
        events = done.opening.parser((tool(name, parameters),))
        ((_, arguments, _),) = parsed([*events.feed(done.text), *events.finish()]).calls
        jsonschema.validate(arguments, parameters)
    for task, whole in zip(tasks, alone, strict=True):
        half = len(whole.tokens) // 2
        rest = await answer_of(replica, replace(task, resume=ResumeState(whole.tokens[:half])))
        assert (rest.text, rest.tokens) == (whole.text, whole.tokens[half:])
    with serving(512, cache_tokens=560, prefix_cache=False) as (crowded, engine):
        together = await asyncio.gather(*(answer_of(crowded, task) for task in tasks))
        assert engine.statistics().preemptions_total > 0
    for one, other in zip(alone, together, strict=True):
        assert (one.text, one.tokens) == (other.text, other.tokens)


async def test_stop_strings_and_max_tokens_end_a_form_early(replica) -> None:
    stopped = await answer_of(replica, replace(JSON_TASK, stop=('"n"',)))
    assert stopped.finish is FinishReason.STOP and '"color"' in stopped.text
    assert '"n"' not in stopped.text
    cut = await answer_of(replica, replace(JSON_TASK, max_tokens=3))
    assert cut.finish is FinishReason.LENGTH and len(cut.tokens) == 3


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        (
            OutputKind.JSON_SCHEMA,
            {"properties": {"a": {"items": {"not": {"format": "date"}}}}},
            'field "format" cannot be compiled at "/properties/a/items": .*"not" cannot be',
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
        await answer_of(replica, asked(form(kind, source)))


async def test_strict_calls_are_checked_before_they_are_compiled(replica) -> None:
    bad = {"type": "function", "function": {"name": "f", "parameters": {"not": {"pattern": "a"}}}}
    schemas = (("f", "tools[1].input_schema"),)
    rule = CallRule(("f",), ("f",), True, False, "tool_choice", schemas=schemas)
    named = r'tool "f": field "tools\[1\].input_schema" cannot be compiled: .*not'
    with pytest.raises(RequestError, match=named):
        await answer_of(replica, asked(None, tools=(ADD, bad), calls=rule))


def continuing(task: ChatTask, begun: str) -> ChatTask:
    """The task, whose answer continues the text `begun` of the assistant."""
    assert isinstance(task.prompt, Conversation)
    messages = (*task.prompt.messages, Message("assistant", begun))
    prompt = msgspec.structs.replace(task.prompt, messages=messages, reply=ReplyStart.CONTINUED)
    return replace(task, prompt=prompt)


async def test_an_answer_continues_the_last_message(replica) -> None:
    whole = "3 + 4 = 7."
    task = replace(asked(None), sampling=SamplingParams(temperature=0))
    assert (await answer_of(replica, task)).text == whole
    for begun in ("3", "3 + 4 =", "3 + 4 = 7"):
        done = await answer_of(replica, continuing(task, begun))
        assert begun + done.text == whole
        assert done.opening is not None and done.opening.continues


async def test_a_form_holds_what_continues_a_message(replica) -> None:
    task = asked(form(OutputKind.REGEX, " [a-c]{3}"), tools=(ADD,))
    done = await answer_of(replica, continuing(task, "The letters are"))
    assert re.fullmatch(" [a-c]{3}", done.text)
    strict = CallRule(("add",), ("add",), required=False, parallel=False, field="tools")
    with pytest.raises(RequestError, match='field "tools" holds calls to a form, but'):
        await answer_of(replica, continuing(asked(None, tools=(ADD,), calls=strict), "I"))


def pretend_prompt(template: str) -> Prompt:
    replies = format_of(template)
    return Prompt((1,), reply_format=replies, call_form=call_form(replies.name, template))


def forms_of(tokenizer: ByteTokenizer, **more) -> ReplyForms:
    return ReplyForms(tokenizer, **more)  # type: ignore[arg-type]


CODER, GEMMA = "tools <tool_call> <function=", "tools <|tool_call>"
DEEP: dict[str, Any] = {"type": "array", "items": {}, "minItems": 1}
for _ in range(40):
    DEEP = {**DEEP, "items": DEEP}


def tool(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


@pytest.mark.parametrize(
    ("template", "schema", "place", "reason"),
    [
        (CODER, {"a": {"type": "string", "pattern": "^a|b$"}}, "/properties/a", '"pattern"'),
        (CODER, {"a": {"const": "x</parameter>"}}, "/properties/a", "the schema allows no text"),
        (CODER, {"<a>": {"type": "string"}}, "/properties/<a>", 'the name "<a>"'),
        (
            GEMMA,
            {"a": {"allOf": [{"pattern": "^a"}, {"pattern": "b$"}]}},
            "/properties/a",
            "several",
        ),
        (GEMMA, {"a": DEEP}, "/properties/a", "nested at most 32 deep"),
        (GEMMA, {"a": {"items": {"const": '<|"|>'}}}, "/properties/a/items", "a text with"),
    ],
)
async def test_what_a_familys_form_of_calls_cannot_express_is_refused_with_its_place(
    template, schema, place, reason
) -> None:
    forms, prompt = forms_of(ByteTokenizer()), pretend_prompt(template)
    rule = CallRule(
        ("f",),
        ("f",),
        required=True,
        parallel=True,
        field="tool_choice",
        schemas=(("f", "input[3].tools[0].parameters"),),
    )
    parameters = {"properties": schema, "required": [*schema]}
    task = asked(None, tools=(ADD, tool("f", parameters)), calls=rule)
    with pytest.raises(RequestError) as raised:
        await forms.grammar(task, prompt)
    assert str(raised.value).startswith(
        f'tool "f": field "input[3].tools[0].parameters" cannot be enforced at "{place}" in'
    )
    assert reason in str(raised.value)
    forms.close()


@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize(
    "template", [CODER, GEMMA, ">>>all >>>${recipient}", "<|channel|> <|message|>"]
)
async def test_a_form_of_the_text_works_beside_tools_of_every_family(
    template: str, continues: bool
) -> None:
    forms = forms_of(ByteTokenizer())
    prompt = replace(pretend_prompt(template), continues=continues)
    task = asked(JSON_TASK.output, tools=(ADD,))
    assert await forms.grammar(task, prompt) is not None
    forms.close()


async def test_rules_within_each_other_do_not_overflow_the_stack() -> None:
    rules = [f'r{n}:r{n + 1}|"a"r{n + 1}' for n in range(3000)]
    grammar = "\n".join(["start:r0", *rules, 'r3000:"x"'])
    forms, task = (
        forms_of(ByteTokenizer()),
        replace(JSON_TASK, output=form(OutputKind.LARK, grammar)),
    )
    assert len(grammar) < MAX_GRAMMAR_CHARACTERS
    with contextlib.suppress(RequestError):  # it costs too much time on slow machines
        await forms.grammar(task, pretend_prompt(""))
    forms.close()


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
