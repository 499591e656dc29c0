"""Documents and search results in the messages of Anthropic's protocol."""

from typing import Any

import pytest

from model_zoo.chat.messages import ImagePart, Message
from tests.unit.serve_app.api.test_anthropic import IMAGE, PICTURE, SEEING, asked, blocks, post
from tests.unit.serve_app.fake_replicas import PretendReplica, anthropic_client


def document(source: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "document", "source": source, **more}


TEXT = {"type": "text", "media_type": "text/plain", "data": "The sky is green."}
FOUND = {
    "type": "search_result",
    "source": "https://sky.test",
    "title": "Sky",
    "content": [{"type": "text", "text": "The sky is "}, {"type": "text", "text": "green."}],
}
PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
BAD = [
    (blocks({"type": "document"}), 'field "messages[0].content[0].source" must be an object'),
    (blocks(document(PDF)), 'content[0].source.type" is "base64"; documents must be of type text'),
    (
        blocks(document({"type": "url", "url": "https://a.test/x.pdf"})),
        'content[0].source.type" is "url"; documents must be of type text or content. PDF files',
    ),
    (blocks(document(TEXT, title=7)), 'field "messages[0].content[0].title" must be a string'),
    (
        blocks(document(TEXT, citations={"enabled": True})),
        'field "messages[0].content[0].citations" is not served yet',
    ),
    (
        blocks(document({"type": "content", "content": [document(TEXT)]})),
        'content[0].source.content[0]" is of type "document"',
    ),
    (
        blocks({"type": "tool_result", "tool_use_id": "t", "content": [document(PDF)]}),
        '"messages[0].content[0].content[0].source.type" is "base64"',
    ),
    (blocks({"type": "search_result"}), 'field "messages[0].content[0].source" must be a string'),
    (
        blocks(FOUND | {"content": [IMAGE]}),
        '"messages[0].content[0].content[0]" is of type "image"',
    ),
    (
        blocks(FOUND | {"citations": {"enabled": True}}),
        'field "messages[0].content[0].citations" is not served yet',
    ),
]


@pytest.mark.parametrize(("change", "message"), BAD)
async def test_documents_that_are_not_served_are_refused_by_name(change, message):
    response = await post(access={"card": SEEING}, **change)
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]


async def test_the_official_client_sends_documents_of_text_and_images():
    replica = PretendReplica()
    parts = [{"type": "text", "text": "Here it is:"}, IMAGE]
    shown = document(
        {"type": "content", "content": parts},
        title="Notes",
        context="Of a friend.",
        citations={"enabled": False},
    )
    asking = {"type": "text", "text": "What colour?"}
    content = [asking, document(TEXT), shown, asking]
    result = {"type": "tool_result", "tool_use_id": "t", "content": [asking, document(TEXT)]}
    turns = [{"role": "user", "content": content}, {"role": "user", "content": [result]}]
    async with anthropic_client(replica, card=SEEING, strict_fields=True) as client:
        await client.messages.create(**asked(messages=turns))
    message, answer = replica.tasks[0].prompt.messages
    green = "What colour?\n<document>\nThe sky is green.\n</document>\n"
    begun = "<document>\n<title>Notes</title>\n<context>Of a friend.</context>\nHere it is:"
    assert message.content == (
        green + begun,
        ImagePart(PICTURE),
        "</document>\nWhat colour?",
    )
    assert answer == Message("tool", green, tool_call_id="t")


async def test_the_official_client_sends_search_results_beside_and_in_results_of_tools():
    replica = PretendReplica()
    asking = {"type": "text", "text": "What colour?"}
    found = FOUND | {"citations": {"enabled": False}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [found, found]}
    turns = [{"role": "user", "content": [result]}, {"role": "user", "content": [asking, found]}]
    async with anthropic_client(replica, strict_fields=True) as client:
        await client.messages.create(**asked(messages=turns))
    answer, message = replica.tasks[0].prompt.messages
    shown = (
        "<search_result>\n<source>https://sky.test</source>\n<title>Sky</title>\n"
        "The sky is green.\n</search_result>\n"
    )
    assert answer == Message("tool", shown * 2, tool_call_id="t")
    assert message == Message("user", f"What colour?\n{shown}")
