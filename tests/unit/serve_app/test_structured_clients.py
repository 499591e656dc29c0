"""Structured output and forced calls of the official clients, against the demo model."""

import json
import re
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.unit.serve_app.fake_replicas import clients

QUESTION = [{"role": "user", "content": "What is 3 plus 4?"}]


class Sum(BaseModel):
    kind: Literal["sum"]
    result: int = Field(ge=0, le=99)


async def test_openai_parses_a_model_of_pydantic(demo_replica):
    async with clients(demo_replica) as to:
        parsed = await to.oai.chat.completions.parse(
            model="demo", messages=QUESTION, response_format=Sum, max_tokens=200
        )
    assert isinstance(parsed.choices[0].message.parsed, Sum)


async def test_ollama_follows_a_schema_whole_and_streamed(demo_replica):
    schema = Sum.model_json_schema()
    async with clients(demo_replica) as to:
        whole = await to.native.chat("demo", QUESTION, format=schema)
        stream = await to.native.generate("demo", "3 plus 4?", format=schema, stream=True)
        pieces = [part.response async for part in stream]
        free = await to.native.chat("demo", QUESTION, format="json", options={"num_predict": 9})
    Sum.model_validate_json(whole.message.content)
    Sum.model_validate_json("".join(pieces))
    assert free.message.content.startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
async def test_openai_gets_the_call_that_it_requires(demo_replica, choice):
    tools = [openai.pydantic_function_tool(Sum, name="add")]
    async with clients(demo_replica) as to:
        reply = await to.oai.chat.completions.create(
            model="demo", messages=QUESTION, tools=tools, tool_choice=choice, max_tokens=200,
            parallel_tool_calls=False,
        )  # fmt: skip
    (call,) = reply.choices[0].message.tool_calls
    assert call.function.name == "add" and reply.choices[0].finish_reason == "tool_calls"
    Sum.model_validate_json(call.function.arguments)


async def test_openai_gets_the_input_of_a_custom_tool_in_the_form_of_its_grammar(demo_replica):
    grammar = 'start: WORD ("," WORD){2}\nWORD: /"[a-z]{2,4}"/'
    form = {"type": "grammar", "syntax": "lark", "definition": grammar}
    tool = {"type": "custom", "name": "say", "description": "Says it.", "format": form}
    async with clients(demo_replica) as to:
        reply = await to.oai.responses.create(
            model="demo", input=QUESTION, tools=[tool], tool_choice="required",
            parallel_tool_calls=False, max_output_tokens=200,
        )  # fmt: skip
        with pytest.raises(openai.BadRequestError, match='"start" refers to itself'):
            endless = form | {"definition": 'start: "a" start?'}
            await to.oai.responses.create(
                model="demo", input=QUESTION, tools=[tool | {"format": endless}]
            )
    (call,) = reply.output
    assert call.type == "custom_tool_call"
    assert re.fullmatch('"[a-z]{2,4}"(,"[a-z]{2,4}"){2}', call.input)


async def test_a_schema_that_cannot_be_compiled_is_refused_with_its_place(demo_replica):
    schema = {"type": "object", "properties": {"a": {"type": "string", "not": {"pattern": "x"}}}}
    described = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    async with clients(demo_replica) as to:
        with pytest.raises(openai.BadRequestError, match=r'at "/properties/a": "not"'):
            await to.oai.chat.completions.create(
                model="demo", messages=QUESTION, response_format=described
            )
        body = {"model": "demo", "messages": QUESTION, "format": schema}
        reply = await to.raw.post("/api/chat", json=body)
    assert reply.status_code == 400
    assert json.loads(reply.text)["error"].startswith('field "format" cannot be compiled at "/')
