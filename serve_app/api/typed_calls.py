"""Items of OpenAI's /v1/responses for calls of typed tools, and their results: shells, patches,
computers and searches for tools.
"""

from typing import Annotated, Any, Literal

import msgspec

from runtime.errors import RequestError
from serve_app.api.content_parts import check_type, joined, string
from serve_app.api.fields import check_count
from serve_app.api.json_values import converted
from serve_app.api.reply_reader import Call
from serve_app.api.request_images import from_url
from serve_app.api.responses_calls import (
    COMPLETED,
    CUSTOM,
    FUNCTION,
    CallKind,
    Content,
    StreamEvent,
    called,
    new_item_id,
)
from serve_app.api.responses_parts import Item, image_url
from serve_app.api.responses_tools import placed_tools, tools_in
from serve_app.api.tools import checked_arguments, decoded_arguments

# Integers that msgpack can carry.
Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


# The shell: several commands, and the output of each.


class ShellAction(msgspec.Struct):
    commands: list[str]
    max_output_length: Whole | None = None
    timeout_ms: Whole | None = None


class ShellOutcome(msgspec.Struct, omit_defaults=True):
    type: Literal["exit", "timeout"]
    exit_code: Whole | None = None


class ShellOutput(msgspec.Struct):
    outcome: ShellOutcome
    stderr: str
    stdout: str


ShellOutputs = list[ShellOutput]


def _shell_written(call: Call) -> Item | None:
    action = called(call, ShellAction)
    return None if action is None else {"action": msgspec.to_builtins(action)}


def _shell_read(place: str, raw: Item) -> Item:
    action = converted(f"{place}.action", raw.get("action"), ShellAction)
    return {"action": msgspec.to_builtins(action)}


def _given(fields: Item) -> dict[str, Any]:
    """The fields that are not null."""
    return {name: value for name, value in fields.items() if value is not None}


def _shell_events(item: Item) -> list[StreamEvent]:
    events: list[StreamEvent] = []
    for index, command in enumerate(item["action"]["commands"]):
        place = {"command_index": index}
        kind = "response.shell_call_command"
        events += [
            {"type": f"{kind}.added", **place, "command": ""},
            {"type": f"{kind}.delta", **place, "delta": command},
            {"type": f"{kind}.done", **place, "command": command},
        ]
    return events


def _shell_read_output(place: str, raw: Item) -> Item:
    outputs = converted(f"{place}.output", raw.get("output"), ShellOutputs)
    check_count(f"{place}.output", outputs)
    fields = {**COMPLETED, "call_id": string(place, raw, "call_id")}
    return fields | {"output": msgspec.to_builtins(outputs)}


def _shell_result(_: str, item: Item) -> str:
    return "\n".join(map(_shell_text, item["output"]))


def _shell_text(output: Item) -> str:
    """The output of a command, and how it ended."""
    outcome = output["outcome"]
    timeout = outcome["type"] == "timeout"
    ending = "timed out" if timeout else f"exit code: {outcome.get('exit_code', 0)}"
    texts = [output["stdout"], output["stderr"], ending]
    return "\n".join(text.removesuffix("\n") for text in texts if text)


SHELL = CallKind(
    "shell_call",
    "sh",
    "shell_call_output",
    "sho",
    written=_shell_written,
    read=_shell_read,
    arguments=lambda _, item: _given(item["action"]),
    begun=lambda fields: {"action": fields["action"] | {"commands": []}},
    events=_shell_events,
    read_output=_shell_read_output,
    result=_shell_result,
    tool="shell",
)


# The local shell: one command as a list of arguments.


class LocalShellAction(msgspec.Struct):
    command: list[str]
    env: dict[str, str] = {}
    timeout_ms: Whole | None = None
    user: str | None = None
    working_directory: str | None = None


def _exec(action: LocalShellAction) -> Item:
    """The action without null fields, which Vercel's AI SDK refuses."""
    return {"action": {"type": "exec", **_given(msgspec.to_builtins(action))}}


def _local_written(call: Call) -> Item | None:
    action = called(call, LocalShellAction)
    return None if action is None else _exec(action)


def _local_read(place: str, raw: Item) -> Item:
    return _exec(converted(f"{place}.action", raw.get("action"), LocalShellAction))


def _local_arguments(_: str, item: Item) -> dict[str, Any]:
    action = item["action"]
    return {name: action[name] for name in action if name != "type" and action[name] != {}}


def _local_read_output(place: str, raw: Item) -> Item:
    """The field `id` refers to the call, by its `call_id` or by the id of its item. Some clients
    send a field `call_id` instead, as in other results."""
    call = string(place, raw, "id" if raw.get("call_id") is None else "call_id")
    fields = {"id": new_item_id("lsho"), **COMPLETED, "call_id": call}
    return fields | {"output": string(place, raw, "output")}


LOCAL_SHELL = CallKind(
    "local_shell_call",
    "lsh",
    "local_shell_call_output",
    "lsho",
    written=_local_written,
    read=_local_read,
    arguments=_local_arguments,
    read_output=_local_read_output,
    tool="local_shell",
)


# Patches: one operation on a file.


class PatchOperation(msgspec.Struct):
    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: str = ""

    def shown(self) -> Item:
        """The operation as clients expect it: a deletion has no diff."""
        fields = {"type": self.type, "path": self.path}
        return fields if self.type == "delete_file" else fields | {"diff": self.diff}


def _patch_written(call: Call) -> Item | None:
    operation = called(call, PatchOperation)
    return None if operation is None else {"operation": operation.shown()}


def _patch_read(place: str, raw: Item) -> Item:
    operation = converted(f"{place}.operation", raw.get("operation"), PatchOperation)
    return {"operation": operation.shown()}


def _patch_read_output(place: str, raw: Item) -> Item:
    status = raw.get("status")
    if status not in ("completed", "failed"):
        raise RequestError(f'field "{place}.status" must be completed or failed')
    output = None if raw.get("output") is None else string(place, raw, "output")
    return {"status": status, "call_id": string(place, raw, "call_id"), "output": output}


APPLY_PATCH = CallKind(
    "apply_patch_call",
    "apc",
    "apply_patch_call_output",
    "apco",
    written=_patch_written,
    read=_patch_read,
    arguments=lambda _, item: item["operation"],
    read_output=_patch_read_output,
    result=lambda _, item: "\n".join(filter(None, (item["status"], item["output"]))),
    tool="apply_patch",
)


# The computer: mouse and keyboard actions, and a screenshot.


class _Action(msgspec.Struct, omit_defaults=True, tag_field="type"):
    """An action. Its `type` tells which one."""


class Click(_Action, tag="click"):
    button: Literal["left", "right", "wheel", "back", "forward"]
    x: Whole
    y: Whole
    keys: list[str] | None = None


class DoubleClick(_Action, tag="double_click"):
    x: Whole
    y: Whole
    keys: list[str] | None = None


class Move(_Action, tag="move"):
    x: Whole
    y: Whole
    keys: list[str] | None = None


class ScreenPoint(msgspec.Struct):
    x: Whole
    y: Whole


class Drag(_Action, tag="drag"):
    path: list[ScreenPoint]
    keys: list[str] | None = None


class Keypress(_Action, tag="keypress"):
    keys: list[str]


class Screenshot(_Action, tag="screenshot"):
    pass


class Scroll(_Action, tag="scroll"):
    x: Whole
    y: Whole
    scroll_x: Whole
    scroll_y: Whole
    keys: list[str] | None = None


class Typing(_Action, tag="type"):
    text: str


class Wait(_Action, tag="wait"):
    pass


ComputerAction = Click | DoubleClick | Move | Drag | Keypress | Screenshot | Scroll | Typing | Wait


class ComputerCall(msgspec.Struct, omit_defaults=True):
    """Several actions; the preview of the tool has a single one."""

    actions: list[ComputerAction] | None = None
    action: ComputerAction | None = None


def _computer_fields(call: ComputerCall | None) -> Item | None:
    if call is None or (call.actions is None and call.action is None):
        return None
    return {**msgspec.to_builtins(call), "pending_safety_checks": []}


def _computer_read(place: str, raw: Item) -> Item:
    given = {name: raw.get(name) for name in ("actions", "action")}
    fields = _computer_fields(converted(place, given, ComputerCall))
    if fields is None:
        raise RequestError(f'field "{place}.actions" is required')
    return fields


def _computer_read_output(place: str, raw: Item) -> Item:
    output = raw.get("output")
    check_type(f"{place}.output", output, ("computer_screenshot",))
    assert isinstance(output, dict)
    picture = {"type": "computer_screenshot", "image_url": image_url(f"{place}.output", output)}
    return {**COMPLETED, "call_id": string(place, raw, "call_id"), "output": picture}


def _computer_result(place: str, item: Item) -> Content:
    return joined([from_url(f"{place}.output.image_url", item["output"]["image_url"])])


COMPUTER = CallKind(
    "computer_call",
    "cu",
    "computer_call_output",
    "cuo",
    written=lambda call: _computer_fields(called(call, ComputerCall)),
    read=_computer_read,
    arguments=lambda _, item: {name: item[name] for name in ("actions", "action") if name in item},
    read_output=_computer_read_output,
    result=_computer_result,
    tool="computer",
)


# The search for tools, whose result declares the tools that were found.


def _search_read(place: str, raw: Item) -> Item:
    arguments = raw.get("arguments")
    if isinstance(arguments, str):
        arguments = decoded_arguments(f"{place}.arguments", arguments)
    arguments = checked_arguments(f"{place}.arguments", arguments)
    return {"arguments": arguments, "execution": _execution(raw)}


def _search_read_output(place: str, raw: Item) -> Item:
    tools_in(place, raw)
    call = None if raw.get("call_id") is None else string(place, raw, "call_id")
    fields = {**COMPLETED, "call_id": call, "execution": _execution(raw)}
    return fields | {"tools": raw["tools"]}


def _execution(raw: Item) -> str:
    return "server" if raw.get("execution") == "server" else "client"


def _search_result(place: str, item: Item) -> str:
    names = [each.full_name for each in placed_tools(f"{place}.tools", tools_in(place, item))]
    return "\n".join(["Tools that can be called now:", *names]) if names else "No tools found."


TOOL_SEARCH = CallKind(
    "tool_search_call",
    "tsc",
    "tool_search_output",
    "tso",
    written=lambda call: {"arguments": call.value(), "execution": "client"},
    read=_search_read,
    arguments=lambda place, item: checked_arguments(f"{place}.arguments", item["arguments"]),
    read_output=_search_read_output,
    result=_search_result,
    tool="tool_search",
    identified=False,
)

KINDS = (FUNCTION, CUSTOM, SHELL, LOCAL_SHELL, APPLY_PATCH, COMPUTER, TOOL_SEARCH)
CALLS = {kind.call: kind for kind in KINDS}
OUTPUTS = {kind.output: kind for kind in KINDS}
