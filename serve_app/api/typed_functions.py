"""The functions that models see for the tools of OpenAI's /v1/responses whose type defines them,
with the documented parameters. The descriptions are ours.
"""

from typing import Any

from runtime.errors import RequestError
from serve_app.api.refusals import UnservedFieldError
from serve_app.api.responses_tools import PlacedTool, ResponseTool, ShellEnvironment
from serve_app.api.tools import Function


def local_shell_function(placed: PlacedTool) -> Function:
    command = {
        "type": "array",
        "items": {"type": "string"},
        "description": "The program and its arguments. For shell syntax: bash, -lc and a script.",
    }
    env = {
        "type": "object",
        "additionalProperties": {"type": "string"},
        "description": "Environment variables.",
    }
    folder = {"type": "string", "description": "The working directory of the command."}
    user = {"type": "string", "description": "The user to run the command as."}
    return Function(
        name=placed.full_name,
        description="Run a command on the user's computer and get its output.",
        parameters=_parameters(
            {
                "command": command,
                "working_directory": folder,
                "timeout_ms": _TIMEOUT,
                "env": env,
                "user": user,
            },
            "command",
        ),
    )


def shell_function(placed: PlacedTool) -> Function:
    commands = {
        "type": "array",
        "items": {"type": "string"},
        "description": "Shell commands, which run in this order.",
    }
    length = {
        "type": "integer",
        "description": "The maximum number of characters of output to return.",
    }
    lines = ["Run shell commands and get the output and the exit code of each."]
    environment = placed.tool.environment if isinstance(placed.tool, ResponseTool) else None
    if environment is not None and (isinstance(environment, str) or environment.type != "local"):
        raise UnservedFieldError(f"{placed.place}.environment")
    if isinstance(environment, ShellEnvironment) and environment.skills:
        lines.append("Directories with instructions. Read them before a task that they cover:")
        lines += [f"{each.path} ({each.name}): {each.description}" for each in environment.skills]
    return Function(
        name=placed.full_name,
        description="\n".join(lines),
        parameters=_parameters(
            {"commands": commands, "timeout_ms": _TIMEOUT, "max_output_length": length}, "commands"
        ),
    )


def apply_patch_function(placed: PlacedTool) -> Function:
    kind = {"type": "string", "enum": ["create_file", "update_file", "delete_file"]}
    path = {"type": "string", "description": "The path of the file, relative to the workspace."}
    diff = {
        "type": "string",
        "description": "Omit it for delete_file. For create_file: the lines of the new file, each "
        "prefixed with +. For update_file: for each change a line that begins with @@ (which the "
        "line of the enclosing function or class may follow), then the lines around it: unchanged "
        "ones prefixed with a space, lines to remove with -, lines to add with +. Give about three "
        "unchanged lines before and after each change, and no line numbers.",
    }
    return Function(
        name=placed.full_name,
        description="Create, change or delete one file.",
        parameters=_parameters({"type": kind, "path": path, "diff": diff}, "type", "path"),
    )


def computer_function(placed: PlacedTool) -> Function:
    """The computer tool. Its preview has one action in each call, and the size of the screen in its
    declaration."""
    preview = placed.tool.type == "computer_use_preview"
    description = (
        "Use a computer with a screen, a mouse and a keyboard. The result is a screenshot."
    )
    if preview and isinstance(placed.tool, ResponseTool):
        for field in ("display_width", "display_height"):
            if getattr(placed.tool, field) is None:
                raise RequestError(f'field "{placed.place}.{field}" is required')
        size = f"{placed.tool.display_width} x {placed.tool.display_height}"
        description += f" The screen has {size} pixels."
    action = {"anyOf": [_parameters(each, *_required(each)) for each in _ACTIONS]}
    if preview:
        parameters = _parameters({"action": action}, "action")
    else:
        several = {
            "type": "array",
            "items": action,
            "description": "The actions, which are performed in this order.",
        }
        parameters = _parameters({"actions": several}, "actions")
    return Function(name=placed.full_name, description=description, parameters=parameters)


def _required(action: dict[str, Any]) -> list[str]:
    """All parameters of an action except the keys to hold down."""
    return [name for name, schema in action.items() if schema is not _HELD]


def _action(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"type": {"type": "string", "enum": [kind]}, **parameters}


def _parameters(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    closed = {"required": [*required], "additionalProperties": False}
    return {"type": "object", "properties": properties, **closed}


_TIMEOUT = {"type": "integer", "description": "The time limit in milliseconds."}

_X = {"type": "integer", "description": "Pixels from the left edge."}
_Y = {"type": "integer", "description": "Pixels from the top edge."}
_AT = {"x": _X, "y": _Y}
_KEYS = {"type": "array", "items": {"type": "string"}}
_HELD = {**_KEYS, "description": "Keys to hold down during the action."}
_BUTTON = {"type": "string", "enum": ["left", "right", "wheel", "back", "forward"]}
_POINTS = {"type": "array", "items": _parameters(_AT, "x", "y")}
_STEPS = {"type": "integer", "description": "The number of pixels to scroll."}
# Parameters of the actions of a computer.
_ACTIONS = (
    _action("click", button=_BUTTON, **_AT, keys=_HELD),
    _action("double_click", **_AT, keys=_HELD),
    _action("move", **_AT, keys=_HELD),
    _action("drag", path=_POINTS, keys=_HELD),
    _action("keypress", keys=_KEYS),
    _action("screenshot"),
    _action("scroll", **_AT, scroll_x=_STEPS, scroll_y=_STEPS, keys=_HELD),
    _action("type", text={"type": "string"}),
    _action("wait"),
)
