"""Structured output by libraries that build on the official clients: requests demand its form."""

import json
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput

from model_zoo.grammars.constraint import OutputKind
from serve_app.messages.tasks import ChatTask
from tests.unit.serve_app.test_client_libraries import (
    LANGCHAIN,
    QUESTION,
    ScriptedReplica,
    anthropic_model,
    chat_openai,
    openai_model,
    served,
)


class City(BaseModel):
    """A city."""

    city: str


JSON = ('{"city": "Par', 'is"}')
PARIS = City(city="Paris")


def calling(name: str) -> tuple[str, ...]:
    call = {"name": name, "arguments": {"city": "Paris"}}
    return (f"<tool_call>\n{json.dumps(call)}\n</tool_call>",)


def check_schema(task: ChatTask) -> None:
    assert task.output is not None and task.output.kind is OutputKind.JSON_SCHEMA
    assert json.loads(task.output.source)["properties"]["city"]["type"] == "string"


def check_call(task: ChatTask, name: str) -> None:
    assert task.calls is not None and task.calls.required
    assert task.calls.tools == (name,)


@LANGCHAIN
@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
async def test_langchain_parses_structured_output(model, method: str):
    replica = ScriptedReplica(calling("City") if method == "function_calling" else JSON)
    async with served(replica) as url:
        reply = await model(url).with_structured_output(City, method=method).ainvoke(QUESTION)
    assert reply == PARIS
    (task,) = replica.tasks
    match method:
        case "json_schema":
            check_schema(task)
        case "json_mode":
            assert json.loads(task.output.source) == {"type": "object"}
        case "function_calling" if model is chat_openai:  # Ollama has no tool_choice
            check_call(task, "City")


# With Anthropic's protocol it demands a schema of known models only.
@pytest.mark.parametrize(
    ("model", "output"),
    [(openai_model, ToolOutput), (openai_model, NativeOutput), (anthropic_model, ToolOutput)],
)
async def test_pydantic_ai_parses_structured_output(model, output: Any):
    native = output is NativeOutput
    replica = ScriptedReplica(JSON if native else calling("final_result"))
    async with served(replica) as url:
        result = await Agent(model(url), output_type=output(City)).run(QUESTION)
    assert result.output == PARIS
    (task,) = replica.tasks
    if native:
        check_schema(task)
    else:
        check_call(task, "final_result")
