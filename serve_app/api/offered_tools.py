"""The tools that a request to OpenAI's /v1/responses offers to the model, each as a function.

`TYPES` has the types of tools that are served. Clients execute the calls.
"""

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, replace
from typing import Any

from model_zoo.grammars.constraint import OutputForm
from runtime.errors import RequestError
from serve_app.api.custom_tools import function_of, input_form
from serve_app.api.fields import check_count
from serve_app.api.reply_reader import Call
from serve_app.api.responses_calls import CUSTOM, FUNCTION, CallKind
from serve_app.api.responses_parts import Item
from serve_app.api.responses_tools import (
    NAMESPACE,
    PlacedTool,
    ResponseFunction,
    ResponseTool,
    ShellEnvironment,
    declarations,
    in_namespace,
    placed_tools,
)
from serve_app.api.tool_choice import ToolChoice, openai_choice
from serve_app.api.tools import Function, described
from serve_app.api.typed_calls import APPLY_PATCH, COMPUTER, LOCAL_SHELL, SHELL, TOOL_SEARCH
from serve_app.api.typed_functions import (
    apply_patch_function,
    computer_function,
    local_shell_function,
    shell_function,
)

MAX_NAME_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class ToolType:
    """A type of tools. `calls`: the items of its calls. `function`: the function that represents a
    tool. `shown`: the fields that the response object repeats. `strict`: whether calls always
    follow the parameters, because their items can express nothing else."""

    calls: CallKind
    function: Callable[[PlacedTool], Function]
    shown: tuple[str, ...] = ()
    strict: bool = False


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The tools that the model may call."""

    placed: tuple[PlacedTool, ...]

    @classmethod
    def of(cls, tools: list[ResponseTool], found: Iterable[PlacedTool]) -> "OfferedTools":
        """The `tools` of the request that are not left out, and the tools `found` in items of the
        conversation, such as results of searches. Raises RequestError for types that are not
        served."""
        dropped = left_out(tools)
        every = placed_tools("tools", tools)
        kept = [_served(each) for each in every if not (dropped and _elsewhere(each))]
        if any(tool.type == "tool_search" for tool in dropped):
            kept = [*map(_as_found, kept)]
        known = {each.full_name for each in kept}
        for each in found:
            if not _elsewhere(each) and _served(each).full_name not in known:
                known.add(each.full_name)
                kept.append(each)
        return cls(tuple(kept))

    def functions(self) -> tuple[dict[str, Any], ...]:
        """The tools as templates read them. Names of a namespace's tools begin with its own."""
        return described([_function(each) for each in self.placed])

    def by_name(self) -> dict[str, PlacedTool]:
        """The tools by the names of `functions`."""
        return {each.full_name: each for each in self.placed}

    def strict(self) -> list[str]:
        """The names of the tools whose calls must follow their parameters."""
        strict = (each for each in self.placed if each.tool.strict or _type(each).strict)
        return [each.full_name for each in strict]

    def schema_fields(self) -> dict[str, str]:
        """The fields of the request with the schemas of the tools that have one, by name."""
        given = (each for each in self.placed if each.tool.parameters)
        return {each.full_name: f"{each.place}.parameters" for each in given}

    def inputs(self) -> dict[str, OutputForm]:
        """The grammars of custom tools that have one, by name."""
        custom = (each for each in self.placed if each.tool.type == "custom")
        return {each.full_name: form for each in custom if (form := _input_form(each))}


def left_out(tools: list[ResponseTool]) -> list[ResponseFunction]:
    """The tools of OpenAI's servers that are left out, which they are if there are other tools."""
    offered = [each.tool for each in declarations("tools", tools) if _elsewhere(each)]
    return offered if len(offered) < len(tools) else []


def call_item(tool: PlacedTool | None, call: Call) -> tuple[CallKind, Item]:
    """The kind of the item for a call of `tool`, and the item without ids. Arguments that the item
    of the tool's type cannot express become a function call, which clients answer with an error."""
    kind = FUNCTION if tool is None else _type(tool).calls
    fields = kind.written(call)
    if fields is None:
        kind = FUNCTION
        fields = kind.written(call)
    assert fields is not None
    item = {"type": kind.call, "status": "completed", "call_id": call.id}
    if kind.tool is None:
        item["name"] = call.name if tool is None else tool.name
        if tool is not None and tool.namespace is not None:
            item["namespace"] = tool.namespace
    return kind, item | fields


def responses_choice(value: Any, dropped: Set[str] = frozenset()) -> ToolChoice:
    """The choice in the field `tool_choice`, which nests less than that of chat completions.
    `dropped`: the types of tools that are left out; among allowed tools they are ignored."""
    match value:
        case None | "auto" | "none" | "required":
            return openai_choice(value)
        case {
            "type": "allowed_tools",
            "mode": ("auto" | "required") as mode,
            "tools": [*tools],
        }:
            check_count("tool_choice.tools", tools)
            names = [_chosen(tool) for tool in tools if not _is_of(tool, dropped)]
            if all(names):
                return ToolChoice(tuple(filter(None, names)), required=mode == "required")
        case {"type": str(kind)} if kind in dropped:
            raise RequestError(f'field "tool_choice" is of type "{kind[:80]}", which is not served')
    name = _chosen(value)
    if name is not None:
        return ToolChoice((name,), required=True)
    raise RequestError(
        'field "tool_choice" must be none, auto, required, {"type": "function", "name": ...} or '
        '{"type": "allowed_tools", "mode": ..., "tools": [{"type": "function", "name": ...}]}'
    )


def shown_tools(tools: list[ResponseTool]) -> list[Item]:
    """The declarations in the response object, without those that are left out. Raises RequestError
    for types that are not served."""
    dropped = left_out(tools)
    every = declarations("tools", tools)
    return [_shown_tool(each) for each in every if not (dropped and _elsewhere(each))]


def _shown_tool(placed: PlacedTool) -> Item:
    tool = placed.tool
    if tool.type == NAMESPACE and placed.namespace is None:
        described = {"name": placed.name, "description": tool.description}
        return {"type": NAMESPACE, **described, "tools": [*map(_shown_tool, in_namespace(placed))]}
    names = _type(_served(placed)).shown
    shown: Item = {"type": tool.type, **{name: _shown(getattr(tool, name)) for name in names}}
    if tool.type == "custom":
        shown["format"] = tool.format or {"type": "text"}
    return shown


def _shown(value: Any) -> Any:
    if isinstance(value, ShellEnvironment):
        return value.model_dump(include={"type", "skills"})
    return value


def shown_choice(value: Any, dropped: Set[str] = frozenset()) -> Any:
    """`tool_choice` as the response object repeats it: the fields that `responses_choice` reads."""
    if isinstance(value, str):
        return value
    choice = responses_choice(value, dropped)
    if choice.names is None:
        return "auto"
    if value["type"] != "allowed_tools":
        return _reference(value)
    return {
        "type": "allowed_tools",
        "mode": value["mode"],
        "tools": [_reference(tool) for tool in value["tools"] if not _is_of(tool, dropped)],
    }


def _elsewhere(placed: PlacedTool) -> bool:
    """Whether a tool runs on OpenAI's servers and may be left out: agents such as Codex offer a web
    search and image generation in each request, and a model that sees all tools needs no search."""
    tool = placed.tool
    if isinstance(tool, ResponseTool) and tool.type == "tool_search":
        return tool.execution != "client"
    return placed.namespace is None and tool.type.startswith(("web_search", "image_generation"))


def _as_found(placed: PlacedTool) -> PlacedTool:
    """The tool as a search on OpenAI's servers returns it: a deferred tool is in a namespace of its
    own name, by which clients such as OpenAI's agents know it."""
    tool = placed.tool
    alone = placed.namespace is None and tool.type in ("function", "custom")
    return replace(placed, namespace=placed.name) if alone and tool.defer_loading else placed


def _is_of(tool: Any, kinds: Set[str]) -> bool:
    match tool:
        case {"type": str(kind)}:
            return kind in kinds
    return False


def _chosen(tool: Any) -> str | None:
    """The name of the tool that an object refers to; None if it does not."""
    match tool:
        case {"type": "function" | "custom", "name": str(name)}:
            return name
        case {"type": "shell" | "local_shell" | "apply_patch" | "tool_search" as name}:
            return str(name)
        case {"type": "computer" | "computer_use" | "computer_use_preview"}:
            return "computer"
    return None


def _reference(tool: Item) -> Item:
    return {name: tool[name] for name in ("type", "name") if name in tool}


def _served(placed: PlacedTool) -> PlacedTool:
    place, kind = placed.place, placed.tool.type
    known = kind in TYPES and (placed.namespace is None or TYPES[kind].calls.tool is None)
    if not known or _elsewhere(placed):
        raise RequestError(f'field "{place}.type" is "{kind[:80]}", which is not served')
    return placed


def _type(placed: PlacedTool) -> ToolType:
    return TYPES[placed.tool.type]


def _function(placed: PlacedTool) -> Function:
    if len(placed.full_name) > MAX_NAME_CHARACTERS:
        raise RequestError(
            f'field "{placed.place}.name" has more than {MAX_NAME_CHARACTERS} characters with its '
            "namespace"
        )
    return _type(placed).function(placed)


def _declared(placed: PlacedTool) -> Function:
    tool = placed.tool
    return Function(name=placed.full_name, description=tool.description, parameters=tool.parameters)


def _custom(placed: PlacedTool) -> Function:
    return function_of(placed.full_name, placed.tool.description, _input_form(placed))


def _input_form(placed: PlacedTool) -> OutputForm | None:
    return input_form(placed.place, placed.tool.format, nested=False)


TYPES = {
    "function": ToolType(FUNCTION, _declared, ("name", "description", "parameters", "strict")),
    "custom": ToolType(CUSTOM, _custom, ("name", "description")),
    "shell": ToolType(SHELL, shell_function, ("environment",), strict=True),
    "local_shell": ToolType(LOCAL_SHELL, local_shell_function, strict=True),
    "apply_patch": ToolType(APPLY_PATCH, apply_patch_function, strict=True),
    "computer": ToolType(COMPUTER, computer_function, strict=True),
    "computer_use_preview": ToolType(
        COMPUTER, computer_function, ("display_width", "display_height", "environment"), strict=True
    ),
    "tool_search": ToolType(TOOL_SEARCH, _declared, ("description", "parameters", "execution")),
}
