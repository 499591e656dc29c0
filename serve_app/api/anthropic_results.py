"""Results of tools that ran on Anthropic's servers, in conversations that continue here."""

import json
from typing import Any

from runtime.errors import RequestError
from serve_app.api.json_values import MAX_DEPTH

# Blocks of the assistant with such a result.
RESULTS = (
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "advisor_tool_result",
    "mcp_tool_result",
)
# Fields of these results, besides those of other blocks.
FIELDS: dict[str, Any] = {
    **{name: {} for name in ("url", "page_age", "encrypted_content", "retrieved_at")},
    **{name: {} for name in ("stdout", "stderr", "return_code", "encrypted_stdout", "file_id")},
    **{name: {} for name in ("file_type", "num_lines", "start_line", "total_lines")},
    **{name: {} for name in ("lines", "new_lines", "new_start", "old_lines", "old_start")},
    **{name: {} for name in ("is_file_update", "tool_references", "stop_reason")},
    **{name: {} for name in ("error_code", "error_message")},
}


def result_text(place: str, content: Any) -> str:
    """The content of a result as the model reads it: its text, or its fields as JSON, without what
    is encrypted and without files. Raises RequestError for what nests too deeply."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content and all(map(_is_text, content)):
        return "".join(block["text"] for block in content)
    return json.dumps(_readable(place, content), ensure_ascii=False)


def _is_text(block: Any) -> bool:
    return isinstance(block, dict) and isinstance(block.get("text"), str)


def _readable(place: str, value: Any, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise RequestError(f'field "{place}" is nested more than {MAX_DEPTH} deep')
    if isinstance(value, list):
        return [_readable(place, each, depth + 1) for each in value]
    if not isinstance(value, dict):
        return value
    hidden = ("data",) if value.get("type") == "base64" else ()
    return {
        name: _readable(place, each, depth + 1)
        for name, each in value.items()
        if name not in hidden and not name.startswith("encrypted_")
    }
