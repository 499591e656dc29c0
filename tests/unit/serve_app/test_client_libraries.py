"""Libraries that build on the official clients, against scripted replies, on a port of loopback."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_ollama import ChatOllama, OllamaEmbeddings
from langchain_openai import ChatOpenAI, OpenAIEmbeddings, custom_tool
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from model_zoo.chat.formats.reply_format import format_of
from model_zoo.chat.turn_rules import TurnRules
from runtime.errors import PromptTooLongError
from serve_app.messages.tasks import ChatDelta, ChatTask, Conversation, ReplyOpening
from tests.unit.serve_app.api.operations import AnyReplica
from tests.unit.serve_app.fake_replicas import USAGE, ingress
from tests.unit.serve_app.sockets import listening

QWEN3 = ReplyOpening(format_of("tools <tool_call> <think> </think>"))
TEXT = ("Hello", ", ", "world")
CALL = (
    "<think>\nI call.\n</think>\n\n<tool_c",
    'all>\n{"name": "weather", "arguments": {"city": "Par',
    'is"}}\n</tool_call>',
)
CALLED = {"name": "weather", "args": {"city": "Paris"}}
QUESTION = "How is it in Paris?"
ANSWERED = "It is sunny in Paris."


def weather(city: str) -> str:
    """The weather in a city."""
    return f"It is sunny in {city}."


class ScriptedReplica(AnyReplica):
    """Answers each task with the next of its replies."""

    def __init__(self, *replies: tuple[str, ...]) -> None:
        super().__init__(opening=QWEN3)
        self._replies = list(replies)

    async def generate(self, task: Any) -> AsyncGenerator[ChatDelta, None]:
        if isinstance(task, ChatTask):
            self.words = self._replies.pop(0)
        async for delta in super().generate(task):
            yield delta

    @property
    def prompts(self) -> list[Conversation]:
        prompts = [task.prompt for task in self.tasks]
        assert all(isinstance(prompt, Conversation) for prompt in prompts)
        return prompts  # type: ignore[return-value]


@asynccontextmanager
async def served(replica: ScriptedReplica) -> AsyncIterator[str]:
    """The address of a strict server, which refuses fields that it does not know."""
    async with ingress(replica, strict_fields=True) as app, listening(app) as port:
        yield f"http://127.0.0.1:{port}"


def chat_openai(url: str, **settings: Any) -> ChatOpenAI:
    settings |= {"model": "demo", "api_key": "any", "max_retries": 0, "stream_usage": True}
    return ChatOpenAI(base_url=f"{url}/v1", **settings)


def chat_ollama(url: str, **settings: Any) -> ChatOllama:
    return ChatOllama(model="demo", base_url=url, **settings)


LANGCHAIN = pytest.mark.parametrize("model", [chat_openai, chat_ollama])


@LANGCHAIN
async def test_langchain_answers_whole_and_streamed(model):
    async with served(ScriptedReplica(TEXT, TEXT)) as url:
        llm = model(url, temperature=0.5)
        reply = await llm.ainvoke(QUESTION)
        pieces = [piece async for piece in llm.astream(QUESTION)]
    assert reply.content == "Hello, world"
    assert reply.usage_metadata["output_tokens"] == USAGE.completion_tokens
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert whole.content == "Hello, world"
    assert whole.usage_metadata["input_tokens"] == USAGE.prompt_tokens


@LANGCHAIN
async def test_langchain_calls_tools_and_sends_their_results(model):
    replica = ScriptedReplica(CALL, CALL, TEXT)
    async with served(replica) as url:
        llm = model(url).bind_tools([weather])
        reply = await llm.ainvoke(QUESTION)
        pieces = [piece async for piece in llm.astream(QUESTION)]
        streamed = pieces[0]
        for piece in pieces[1:]:
            streamed += piece
        history: list[BaseMessage] = [HumanMessage(QUESTION), reply]
        history.append(ToolMessage(ANSWERED, tool_call_id=reply.tool_calls[0]["id"]))
        last = await llm.ainvoke(history)
    for message in (reply, streamed):
        (call,) = message.tool_calls
        assert {name: call[name] for name in CALLED} == CALLED
    assert isinstance(last, AIMessage) and last.content == "Hello, world"
    (tool,) = replica.prompts[0].tools
    assert tool["function"]["name"] == "weather"
    assert tool["function"]["parameters"]["properties"]["city"]["type"] == "string"
    asked, called, told = replica.prompts[2].messages
    assert (asked.role, asked.content) == ("user", QUESTION)
    assert called.tool_calls[0].arguments == {"city": "Paris"}
    assert (told.role, told.content) == ("tool", ANSWERED)
    (told,) = TurnRules().adapted([called, told])[1:]
    assert told.tool_name == "weather"


async def test_langchain_calls_custom_tools_and_sends_their_results():
    @custom_tool(format={"type": "grammar", "syntax": "regex", "definition": "[a-z ]+"})
    def shout(text: str) -> str:
        """Shouts."""
        return text.upper()

    called = ('<tool_call>{"name": "shout", "arguments": {"input": "hel', 'lo"}}</tool_call>')
    replica = ScriptedReplica(called, called, TEXT)
    async with served(replica) as url:
        llm = chat_openai(url, use_responses_api=True).bind_tools([shout])
        reply = await llm.ainvoke(QUESTION)
        pieces = [piece async for piece in llm.astream(QUESTION)]
        streamed = pieces[0]
        for piece in pieces[1:]:
            streamed += piece
        result = await shout.ainvoke(streamed.tool_calls[0])
        await llm.ainvoke([HumanMessage(QUESTION), streamed, result])
    assert [call["args"] for call in reply.tool_calls] == [{"__arg1": "hello"}]
    _, call, told = replica.prompts[2].messages
    assert call.tool_calls[0].arguments == {"input": "hello"}
    assert (told.content, told.tool_call_id) == ("HELLO", call.tool_calls[0].id)


@pytest.mark.parametrize("responses", [False, True])
async def test_langchain_recognises_a_conversation_that_must_be_shortened(responses):
    replica = ScriptedReplica(TEXT, TEXT)
    replica.error = PromptTooLongError("the input length exceeds the context length")
    async with served(replica) as url:
        with pytest.raises(ContextOverflowError, match="exceeds the context length"):
            await chat_openai(url, use_responses_api=responses).ainvoke(QUESTION)
        with pytest.raises(ContextOverflowError, match="exceeds the context"):
            async for _ in chat_openai(url, use_responses_api=responses).astream(QUESTION):
                pass


async def test_langchain_shows_thinking():
    async with served(ScriptedReplica(CALL)) as url:
        reply = await chat_ollama(url, reasoning=True).ainvoke(QUESTION)
    assert reply.additional_kwargs["reasoning_content"] == "I call."


@pytest.mark.parametrize(
    "embeddings",
    [
        lambda url: OpenAIEmbeddings(
            model="demo", base_url=f"{url}/v1", api_key="any", check_embedding_ctx_length=False
        ),
        lambda url: OllamaEmbeddings(model="demo", base_url=url),
    ],
)
async def test_langchain_embeds(embeddings):
    async with served(ScriptedReplica()) as url:
        vectors = await embeddings(url).aembed_documents(["hot", "cold"])
    length = 14**0.5  # of (0, 1, 2, 3)
    expected = pytest.approx([n / length for n in range(4)])
    assert vectors == [expected, expected]


def openai_model(url: str) -> OpenAIChatModel:
    return OpenAIChatModel("demo", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="any"))


def anthropic_model(url: str) -> AnthropicModel:
    client = anthropic.AsyncAnthropic(base_url=url, api_key="any", max_retries=0)
    return AnthropicModel("demo", provider=AnthropicProvider(anthropic_client=client))


PYDANTIC_AI = pytest.mark.parametrize("model", [openai_model, anthropic_model])


@PYDANTIC_AI
async def test_pydantic_ai_runs_tools_until_there_is_an_answer(model):
    replica = ScriptedReplica(CALL, TEXT)
    async with served(replica) as url:
        agent = Agent(model(url), tools=[weather], system_prompt="Be brief.")
        result = await agent.run(QUESTION)
    assert result.output == "Hello, world"
    assert result.usage.output_tokens == 2 * USAGE.completion_tokens
    system, asked, called, told = replica.prompts[1].messages
    assert system.role == "system" and system.text.endswith("Be brief.")
    assert (asked.role, asked.content) == ("user", QUESTION)
    assert (called.thinking, called.tool_calls[0].arguments) == ("I call.", {"city": "Paris"})
    assert (told.role, told.content) == ("tool", ANSWERED)
    (told,) = TurnRules().adapted([called, told])[1:]
    assert told.tool_name == "weather"


@PYDANTIC_AI
async def test_pydantic_ai_streams_the_answer_after_a_tool(model):
    async with served(ScriptedReplica(CALL, TEXT)) as url:
        agent = Agent(model(url), tools=[weather])
        async with agent.run_stream(QUESTION) as result:
            pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
    assert "".join(pieces) == "Hello, world"
