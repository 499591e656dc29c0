"""Content blocks of Anthropic's messages, and their conversion to messages."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from model_zoo.chat.messages import Message, ToolCall
from runtime.errors import RequestError
from serve_app.api.anthropic_browser import FIELDS as BROWSER_FIELDS
from serve_app.api.anthropic_browser import browser_state
from serve_app.api.anthropic_results import FIELDS as RESULT_FIELDS
from serve_app.api.anthropic_results import RESULTS, result_text
from serve_app.api.anthropic_tools import member_name
from serve_app.api.content_parts import check_type, joined, string
from serve_app.api.refusals import UnservedFieldError
from serve_app.api.request_images import UnreadImage, UnreadMessage, from_url
from serve_app.api.tools import checked_arguments

# Claude Code begins the system prompt with a line for Anthropic's servers. In many versions it has
# a hash of the request, so that no prompt would have a cached prefix.
_ATTRIBUTION = "x-anthropic-billing-header:"
# A summary of all that is before it, in place of that.
COMPACTION = "compaction"
# Calls of tools, some of which ran on Anthropic's servers, with their results in the same turn.
_CALLS = ("tool_use", "server_tool_use", "mcp_tool_use")
# Blocks that change the offered tools; see `anthropic_turns`.
_TOOL_CHANGES = ("tool_addition", "tool_removal")
_BLOCKS = {
    "user": ("text", "image", "document", "search_result", "tool_result"),
    "assistant": (
        *("text", "thinking", "redacted_thinking", "fallback", "mcp_tool_listing", COMPACTION),
        *_CALLS,
        *RESULTS,
    ),
    "system": ("text", *_TOOL_CHANGES),
}
_RESULTS = ("text", "image", "document", "search_result", "tool_reference", "browser_state")
# Fields of content blocks. Those of `_MARKED` have no effect.
_MARKED: dict[str, Any] = {
    "cache_control": {"type": {}, "ttl": {}, "scope": {}},
    **{name: {} for name in ("citations", "is_error", "caller", "signature")},
    "transformations": {},
}
_SOURCE: dict[str, Any] = {name: {} for name in ("type", "media_type", "data", "url")}
_PART: dict[str, Any] = {"type": {}, "text": {}, "source": _SOURCE, **_MARKED}
SHOWN: dict[str, Any] = {
    **_PART,
    "source": {**_SOURCE, "content": _PART},
    "content": _PART,
    **{name: {} for name in ("title", "context", "tool_name")},
}
BLOCK: dict[str, Any] = {
    **SHOWN,
    **{name: {} for name in ("tool_use_id", "id", "name", "input", "thinking", "data")},
    **{name: {} for name in ("toolset_name", "server_name", "mcp_server_name")},
    **{name: {} for name in ("tool", "tools", "from", "to", "trigger")},
    **{name: {} for name in ("encrypted_content", "tool_changes")},
    "content": {**SHOWN, **BROWSER_FIELDS, **RESULT_FIELDS, "content": {**_PART, **RESULT_FIELDS}},
}


def messages_of(place: str, role: str, content: str | list[Any]) -> list[UnreadMessage]:
    """The messages of the turn at `place`; each tool result is a message of its own."""
    blocks, place_of_blocks = blocks_of(content), f"{place}.content"
    types = _BLOCKS[one_of(f"{place}.role", role, _BLOCKS)]
    for index, block in enumerate(blocks):
        check_type(f"{place_of_blocks}[{index}]", block, types)
    if role == "assistant":
        return [*_assistant(place_of_blocks, blocks)]
    if role == "system":
        text = "".join(
            string(f"{place_of_blocks}[{index}]", block, "text")
            for index, block in enumerate(blocks)
            if block["type"] == "text"
        )
        return [UnreadMessage.of(Message("system"), text)] if text else []
    return [*_user(place_of_blocks, blocks)]


def system_text(content: str | list[Any]) -> str:
    """The text of the field `system`."""
    return "".join(map(_unattributed, _texts("system", content)))


def blocks_of(content: Any) -> list[Any]:
    """The content blocks; a plain string stands for one text block."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content if isinstance(content, list) else [content]


def image_bytes(block: Any) -> int:
    """Size of the base64 data of an image, or of the images of a tool result or a document."""
    return sum(_data_bytes(each) for outer in _inner(block) for each in _inner(outer))


def one_of(place: str, value: str, known: Any) -> str:
    if value not in known:
        raise RequestError(
            f'field "{place}" is "{value[:80]}"; it must be one of {", ".join(known)}'
        )
    return value


def _user(place: str, blocks: list[Any]) -> Iterator[UnreadMessage]:
    """The tool results, then the rest as one message."""
    placed = [(f"{place}[{index}]", block) for index, block in enumerate(blocks)]
    results = [(each, block) for each, block in placed if block["type"] == "tool_result"]
    for each, block in results:
        identity = string(each, block, "tool_use_id")
        content = _content(f"{each}.content", blocks_of(block.get("content") or ""))
        yield UnreadMessage.of(Message("tool", tool_call_id=identity), content)
    rest = [(each, block) for each, block in placed if block["type"] != "tool_result"]
    if rest or not results:
        yield UnreadMessage.of(Message("user"), joined(_parts(rest)))


def _assistant(place: str, blocks: list[Any]) -> Iterator[UnreadMessage]:
    """The message of an assistant's blocks; after a result of Anthropic's servers, which is a
    message of its own, another one. A summary is a message of the user. Redacted thinking, which
    only Anthropic can decrypt, is ignored, as are blocks that only clients read."""
    begun: list[tuple[str, Any]] = []
    first = max((index for index, block in enumerate(blocks) if is_summary(block)), default=-1)
    if first >= 0:
        summary = string(f"{place}[{first}]", blocks[first], "content")
        yield UnreadMessage.of(Message("user"), summary)
    for index, block in enumerate(blocks):
        each = f"{place}[{index}]"
        if index <= first:
            continue
        if block["type"] not in RESULTS:
            begun.append((each, block))
            continue
        if begun:
            yield _said(begun)
            begun = []
        result = Message("tool", tool_call_id=string(each, block, "tool_use_id"))
        yield UnreadMessage.of(result, result_text(f"{each}.content", block.get("content") or ""))
    if begun or not blocks:
        yield _said(begun)


def is_summary(block: Any) -> bool:
    """Whether a block is a compaction that has not failed."""
    compaction = isinstance(block, dict) and block.get("type") == COMPACTION
    return compaction and block.get("content") is not None


def _said(placed: list[tuple[str, Any]]) -> UnreadMessage:
    text = thinking = ""
    calls = []
    for place, block in placed:
        match block["type"]:
            case "text":
                text += string(place, block, "text")
            case "thinking":
                thinking += string(place, block, "thinking")
            case kind if kind in _CALLS:
                calls.append(_call(place, block))
    return UnreadMessage.of(
        Message("assistant", thinking=thinking or None, tool_calls=tuple(calls)), text
    )


def _call(place: str, block: dict[str, Any]) -> ToolCall:
    arguments = checked_arguments(f"{place}.input", block.get("input"))
    name = string(place, block, "name")
    if block.get("toolset_name") is not None:
        name = member_name(string(place, block, "toolset_name"), name)
    return ToolCall(name, arguments, string(place, block, "id"))


def _content(place: str, blocks: list[Any]) -> str | tuple[str | UnreadImage, ...]:
    """The texts and images of a tool result in order."""
    placed = [(f"{place}[{index}]", block) for index, block in enumerate(blocks)]
    for each, block in placed:
        check_type(each, block, _RESULTS)
    return joined(_parts(placed))


def _parts(placed: list[tuple[str, Any]]) -> list[str | UnreadImage]:
    """The texts and images of blocks; documents, search results, references to tools and states of
    browsers have lines of their own."""
    parts: list[str | UnreadImage] = []
    for place, block in placed:
        tagged = _TAGGED.get(block["type"])
        if tagged is not None or block["type"] == "tool_reference":
            _end_line(parts)
        parts += [_part(place, block)] if tagged is None else tagged(place, block)
    return parts


def _end_line(parts: list[str | UnreadImage]) -> None:
    before = parts[-1] if parts else None
    if isinstance(before, str) and before[-1:] != "\n":
        parts.append("\n")


def _document(place: str, block: dict[str, Any]) -> list[str | UnreadImage]:
    """The title, the context and the content of a document, in tags as Anthropic's guides write
    documents into prompts."""
    _refuse_citations(place, block)
    parts: list[str | UnreadImage] = ["<document>\n"]
    for name in ("title", "context"):
        if block.get(name):
            parts.append(f"<{name}>{string(place, block, name)}</{name}>\n")
    parts += _document_content(f"{place}.source", _source(place, block))
    _end_line(parts)
    return [*parts, "</document>\n"]


def _document_content(place: str, source: dict[str, Any]) -> list[str | UnreadImage]:
    match source.get("type"):
        case "text":
            return [string(place, source, "data")]
        case "content":
            blocks = blocks_of(source.get("content") or "")
            for index, block in enumerate(blocks):
                check_type(f"{place}.content[{index}]", block, ("text", "image"))
            return [_part(f"{place}.content[{i}]", block) for i, block in enumerate(blocks)]
    raise RequestError(
        f'field "{place}.type" is "{str(source.get("type"))[:80]}"; documents must be of type text '
        "or content. PDF files are not served: send their text"
    )


def _search_result(place: str, block: dict[str, Any]) -> list[str | UnreadImage]:
    """The source, the title and the texts of a search result, in tags as those of documents."""
    _refuse_citations(place, block)
    parts: list[str | UnreadImage] = ["<search_result>\n"]
    parts += [f"<{name}>{string(place, block, name)}</{name}>\n" for name in ("source", "title")]
    parts += _texts(f"{place}.content", block.get("content") or "")
    _end_line(parts)
    return [*parts, "</search_result>\n"]


_TAGGED: dict[str, Callable[[str, dict[str, Any]], Sequence[str | UnreadImage]]] = {
    "document": _document,
    "search_result": _search_result,
    "browser_state": browser_state,
}


def _refuse_citations(place: str, block: dict[str, Any]) -> None:
    citations = block.get("citations")
    if isinstance(citations, dict) and citations.get("enabled") not in (None, False):
        raise UnservedFieldError(f"{place}.citations")


def _texts(place: str, content: str | list[Any]) -> list[str]:
    blocks = blocks_of(content)
    for index, block in enumerate(blocks):
        check_type(f"{place}[{index}]", block, ("text",))
    return [string(f"{place}[{index}]", block, "text") for index, block in enumerate(blocks)]


def _unattributed(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(_ATTRIBUTION) else text


def _part(place: str, block: dict[str, Any]) -> str | UnreadImage:
    if block["type"] == "text":
        return string(place, block, "text")
    if block["type"] == "tool_reference":  # a tool that a search has found; "tools" declares it
        return f"{string(place, block, 'tool_name')}\n"
    source, place = _source(place, block), f"{place}.source"
    match source.get("type"):
        case "base64":
            return UnreadImage(f"{place}.data", string(place, source, "data"))
        case "url":
            return from_url(f"{place}.url", string(place, source, "url"))
    raise RequestError(
        f"invalid image source type: {str(source.get('type'))[:80]}. Only base64 images and URLs "
        f'are supported (field "{place}.type")'
    )


def _source(place: str, block: dict[str, Any]) -> dict[str, Any]:
    source = block.get("source")
    if not isinstance(source, dict):
        raise RequestError(f'field "{place}.source" must be an object')
    return source


def _inner(block: Any) -> list[Any]:
    """The blocks of a tool result or a document; any other block itself."""
    if not isinstance(block, dict) or block.get("type") not in ("tool_result", "document"):
        return [block]
    holder = block if block["type"] == "tool_result" else block.get("source")
    return blocks_of(holder.get("content") or "") if isinstance(holder, dict) else []


def _data_bytes(block: Any) -> int:
    is_image = isinstance(block, dict) and block.get("type") == "image"
    source = block.get("source") if is_image else None
    data = source.get("data") if isinstance(source, dict) else None
    return len(data) if isinstance(data, str) else 0
