"""OpenAI's custom tools, whose input is a text instead of JSON.

Models call them as functions with one argument, the text `input`.
"""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from model_zoo.grammars.constraint import CUSTOM_INPUT, OutputForm, OutputKind
from runtime.errors import RequestError
from serve_app.api.fields import Body
from serve_app.api.output_forms import grammar_text
from serve_app.api.reply_reader import Call
from serve_app.api.tools import NAME, Function, described

_TEXT = {"type": "string", "description": "The whole input of the tool, a plain text."}
_PARAMETERS = {
    "type": "object",
    "properties": {CUSTOM_INPUT: _TEXT},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}
_SYNTAXES = {
    "lark": (OutputKind.LARK, "Lark grammar"),
    "regex": (OutputKind.REGEX, "regular expression"),
}


class CustomTool(Body):
    """A custom tool. `format`: the form of its input; by default any text."""

    name: str = Field(pattern=NAME)
    description: str | None = None
    format: Any = None


class ChatCompletionTool(Body):
    """A function or a custom tool of /v1/chat/completions."""

    type: Literal["function", "custom"] = "function"
    function: Function | None = None
    custom: CustomTool | None = None


def declared_tools(tools: Sequence[ChatCompletionTool]) -> tuple[dict[str, Any], ...]:
    """The tools as templates read them. Raises RequestErrors as `described` does."""
    functions = [_function(f"tools[{index}]", tool) for index, tool in enumerate(tools)]
    return described(functions)


def strict_tools(tools: Sequence[ChatCompletionTool]) -> tuple[str, ...]:
    """The functions whose calls must follow their schemas."""
    functions = [tool.function for tool in tools if tool.type == "function"]
    return tuple(each.name for each in functions if each is not None and each.strict)


def custom_names(tools: Sequence[ChatCompletionTool]) -> frozenset[str]:
    """The names of the custom tools."""
    return frozenset(each.name for _, each in _custom(tools))


def input_forms(tools: Sequence[ChatCompletionTool]) -> dict[str, OutputForm]:
    """The forms of the inputs of custom tools, as far as they have one."""
    return {
        each.name: form
        for place, each in _custom(tools)
        if (form := input_form(place, each.format, nested=True)) is not None
    }


def input_form(place: str, format: Any, *, nested: bool) -> OutputForm | None:
    """The form that the field `format` of the tool at `place` demands of the input; None for any
    text. `nested`: the grammar is in an object `grammar` instead of beside the type."""
    match format:
        case None | {"type": "text"}:
            return None
        case {"type": "grammar"}:
            place = f"{place}.format"
            if nested:
                place, format = f"{place}.grammar", format.get("grammar")
            match format:
                case {"syntax": "lark" | "regex" as syntax, "definition": definition}:
                    source = grammar_text(f"{place}.definition", definition)
                    return OutputForm(_SYNTAXES[syntax][0], source, f"{place}.definition")
            raise RequestError(f'field "{place}.syntax" must be lark or regex')
    raise RequestError(f'field "{place}.format.type" must be text or grammar')


def function_of(name: str, description: str | None, form: OutputForm | None) -> Function:
    """The custom tool as the function that templates show."""
    told = [description] if description else []
    if form is not None:
        language = next(words for kind, words in _SYNTAXES.values() if kind is form.kind)
        told.append(f"The input must match this {language}:\n{form.source}")
    return Function(name=name, description="\n\n".join(told), parameters=_PARAMETERS)


def call_arguments(input: str) -> dict[str, Any]:
    """The arguments of the function for an input."""
    return {CUSTOM_INPUT: input}


def input_of(call: Call) -> str:
    """The input of a call. A model that has not called the tool by its schema has given the
    arguments themselves as the input: JSON text."""
    match call.value():
        case {"input": str(text), **others} if not others:
            return text
    return call.arguments or "{}"


def _function(place: str, tool: ChatCompletionTool) -> Function:
    custom = tool.type == "custom"
    if custom and tool.custom is not None:
        form = input_form(f"{place}.custom", tool.custom.format, nested=True)
        return function_of(tool.custom.name, tool.custom.description, form)
    if custom or tool.function is None:
        raise RequestError(f'field "{place}.{tool.type}" is required')
    return tool.function


def _custom(tools: Sequence[ChatCompletionTool]) -> list[tuple[str, CustomTool]]:
    """The custom tools with their places in the request."""
    return [
        (f"tools[{index}].custom", tool.custom)
        for index, tool in enumerate(tools)
        if tool.type == "custom" and tool.custom is not None
    ]
