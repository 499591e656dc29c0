"""Items of OpenAI's /v1/responses with calls of tools and with their results.

Models call every tool as a function. `CallKind` describes how the calls of one type of tools, and
their results, are written as items.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from runtime.errors import RequestError
from serve_app.api.content_parts import string
from serve_app.api.custom_tools import call_arguments, input_of
from serve_app.api.fields import MAX_ITEMS
from serve_app.api.json_values import check_value
from serve_app.api.reply_reader import Call
from serve_app.api.request_images import UnreadImage
from serve_app.api.responses_parts import IMAGE, TEXTS, Item, content_of, read_parts
from serve_app.api.responses_tools import placed_tools, tools_in
from serve_app.api.tools import MAX_ARGUMENTS_BYTES, decoded_arguments

_TOKEN_BYTES = 16
_COMPLETED: Item = {"status": "completed"}

StreamEvent = dict[str, Any]
Content = str | tuple[str | UnreadImage, ...]


def new_item_id(prefix: str) -> str:
    """An id for an item of a client that has none."""
    return f"{prefix}_{secrets.token_hex(_TOKEN_BYTES)}"


def _nothing_left(_: Item) -> Item:
    return {}


def _no_events(_: Item) -> list[StreamEvent]:
    return []


def _read_output(place: str, raw: Item) -> Item:
    output = raw.get("output")
    if not isinstance(output, str):
        output = read_parts(f"{place}.output", output, (*TEXTS, IMAGE))
    return {**_COMPLETED, "call_id": string(place, raw, "call_id"), "output": output}


def _output(place: str, item: Item) -> Content:
    output = item["output"]
    return output if isinstance(output, str) else content_of(f"{place}.output", output)


@dataclass(frozen=True, slots=True)
class CallKind:
    """The items with calls of one type of tools, and with their results.

    `call`, `output`: the types of these items; `prefix`, `output_prefix`: of their ids. `tool`: the
    name of the tool that is called, if the type of the items determines it. `identified`: whether
    every call has an id; a search on OpenAI's servers has none.

    `written`: the fields with what the tool gets; None for arguments that these cannot express.
    `read`: these fields of an item that a client sends. `arguments`: those of the function, from
    the item. `begun`: the fields that differ when a stream begins the item; `events`: the events
    that report the rest. By default the item is complete at once.

    `read_output`: the fields of a result that a client sends. `result`: what the model reads.
    `read` and `read_output` raise RequestError that names the field.
    """

    call: str
    prefix: str
    output: str
    output_prefix: str
    written: Callable[[Call], Item | None]
    read: Callable[[str, Item], Item]
    arguments: Callable[[str, Item], dict[str, Any]]
    begun: Callable[[Item], Item] = _nothing_left
    events: Callable[[Item], list[StreamEvent]] = _no_events
    read_output: Callable[[str, Item], Item] = _read_output
    result: Callable[[str, Item], Content] = _output
    tool: str | None = None
    identified: bool = True


Value = TypeVar("Value")


def _converted(place: str, value: Any, kind: type[Value]) -> Value:
    """The value of a client's field as `kind`. Raises RequestError that names the place."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise RequestError(f'field "{place}" is wrong: {error}') from None


def _called(call: Call, kind: type[Value]) -> Value | None:
    """The arguments of a call as `kind`; None for others."""
    try:
        return msgspec.convert(call.value(), kind)
    except msgspec.ValidationError:
        return None


# Functions and custom tools: one text, which their own events report.


def _text_events(field: str, events: str) -> Callable[[Item], list[StreamEvent]]:
    def of(item: Item) -> list[StreamEvent]:
        place = {"item_id": item["id"]}
        return [
            {"type": f"response.{events}.delta", **place, "delta": item[field]},
            {"type": f"response.{events}.done", **place, field: item[field]},
        ]

    return of


FUNCTION = CallKind(
    "function_call",
    "fc",
    "function_call_output",
    "fco",
    written=lambda call: {"arguments": call.arguments or "{}"},
    read=lambda place, raw: {"arguments": string(place, raw, "arguments")},
    arguments=lambda place, item: decoded_arguments(f"{place}.arguments", item["arguments"]),
    begun=lambda _: {"arguments": ""},
    events=_text_events("arguments", "function_call_arguments"),
)
CUSTOM = CallKind(
    "custom_tool_call",
    "ctc",
    "custom_tool_call_output",
    "ctco",
    written=lambda call: {"input": input_of(call)},
    read=lambda place, raw: {"input": string(place, raw, "input")},
    arguments=lambda _, item: call_arguments(item["input"]),
    begun=lambda _: {"input": ""},
    events=_text_events("input", "custom_tool_call_input"),
)


# The shell tool: several commands, and what each of them writes.


class ShellAction(msgspec.Struct):
    commands: list[str]
    max_output_length: int | None = None
    timeout_ms: int | None = None


class ShellOutcome(msgspec.Struct, omit_defaults=True):
    type: Literal["exit", "timeout"]
    exit_code: int | None = None


class ShellOutput(msgspec.Struct):
    outcome: ShellOutcome
    stderr: str
    stdout: str


ShellOutputs = list[ShellOutput]


def _shell_written(call: Call) -> Item | None:
    action = _called(call, ShellAction)
    return None if action is None else {"action": msgspec.to_builtins(action)}


def _shell_read(place: str, raw: Item) -> Item:
    action = _converted(f"{place}.action", raw.get("action"), ShellAction)
    return {"action": msgspec.to_builtins(action)}


def _given(fields: Item) -> dict[str, Any]:
    """The arguments that a call has: those that are not null."""
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
    outputs = _converted(f"{place}.output", raw.get("output"), ShellOutputs)
    if len(outputs) > MAX_ITEMS:
        raise RequestError(f'field "{place}.output" has more than {MAX_ITEMS:,} items')
    fields = {**_COMPLETED, "call_id": string(place, raw, "call_id")}
    return fields | {"output": msgspec.to_builtins(outputs)}


def _shell_result(_: str, item: Item) -> str:
    return "\n".join(map(_shell_text, item["output"]))


def _shell_text(output: Item) -> str:
    """What a command wrote, and how it ended."""
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


# The local shell: one command as a list of words.


class LocalShellAction(msgspec.Struct):
    command: list[str]
    env: dict[str, str] = {}
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None


def _exec(action: LocalShellAction) -> Item:
    """Without null fields, which Vercel's AI SDK refuses."""
    return {"action": {"type": "exec", **_given(msgspec.to_builtins(action))}}


def _local_written(call: Call) -> Item | None:
    action = _called(call, LocalShellAction)
    return None if action is None else _exec(action)


def _local_read(place: str, raw: Item) -> Item:
    return _exec(_converted(f"{place}.action", raw.get("action"), LocalShellAction))


def _local_arguments(_: str, item: Item) -> dict[str, Any]:
    action = item["action"]
    return {name: action[name] for name in action if name != "type" and action[name] != {}}


def _local_read_output(place: str, raw: Item) -> Item:
    """The field `id` names the call, by its `call_id` or by the id of its item; some clients send
    the field `call_id` of other results."""
    call = string(place, raw, "id" if raw.get("call_id") is None else "call_id")
    fields = {"id": new_item_id("lsho"), **_COMPLETED, "call_id": call}
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
        """The operation in the form that clients know: a deletion has no diff."""
        fields = {"type": self.type, "path": self.path}
        return fields if self.type == "delete_file" else fields | {"diff": self.diff}


def _patch_written(call: Call) -> Item | None:
    operation = _called(call, PatchOperation)
    return None if operation is None else {"operation": operation.shown()}


def _patch_read(place: str, raw: Item) -> Item:
    operation = _converted(f"{place}.operation", raw.get("operation"), PatchOperation)
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


# The search for tools, whose result has their declarations.


def _search_read(place: str, raw: Item) -> Item:
    arguments = raw.get("arguments")
    if isinstance(arguments, str):
        arguments = decoded_arguments(f"{place}.arguments", arguments)
    if not isinstance(arguments, dict):
        raise RequestError(f'field "{place}.arguments" must be an object')
    check_value(f"{place}.arguments", arguments, max_bytes=MAX_ARGUMENTS_BYTES)
    return {"arguments": arguments, "execution": _execution(raw)}


def _search_read_output(place: str, raw: Item) -> Item:
    tools_in(place, raw)
    call = None if raw.get("call_id") is None else string(place, raw, "call_id")
    fields = {**_COMPLETED, "call_id": call, "execution": _execution(raw)}
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
    arguments=lambda _, item: item["arguments"],
    read_output=_search_read_output,
    result=_search_result,
    tool="tool_search",
    identified=False,
)

KINDS = (FUNCTION, CUSTOM, SHELL, LOCAL_SHELL, APPLY_PATCH, TOOL_SEARCH)
CALLS = {kind.call: kind for kind in KINDS}
OUTPUTS = {kind.output: kind for kind in KINDS}
