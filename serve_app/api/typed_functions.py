"""What models see of the tools of OpenAI's /v1/responses that a type defines: functions with the
documented parameters. Descriptions are our own.
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
    folder = {"type": "string", "description": "The folder in which the command runs."}
    user = {"type": "string", "description": "The user as whom the command runs."}
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
        "description": "Commands for the shell, which run in this order.",
    }
    length = {
        "type": "integer",
        "description": "The number of characters of the output that are wanted at most.",
    }
    told = ["Run shell commands and get the output and the exit code of each."]
    environment = placed.tool.environment if isinstance(placed.tool, ResponseTool) else None
    if environment is not None and (isinstance(environment, str) or environment.type != "local"):
        raise UnservedFieldError(f"{placed.place}.environment")
    if isinstance(environment, ShellEnvironment) and environment.skills:
        told.append("Folders with instructions, to be read before a task that they are about:")
        told += [f"{each.path} ({each.name}): {each.description}" for each in environment.skills]
    return Function(
        name=placed.full_name,
        description="\n".join(told),
        parameters=_parameters(
            {"commands": commands, "timeout_ms": _TIMEOUT, "max_output_length": length}, "commands"
        ),
    )


def apply_patch_function(placed: PlacedTool) -> Function:
    kind = {"type": "string", "enum": ["create_file", "update_file", "delete_file"]}
    path = {"type": "string", "description": "The path of the file, relative to the workspace."}
    diff = {
        "type": "string",
        "description": "Without it for delete_file. For create_file: each line of the new file "
        "after a +. For update_file: for each place a line that begins with @@ (after which the "
        "line of the enclosing function or class may follow), then the lines of the place: after a "
        "space those that remain, after a - those to remove, after a + those to add. About three "
        "remaining lines before and after each change identify the place. There are no line "
        "numbers.",
    }
    return Function(
        name=placed.full_name,
        description="Create, change or delete one file.",
        parameters=_parameters({"type": kind, "path": path, "diff": diff}, "type", "path"),
    )


def computer_function(placed: PlacedTool) -> Function:
    """The tool for a computer. Its preview has one action in a call, and states the screen."""
    preview = placed.tool.type == "computer_use_preview"
    told = (
        "Use a computer by its screen, mouse and keyboard. The result is a picture of the screen."
    )
    if preview and isinstance(placed.tool, ResponseTool):
        for field in ("display_width", "display_height"):
            if getattr(placed.tool, field) is None:
                raise RequestError(f'field "{placed.place}.{field}" is required')
        size = f"{placed.tool.display_width} x {placed.tool.display_height}"
        told += f" The screen has {size} pixels."
    action = {"anyOf": [_parameters(each, *_required(each)) for each in _ACTIONS]}
    if preview:
        parameters = _parameters({"action": action}, "action")
    else:
        several = {"type": "array", "items": action, "description": "Actions, in this order."}
        parameters = _parameters({"actions": several}, "actions")
    return Function(name=placed.full_name, description=told, parameters=parameters)


def _required(action: dict[str, Any]) -> list[str]:
    """All parameters of an action but keys that are held."""
    return [name for name, schema in action.items() if schema is not _HELD]


def _action(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"type": {"type": "string", "enum": [kind]}, **parameters}


def _parameters(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    closed = {"required": [*required], "additionalProperties": False}
    return {"type": "object", "properties": properties, **closed}


_TIMEOUT = {"type": "integer", "description": "Milliseconds after which it is stopped."}

_X = {"type": "integer", "description": "Pixels from the left edge."}
_Y = {"type": "integer", "description": "Pixels from the upper edge."}
_AT = {"x": _X, "y": _Y}
_KEYS = {"type": "array", "items": {"type": "string"}}
_HELD = {**_KEYS, "description": "Keys that are held during the action."}
_BUTTON = {"type": "string", "enum": ["left", "right", "wheel", "back", "forward"]}
_POINTS = {"type": "array", "items": _parameters(_AT, "x", "y")}
_STEPS = {"type": "integer", "description": "Pixels by which to scroll."}
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
