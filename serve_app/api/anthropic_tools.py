"""Tools of Anthropic's protocol: those with a schema, and those whose type defines them.

Clients execute all of them. The model sees functions: `TYPES` makes, for each type of tool, the
functions that represent it, with the parameters that Anthropic documents.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import Field

from runtime.errors import RequestError
from serve_app.api.anthropic_toolsets import (
    SCREEN_TOOLS,
    TOOLSETS,
    Member,
    Properties,
    Toolset,
    integer,
    integers,
    one_of,
    text,
)
from serve_app.api.fields import Body, harmless
from serve_app.api.tools import NAME, Function

# Prefixes of the types of tools that Anthropic's servers execute.
_ELSEWHERE = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "advisor_")


class ToolSettings(Body):
    """Settings of one tool in a toolset."""

    enabled: bool | None = None
    defer_loading: Any = harmless()


class DeclaredTool(Body):
    """A tool that the client executes, or a set of them (a toolset, which has no name). Tools that
    Anthropic's servers execute have other types."""

    name: str | None = Field(default=None, pattern=NAME)
    type: str = "custom"
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    cache_control: Any = harmless()
    strict: bool = False
    input_examples: Any = harmless()
    eager_input_streaming: Any = harmless()
    allowed_callers: Any = harmless()
    defer_loading: Any = harmless()
    # Fields of editors.
    max_characters: int | None = None
    # Fields of computers.
    display_width_px: int | None = None
    display_height_px: int | None = None
    display_number: Any = harmless()
    enable_zoom: bool = False
    # Settings of a toolset's tools, by name.
    configs: dict[str, ToolSettings | None] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool with its place in the request."""

    place: str
    tool: DeclaredTool


def functions_of(tools: Sequence[OfferedTool]) -> list[Function]:
    """The functions that represent the tools. Raises RequestError for types that are not served and
    for missing fields."""
    found: list[Function] = []
    dropped = left_out(tools)
    for each in tools:
        place, tool = each.place, each.tool
        if tool.type in dropped:
            continue
        if tool.type not in TYPES:
            raise RequestError(f'field "{place}.type" is "{tool.type[:80]}", which is not served')
        found += TYPES[tool.type](place, tool)
    return found


def left_out(tools: Sequence[OfferedTool]) -> set[str]:
    """The types of the tools that are left out: those of Anthropic's servers, if there are other
    tools. The model sees all of these, so it needs no search for them."""
    types = {each.tool.type for each in tools}
    elsewhere = {kind for kind in types if kind.startswith(_ELSEWHERE)}
    return elsewhere if elsewhere < types else set()


def member_name(toolset: str, name: str) -> str:
    """The name of the function that represents the tool `name` of a toolset."""
    return f"{toolset}.{name}"


def toolsets_of(tools: Sequence[OfferedTool]) -> dict[str, str]:
    """The name of the toolset for each function that represents a tool of one."""
    return {
        member_name(toolset.name, name): toolset.name
        for each in tools
        if (toolset := TOOLSETS.get(each.tool.type)) is not None
        for name in _enabled(toolset, each.tool)
    }


def _name(place: str, tool: DeclaredTool) -> str:
    if tool.name is None:
        raise RequestError(f'field "{place}.name" is required')
    return tool.name


def _custom(place: str, tool: DeclaredTool) -> list[Function]:
    name = _name(place, tool)
    if tool.input_schema is None:
        raise RequestError(f'field "{place}.input_schema" is required')
    return [Function(name=name, description=tool.description, parameters=tool.input_schema)]


def _function(name: str, description: str, properties: Properties, *required: str) -> Function:
    closed = {"required": [*required], "additionalProperties": False}
    parameters = {"type": "object", "properties": properties, **closed}
    return Function(name=name, description=description, parameters=parameters)


def _bash(place: str, tool: DeclaredTool) -> list[Function]:
    properties: Properties = {
        "command": text("The command. Required unless `restart` is true."),
        "restart": {
            "type": "boolean",
            "description": "Restart the shell instead of running a command.",
        },
    }
    description = (
        "Run a command in a bash shell and get its output. The shell persists between calls, with "
        "its working directory and variables."
    )
    return [_function(_name(place, tool), description, properties)]


_RANGE = integers(
    2, "For `view`: the first and the last line to show. Lines count from 1; -1 is the last line."
)
_EDITING: Properties = {
    "view_range": _RANGE,
    "file_text": text("For `create`: the content of the file."),
    "old_str": text("For `str_replace`: the text to replace. It must occur exactly once."),
    "new_str": text("For `str_replace`: the replacement."),
    "insert_line": integer("For `insert`: the line after which to insert; 0 for the beginning."),
}
_INSERTED = "For `insert`: the text to insert."


def _editor(place: str, tool: DeclaredTool, *, undo: bool) -> list[Function]:
    """An editor. Older ones can undo, and take the text to insert from `new_str`."""
    commands = ["view", "create", "str_replace", "insert", *(["undo_edit"] if undo else [])]
    properties: Properties = {
        "command": one_of("The command.", *commands),
        "path": text("The absolute path of a file, or for `view` of a directory."),
        **_EDITING,
    }
    if undo:
        properties["new_str"] = text(f"{_EDITING['new_str']['description']} {_INSERTED}")
    else:
        properties["insert_text"] = text(_INSERTED)
    description = "View, create and edit text files."
    if tool.max_characters is not None:
        description += f" `view` shows at most {tool.max_characters} characters."
    return [_function(_name(place, tool), description, properties, "command", "path")]


def _memory(place: str, tool: DeclaredTool) -> list[Function]:
    commands = ("view", "create", "str_replace", "insert", "delete", "rename")
    properties: Properties = {
        "command": one_of("The command.", *commands),
        "path": text("The path, in /memories. For all commands except `rename`."),
        **_EDITING,
        "insert_text": text(_INSERTED),
        "old_path": text("For `rename`: the current path."),
        "new_path": text("For `rename`: the new path."),
    }
    description = (
        "Your notes, which persist across conversations: text files in the directory /memories. "
        "View the directory before you start, and record what you will need later."
    )
    return [_function(_name(place, tool), description, properties, "command")]


# Parameters that mean different things for the actions of one tool.
_ANY_TEXT = text(
    "For `type`: the text. For `key` and `hold_key`: the keys. For others: keys to hold down."
)
_ANY_POINT = integers(
    2,
    "The point (x, y), in pixels from the left and top edges; for `left_click_drag`, the one where "
    "the drag ends.",
)
# Actions that the first version of the tool lacks.
_LATER = ("left_mouse_down", "left_mouse_up", "triple_click", "scroll", "hold_key", "wait")


def _computer(place: str, tool: DeclaredTool, *, later: bool) -> list[Function]:
    """A computer: one function with all actions."""
    for field in ("display_width_px", "display_height_px"):
        if getattr(tool, field) is None:
            raise RequestError(f'field "{place}.{field}" is required')
    missing = [*(() if later else _LATER), *(() if tool.enable_zoom else ("zoom",))]
    actions = {name: each for name, each in SCREEN_TOOLS.items() if name not in missing}
    properties: Properties = {"action": one_of("The action.", *actions)}
    for _, parameters, _ in actions.values():
        properties |= parameters
    properties |= {"text": _ANY_TEXT, "coordinate": _ANY_POINT}
    for name in ("repeat",) if later else ("repeat", "start_coordinate"):
        del properties[name]
    lines = [
        f"Use a computer with a screen of {tool.display_width_px} x {tool.display_height_px} "
        "pixels, a mouse and a keyboard. The actions:",
        *(f"{name}: {each[0]}" for name, each in actions.items()),
    ]
    return [_function(_name(place, tool), "\n".join(lines), properties, "action")]


def _toolset(place: str, tool: DeclaredTool) -> list[Function]:
    """A function for each tool that is enabled."""
    toolset = TOOLSETS[tool.type]
    for name in tool.configs:
        if name not in toolset.members:
            raise RequestError(
                f'field "{place}.configs" has "{name[:80]}", which is not one of its tools'
            )
    return [
        _function(member_name(toolset.name, name), description, parameters, *required)
        for name, (description, parameters, required) in _enabled(toolset, tool).items()
    ]


def _enabled(toolset: Toolset, tool: DeclaredTool) -> dict[str, Member]:
    """The tools of a toolset that the request enables, or does not disable."""
    given = {name: each.enabled for name, each in tool.configs.items() if each is not None}
    return {
        name: member
        for name, member in toolset.members.items()
        if (name not in toolset.disabled if given.get(name) is None else given[name])
    }


TYPES: dict[str, Callable[[str, DeclaredTool], list[Function]]] = {
    "custom": _custom,
    "bash_20241022": _bash,
    "bash_20250124": _bash,
    "text_editor_20241022": partial(_editor, undo=True),
    "text_editor_20250124": partial(_editor, undo=True),
    "text_editor_20250429": partial(_editor, undo=False),
    "text_editor_20250728": partial(_editor, undo=False),
    "memory_20250818": _memory,
    "computer_20241022": partial(_computer, later=False),
    "computer_20250124": partial(_computer, later=True),
    "computer_20251124": partial(_computer, later=True),
    **dict.fromkeys(TOOLSETS, _toolset),
}
