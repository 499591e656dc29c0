"""JSON texts of clients: which are accepted, and why others are not."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import RequestError
from serve_app.api.json_values import decoded_json
from tests.unit.serve_app.fake_replicas import PretendReplica, http_client

ARGUMENTS = {"wide": [10**30, -(2**63) - 1], "fits": [2**63 - 1, True, "a"]}
USER = {"role": "user", "content": "a"}
TEXT = json.dumps(ARGUMENTS)
# Turns with a call in each protocol.
CALLING: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "role": "assistant",
        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": TEXT}}],
    },
    "/api/chat": {
        "role": "assistant",
        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": ARGUMENTS}}],
    },
    "/v1/messages": {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "1", "name": "f", "input": ARGUMENTS}],
    },
    "/v1/responses": {"type": "function_call", "call_id": "1", "name": "f", "arguments": TEXT},
}
HALF = "is half of a UTF-16 surrogate pair; only both halves together are a character"


@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_any_text_is_decoded_from_escapes_and_from_utf8(text: str) -> None:
    for ascii_only in (True, False):
        encoded = json.dumps({text: text}, ensure_ascii=ascii_only)
        for given_as in (encoded, encoded.encode(), bytearray(encoded.encode())):
            assert decoded_json(given_as) == {text: text}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (r'"\ud800"', rf"the escape \ud800 (byte 1) {HALF}"),
        (r'"ab\uDFFF and more"', rf"the escape \uDFFF (byte 3) {HALF}"),
        (r'"\ud83d\ude00\ude00"', rf"the escape \ude00 (byte 13) {HALF}"),
        (r'"\ud800\ud83d\ude00"', rf"the escape \ud800 (byte 1) {HALF}"),
        (r'"\ud800\n, and more text"', rf"the escape \ud800 (byte 1) {HALF}"),
        (r'{"\udc00": 1}', rf"the escape \udc00 (byte 2) {HALF}"),
        (r'"\\ud800 \q"', "JSON is malformed: invalid escape character in string (byte 11)"),
        ('"', "Input data was truncated"),
        (b'"a\xff"', "byte 2 is 0xff, which is not UTF-8"),
        (b'"\xc3', "byte 1 is 0xc3, which is not UTF-8"),
        ('"\ud800"', "byte 1 is 0xed, which is not UTF-8"),
        ("[" * 30_000, "it is nested too deeply"),
    ],
)
def test_other_texts_are_refused_with_the_reason(text: str | bytes, reason: str) -> None:
    with pytest.raises(RequestError) as refused:
        decoded_json(text)
    assert str(refused.value) == f"invalid JSON: {reason}"


@pytest.mark.parametrize("path", CALLING)
async def test_wide_integers_in_earlier_calls_are_the_nearest_floats(path: str) -> None:
    """Models write them, and clients send the calls back."""
    turns, replica = [USER, CALLING[path], USER], PretendReplica()
    field = "input" if path == "/v1/responses" else "messages"
    body = {"model": "demo", "max_tokens": 5, "stream": False, field: turns}
    async with http_client(replica) as client:
        response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    (call,) = replica.tasks[0].prompt.messages[1].tool_calls
    assert call.arguments == {"wide": [1e30, -(2.0**63)], "fits": ARGUMENTS["fits"]}
    assert [type(each) for each in call.arguments["wide"]] == [float, float]
