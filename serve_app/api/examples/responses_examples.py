"""Examples of OpenAI's responses."""

from typing import Any

from serve_app.api.examples.example import Example, Examples

RESPONSE_ID = "resp_afc61d58ff08b262467e160bb1f76fde"
_MESSAGE_ID = "msg_afc61d58ff08b262467e160bb1f76fde0000"
_INPUT_ID = "msg_55e71b05ccdb57fcbeed2c065ce703bf"
_REQUEST = {"model": "demo", "input": "What is 17 + 25?"}
_CREATED = 1767605400
# A part of the answer, and the item with it.
_PLACE = {"item_id": _MESSAGE_ID, "output_index": 0, "content_index": 0}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _item(status: str, *content: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": _MESSAGE_ID,
        "role": "assistant",
        "type": "message",
        "status": status,
        "content": list(content),
    }


def _response(status: str, **end: Any) -> dict[str, Any]:
    return {
        "id": RESPONSE_ID,
        "object": "response",
        "background": False,
        "frequency_penalty": 0.0,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {},
        "model": "demo",
        "parallel_tool_calls": True,
        "presence_penalty": 0.0,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": True,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "created_at": _CREATED,
        "status": status,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        **end,
    }


def _numbered(*events: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**event, "sequence_number": number} for number, event in enumerate(events)]


_ANSWER = _part("17 + 25 = 42.")
_BEGUN = _response("in_progress")
_COMPLETED = _response(
    "completed",
    completed_at=_CREATED,
    output=[_item("completed", _ANSWER)],
    usage={
        "input_tokens": 18,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 12,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 30,
    },
)
_EVENTS = _numbered(
    {"type": "response.created", "response": _BEGUN},
    {"type": "response.in_progress", "response": _BEGUN},
    {"type": "response.output_item.added", "output_index": 0, "item": _item("in_progress")},
    {"type": "response.content_part.added", **_PLACE, "part": _part("")},
    {"type": "response.output_text.delta", **_PLACE, "delta": "17", "logprobs": []},
    {"type": "response.output_text.delta", **_PLACE, "delta": " + 25 = 42.", "logprobs": []},
    {"type": "response.output_text.done", **_PLACE, "text": "17 + 25 = 42.", "logprobs": []},
    {"type": "response.content_part.done", **_PLACE, "part": _ANSWER},
    {
        "type": "response.output_item.done",
        "output_index": 0,
        "item": _item("completed", _ANSWER),
    },
    {"type": "response.completed", "response": _COMPLETED},
)

EXAMPLES: Examples = {
    "POST /v1/responses": (
        Example(_REQUEST, _COMPLETED),
        Example({**_REQUEST, "stream": True}, _EVENTS),
    ),
    "POST /v1/responses/input_tokens": (
        Example(_REQUEST, {"object": "response.input_tokens", "input_tokens": 18}),
    ),
    "GET /v1/responses/{id}": (Example(reply=_COMPLETED),),
    "DELETE /v1/responses/{id}": (
        Example(reply={"id": RESPONSE_ID, "object": "response", "deleted": True}),
    ),
    "GET /v1/responses/{id}/input_items": (
        Example(
            reply={
                "object": "list",
                "data": [
                    {
                        "id": _INPUT_ID,
                        "type": "message",
                        "status": "completed",
                        "role": "user",
                        "content": [{"type": "input_text", "text": "What is 17 + 25?"}],
                    }
                ],
                "first_id": _INPUT_ID,
                "last_id": _INPUT_ID,
                "has_more": False,
            }
        ),
    ),
}
