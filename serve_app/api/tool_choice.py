"""How a request lets the model call tools: `tool_choice`, parallel calls, and strict schemas."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from model_zoo.grammars.constraint import CallRule, OutputForm
from model_zoo.grammars.json_schema import check_references
from runtime.errors import RequestError
from serve_app.api.fields import check_count

# A tool in the form that templates read.
Tool = dict[str, Any]
# Limit of the parts that the schemas of a request's tools have in a grammar. The check of a few
# hundred bytes that are repeated thousands of times takes 50 ms.
MAX_PARTS = 100_000


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`names`: the tools that may be called; None: all. `field`: the field of the request, for
    error messages."""

    names: tuple[str, ...] | None = None
    required: bool = False
    field: str = "tool_choice"


def openai_choice(value: Any) -> ToolChoice:
    """The choice in OpenAI's field `tool_choice`."""
    match value:
        case None | "auto":
            return ToolChoice()
        case "none":
            return ToolChoice(names=())
        case "required":
            return ToolChoice(required=True)
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice((name,), required=True)
        case {"type": "custom", "custom": {"name": str(name)}}:
            return ToolChoice((name,), required=True)
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": ("auto" | "required") as mode, "tools": [*tools]},
        }:
            check_count("tool_choice.allowed_tools.tools", tools)
            names = tuple(_allowed(index, tool) for index, tool in enumerate(tools))
            return ToolChoice(names, required=mode == "required")
    raise RequestError(
        'field "tool_choice" must be none, auto, required, {"type": "function", "function": '
        '{"name": ...}} or {"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": '
        "[...]}}"
    )


def call_rule(
    tools: Sequence[Tool],
    choice: ToolChoice,
    *,
    strict: Sequence[str],
    parallel: bool,
    schemas: Mapping[str, str] | None = None,
    inputs: Mapping[str, OutputForm] | None = None,
) -> CallRule | None:
    """The rule for calls of `tools`; None if nothing has to be enforced.

    `strict`: the names of tools whose calls must follow their schemas even if the model decides
    whether to call. `schemas`: the fields of the request that have the schemas of tools, by name,
    for errors. `inputs`: the forms of the inputs of custom tools, which are strict. Raises
    RequestError for choices of tools that are not declared.
    """
    # Dictionaries are sets in order.
    declared = dict.fromkeys(map(_name, tools))
    names = declared if choice.names is None else dict.fromkeys(choice.names)
    for name in names:
        if name not in declared:
            raise RequestError(
                f'field "{choice.field}" names the tool "{name[:80]}", which "tools" does not '
                "declare"
            )
    if choice.required and not names:
        none = (
            '"tools" declares no tool' if choice.names is None else "allows no tool that is served"
        )
        raise RequestError(f'field "{choice.field}" requires a call, but {none}')
    inputs, schemas = inputs or {}, schemas or {}
    strict = (*strict, *inputs)
    held = names if choice.required else {name: None for name in strict if name in names}
    limited = len(names) < len(declared)
    if not names or not (held or limited or not parallel):
        return None
    _check_schemas({name: tool for tool in tools if (name := _name(tool)) in held}, schemas)
    field = choice.field if choice.required or limited else "tools"
    forms = tuple((name, inputs[name]) for name in held if name in inputs)
    fields = tuple((name, schemas[name]) for name in held if name in schemas)
    return CallRule(tuple(names), tuple(held), choice.required, parallel, field, forms, fields)


def _name(tool: Tool) -> str:
    return str(tool["function"]["name"])


def _check_schemas(tools: Mapping[str, Tool], fields: Mapping[str, str]) -> None:
    parts = 0
    for name, tool in tools.items():
        try:
            parts += check_references(fields.get(name, "tools"), tool["function"]["parameters"])
        except RequestError as error:
            raise RequestError(f'tool "{name}": {error}') from None
        if parts > MAX_PARTS:
            raise RequestError(
                f'field "tools" has schemas with more than {MAX_PARTS:,} parts in all, those that '
                "are repeated counted each time. Simplify them."
            )


def _allowed(index: int, tool: Any) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
        case {"type": "custom", "custom": {"name": str(name)}}:
            return name
    raise RequestError(
        f'field "tool_choice.allowed_tools.tools[{index}]" must name a tool of "tools"'
    )
