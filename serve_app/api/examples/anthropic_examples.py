"""Examples of Anthropic's protocol."""

from typing import Any

from serve_app.api.examples.example import Example, Examples

_MESSAGES = [{"role": "user", "content": "What is 17 + 25?"}]
_REQUEST = {"model": "demo", "max_tokens": 64, "messages": _MESSAGES}


def _usage(output: int) -> dict[str, Any]:
    return {
        "input_tokens": 18,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": output,
        "output_tokens_details": {"thinking_tokens": 0},
    }


_BEGUN: dict[str, Any] = {
    "id": "msg_7f56c1714619364936af410e",
    "type": "message",
    "role": "assistant",
    "model": "demo",
    "content": [],
    "stop_reason": None,
    "stop_sequence": None,
    "usage": _usage(0),
}


def _delta(text: str) -> dict[str, Any]:
    delta = {"type": "text_delta", "text": text}
    return {"type": "content_block_delta", "index": 0, "delta": delta}


EXAMPLES: Examples = {
    "POST /v1/messages": (
        Example(
            _REQUEST,
            {
                **_BEGUN,
                "content": [{"type": "text", "text": "17 + 25 = 42."}],
                "stop_reason": "end_turn",
                "usage": _usage(12),
            },
        ),
        Example(
            {**_REQUEST, "stream": True},
            [
                {"type": "message_start", "message": _BEGUN},
                {
                    "type": "content_block_start",
                    "index": 0,
                    "content_block": {"type": "text", "text": ""},
                },
                _delta("17"),
                _delta(" + 25 = 42."),
                {"type": "content_block_stop", "index": 0},
                {
                    "type": "message_delta",
                    "delta": {"stop_reason": "end_turn", "stop_sequence": None},
                    "usage": _usage(12),
                },
                {"type": "message_stop"},
            ],
        ),
    ),
    "POST /v1/messages/count_tokens": (
        Example({"model": "demo", "messages": _MESSAGES}, {"input_tokens": 18}),
    ),
}
