"""Tools of Anthropic's protocol: those with a schema, and those that a type defines.

Clients execute all of them. The model sees each as a function: `TYPES` has, for each type, the
functions that stand for it, with the parameters that Anthropic documents.
"""

from collections.abc import Callable, Sequence
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

# Searches for tools on Anthropic's servers.
_SEARCHES = ("tool_search_tool_regex", "tool_search_tool_bm25")


class ToolSettings(Body):
    """Of one tool of a toolset."""

    enabled: bool | None = None
    defer_loading: Any = harmless()


class DeclaredTool(Body):
    """A tool of the client, or several (a toolset, which has no name). Tools of Anthropic's servers
    have other types."""

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
    # Of editors:
    max_characters: int | None = None
    # Of screens:
    display_width_px: int | None = None
    display_height_px: int | None = None
    display_number: Any = harmless()  # the client knows its display
    enable_zoom: bool = False
    # Of toolsets, settings of tools by their names:
    configs: dict[str, ToolSettings | None] = Field(default_factory=dict)


def functions_of(tools: Sequence[DeclaredTool]) -> list[Function]:
    """The functions that stand for the tools. Raises RequestError for types that are not served and
    for missing fields."""
    found: list[Function] = []
    dropped = left_out(tools)
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        if tool.type in dropped:
            continue
        if tool.type not in TYPES:
            raise RequestError(f'field "{place}.type" is "{tool.type[:80]}", which is not served')
        found += TYPES[tool.type](place, tool)
    return found


def left_out(tools: Sequence[DeclaredTool]) -> set[str]:
    """The types of tools that have no function, because there are others: searches for tools, all
    of which are shown to the model."""
    types = {tool.type for tool in tools}
    searches = {kind for kind in types if kind.startswith(_SEARCHES)}
    return searches if searches < types else set()


def member_name(toolset: str, name: str) -> str:
    """The name of the function for a tool of a toolset."""
    return f"{toolset}.{name}"


def toolsets_of(tools: Sequence[DeclaredTool]) -> dict[str, str]:
    """The names of toolsets, by those of the functions for their tools."""
    return {
        member_name(toolset.name, name): toolset.name
        for tool in tools
        if (toolset := TOOLSETS.get(tool.type)) is not None
        for name in _enabled(toolset, tool)
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
        "restart": {"type": "boolean", "description": "Restart the shell instead."},
    }
    told = (
        "Run a command in a bash shell and get its output. The shell remains between calls, with "
        "its folder and variables."
    )
    return [_function(_name(place, tool), told, properties)]


_RANGE = integers(
    2, "Of `view`: the first and the last line to show, counted from 1; -1 stands for the end."
)
_EDITING: Properties = {
    "view_range": _RANGE,
    "file_text": text("Of `create`: the text of the file."),
    "old_str": text("Of `str_replace`: the text to replace, which the file has exactly once."),
    "new_str": text("Of `str_replace`: the text in its place."),
    "insert_line": integer("Of `insert`: the line after which the text is inserted; 0: at first."),
}
_INSERTED = "Of `insert`: the text to insert."


def _editor(place: str, tool: DeclaredTool, *, undo: bool) -> list[Function]:
    """An editor. The older ones can undo, and take the inserted text from `new_str`."""
    commands = ["view", "create", "str_replace", "insert", *(["undo_edit"] if undo else [])]
    properties: Properties = {
        "command": one_of("What to do.", *commands),
        "path": text("The absolute path of a file; of `view` also of a folder."),
        **_EDITING,
    }
    if undo:
        properties["new_str"] = text(f"{_EDITING['new_str']['description']} {_INSERTED}")
    else:
        properties["insert_text"] = text(_INSERTED)
    told = "View, create and edit text files."
    if tool.max_characters is not None:
        told += f" `view` shows at most {tool.max_characters} characters."
    return [_function(_name(place, tool), told, properties, "command", "path")]


def _memory(place: str, tool: DeclaredTool) -> list[Function]:
    commands = ("view", "create", "str_replace", "insert", "delete", "rename")
    properties: Properties = {
        "command": one_of("What to do.", *commands),
        "path": text("The path below /memories. Of all commands but `rename`."),
        **_EDITING,
        "insert_text": text(_INSERTED),
        "old_path": text("Of `rename`: the path until now."),
        "new_path": text("Of `rename`: the path from now on."),
    }
    told = (
        "Your notes, which remain after the conversation: text files in the folder /memories. View "
        "the folder before you begin, and write down what will be needed later."
    )
    return [_function(_name(place, tool), told, properties, "command")]


# Parameters with several meanings where one tool has all actions.
_ANY_TEXT = text(
    "Of `type`: the text. Of `key` and `hold_key`: the keys. Of others: keys that are held."
)
_ANY_POINT = integers(
    2,
    "The point (x, y) in pixels from the left and the upper edge; of `left_click_drag` where it "
    "ends.",
)
# Actions that the first version of the screen has not.
_LATER = ("left_mouse_down", "left_mouse_up", "triple_click", "scroll", "hold_key", "wait")


def _computer(place: str, tool: DeclaredTool, *, later: bool) -> list[Function]:
    """One tool for all actions."""
    for field in ("display_width_px", "display_height_px"):
        if getattr(tool, field) is None:
            raise RequestError(f'field "{place}.{field}" is required')
    missing = [*(() if later else _LATER), *(() if tool.enable_zoom else ("zoom",))]
    actions = {name: each for name, each in SCREEN_TOOLS.items() if name not in missing}
    properties: Properties = {"action": one_of("What to do.", *actions)}
    for _, parameters, _ in actions.values():
        properties |= parameters
    properties |= {"text": _ANY_TEXT, "coordinate": _ANY_POINT}
    for name in ("repeat",) if later else ("repeat", "start_coordinate"):
        del properties[name]
    told = [
        f"Use a computer by its screen of {tool.display_width_px} x {tool.display_height_px} "
        "pixels, its mouse and its keyboard. The actions:",
        *(f"{name}: {each[0]}" for name, each in actions.items()),
    ]
    return [_function(_name(place, tool), "\n".join(told), properties, "action")]


def _toolset(place: str, tool: DeclaredTool) -> list[Function]:
    """A function for each tool that is enabled."""
    toolset = TOOLSETS[tool.type]
    for name in tool.configs:
        if name not in toolset.members:
            raise RequestError(f'field "{place}.configs" has "{name[:80]}", which is no tool')
    return [
        _function(member_name(toolset.name, name), told, parameters, *required)
        for name, (told, parameters, required) in _enabled(toolset, tool).items()
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
