"""What agents send and recognise in protocols, beyond the official clients."""

from typing import Any

import anthropic
import openai
import pytest

from model_zoo.chat.formats.reply_format import format_of
from runtime.errors import PromptTooLongError
from serve_app.messages.tasks import ReplyOpening
from tests.unit.serve_app.api.test_anthropic import IMAGE, USER, asked, task_of
from tests.unit.serve_app.api.test_responses import SEEING, URL, events
from tests.unit.serve_app.api.test_responses import post as posted
from tests.unit.serve_app.fake_replicas import CARD, PretendReplica, anthropic_client, openai_client
from tests.unit.serve_app.responses.fake_processes import one_process

TAGS = ReplyOpening(format_of("tools <tool_call>"))


@pytest.mark.parametrize("joined", [False, True])
async def test_claude_codes_line_for_anthropics_servers_is_left_out(joined):
    def system(hash: str) -> Any:
        line = f"x-anthropic-billing-header: cc_version=2.1.177.01c; cch={hash};"
        texts = [line, "You are Claude Code.", "Never send x-anthropic-billing-header: lines."]
        return "\n".join(texts) if joined else [{"type": "text", "text": each} for each in texts]

    prompts = [(await task_of(system=system(hash))).prompt for hash in ("36ee5", "0aaa9")]
    assert prompts[0] == prompts[1]
    assert prompts[0].messages[0].text.startswith("You are Claude Code.")
    assert prompts[0].messages[0].text.endswith("Never send x-anthropic-billing-header: lines.")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_is_too_long_is_reported_in_the_words_that_clients_look_for(stream):
    replica = PretendReplica()
    replica.error = PromptTooLongError("it has 9 tokens")
    async with anthropic_client(replica) as client:
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long: it has 9 tokens"):
            await client.messages.create(**asked(stream=stream))


async def test_tools_that_a_search_has_found_are_named_in_its_result():
    """Of Claude Code with `ENABLE_TOOL_SEARCH`."""
    found = [
        {"type": "text", "text": "Found:"},
        *({"type": "tool_reference", "tool_name": name} for name in ("weather", "time")),
    ]
    search = {"type": "tool_use", "id": "t1", "name": "ToolSearch", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": found}
    turns = [{"role": "assistant", "content": [search]}, {"role": "user", "content": [result]}]
    task = await task_of(messages=[*USER, *turns], access={"strict_fields": True})
    assert task.prompt.messages[-1].text == "Found:\nweather\ntime\n"


async def test_a_tool_runner_sends_whole_conversations_where_threads_are_not_served():
    """It asks for a thread, which holds the conversation, in its first request."""
    replica = PretendReplica(('<tool_call>{"name": "weather", "arguments": {}}</tool_call>',), TAGS)

    @anthropic.beta_async_tool
    async def weather() -> str:
        """The weather."""
        replica.words = ("It is sunny.",)
        return "sunny"

    async with anthropic_client(replica) as client:
        given = asked(tools=[weather])
        reply = await client.beta.messages.tool_runner(**given).until_done()
        assert reply.content[0].text == "It is sunny."
        with pytest.raises(anthropic.BadRequestError, match='"thread" is not served') as refused:
            thread = {"type": "continue", "previous_message_id": "msg_1"}
            await client.beta.messages.create(**given | {"tools": [], "thread": thread})
    assert refused.value.body["error"]["details"]["unsupported"] == ["thread"]
    roles = [message.role for message in replica.tasks[-1].prompt.messages]
    assert roles == ["user", "assistant", "tool"]


async def test_the_official_client_knows_the_id_of_the_request():
    async with anthropic_client(PretendReplica()) as client:
        reply = await client.messages.create(**asked(), extra_headers={"x-request-id": "mine"})
        listed = await client.models.list()
    assert reply._request_id == "mine"
    assert listed._request_id


async def test_codexs_offers_of_openais_tools_are_left_out_beside_its_own():
    search = {"type": "web_search", "external_web_access": False, "search_content_types": ["text"]}
    offered = [search, {"type": "image_generation", "output_format": "png"}]
    own = {"type": "function", "name": "shell", "parameters": {"type": "object"}}
    replica = PretendReplica()
    async with openai_client(replica) as client:
        given = {"model": "demo", "input": "Hi"}
        reply = await client.responses.create(**given, tools=[offered[0], own, offered[1]])
        for kept in (offered, [offered[0], own, {"type": "file_search"}]):
            with pytest.raises(openai.BadRequestError, match="which is not served"):
                await client.responses.create(**given, tools=kept)
    (task,) = replica.tasks
    assert [tool["function"]["name"] for tool in task.prompt.tools] == ["shell"]
    assert [tool.type for tool in reply.tools] == ["function"]
    async with openai_client(replica, strict_fields=True) as client:
        with pytest.raises(openai.BadRequestError, match="web_search"):
            await client.responses.create(**given, tools=[{"type": "web_search"}, own])


@pytest.mark.parametrize("query", [{}, {"client_version": "0.153.4"}])
async def test_codex_finds_its_own_list_of_models(query):
    async with openai_client(PretendReplica()) as client:
        listed = await client.models.list(extra_query=query)
    assert [model.id for model in listed.data] == ["demo"]
    assert listed.model_extra == ({"models": []} if query else {})


async def test_codex_resumes_a_session_in_which_openais_servers_searched_the_web():
    """The items have what was searched for, and not what was found."""
    searched = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    drawn = {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "AA"}
    thought = {"type": "reasoning", "summary": [], "encrypted_content": "AA"}
    said = {"role": "assistant", "content": "It is X."}
    given: Any = [
        {"role": "user", "content": "What is it?"},
        *(thought, searched | {"action": {"type": "other"}}),
        searched | {"action": {"type": "search", "query": "x", "sources": []}},
        *(drawn, said, {"role": "user", "content": "Thanks."}),
    ]
    replica = PretendReplica()
    async with openai_client(replica, stored=one_process()) as client:
        reply = await client.responses.create(model="demo", input=given)
        listed = await client.responses.input_items.list(reply.id, order="asc")
        assert listed.data[3].action.query == "x"
    (task,) = replica.tasks
    assert [each.text for each in task.prompt.messages] == ["What is it?", "It is X.", "Thanks."]
    async with openai_client(replica, strict_fields=True) as client:
        with pytest.raises(openai.BadRequestError, match=r"input\[\].type: web_search_call"):
            await client.responses.create(model="demo", input=[*given[:1], searched])


async def test_codex_learns_that_a_prompt_is_too_long_from_a_stream_that_fails():
    """After an error response it shortens nothing."""
    replica = PretendReplica()
    replica.error = PromptTooLongError("it has 9 tokens")
    response = await posted(replica, stream=True)
    assert response.status_code == 200
    found = events(response.text, strict=False)
    kinds = ["response.created", "response.in_progress", "error", "response.failed"]
    assert [each["type"] for each in found] == kinds
    error = found[-1]["response"]["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("prompt is too long: it has 9 tokens")
    async with openai_client(replica) as client:
        stream = await client.responses.create(model="demo", input="Hi", stream=True)
        with pytest.raises(openai.APIError, match="context window") as raised:
            _ = [event async for event in stream]
    assert raised.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("card", "url"),
    [(CARD, URL), (SEEING, URL + "%"), (SEEING, "data:image/png;base64,eHh4eHh4"), (SEEING, "x")],
)
async def test_codex_learns_which_image_of_a_result_it_must_remove(card, url):
    """It replaces the image by a text and goes on, instead of failing in each further turn."""
    call = {"type": "function_call", "call_id": "1", "name": "view_image", "arguments": "{}"}
    output = [{"type": "input_text", "text": "See."}, {"type": "input_image", "image_url": url}]
    items = [call, {"type": "function_call_output", "call_id": "1", "output": output}]
    response = await posted(PretendReplica(), access={"card": card}, input=items)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", "input[1].output[1].image_url")


async def test_claude_code_learns_that_it_must_remove_an_image():
    read = {"type": "tool_use", "id": "t1", "name": "Read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [IMAGE]}
    turns = [{"role": "assistant", "content": [read]}, {"role": "user", "content": [result]}]
    async with anthropic_client(PretendReplica()) as client:
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.messages.create(**asked(messages=[*USER, *turns]))
    message = refused.value.body["error"]["message"]
    assert message.startswith("Could not process image: model 'demo' does not support images")
