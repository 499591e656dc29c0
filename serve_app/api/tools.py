"""Tools of requests: the functions that a model may call, as OpenAI and Ollama describe them."""

import secrets
import string
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from runtime.errors import RequestError
from serve_app.api.fields import Body
from serve_app.api.json_values import carried, check_value, decoded_json

MAX_TOOLS_BYTES = 2**20
_MAX_ARGUMENTS_BYTES = 2**20
NAME = r"^[a-zA-Z0-9_.:/-]{1,256}$"
# Mistral's templates require ids of exactly this form.
_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9


class Function(Body):
    """The signature of a tool; `parameters` is a JSON schema."""

    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool = False


class Tool(Body):
    """One function. Other types of tools are refused."""

    type: Literal["function"] = "function"
    function: Function


def declared(tools: Sequence[Tool]) -> tuple[dict[str, Any], ...]:
    """The tools as templates read them. Raises RequestErrors as `described` does."""
    return described([tool.function for tool in tools])


def strict_names(tools: list[Tool]) -> tuple[str, ...]:
    """The tools whose calls must follow their schemas."""
    return tuple(tool.function.name for tool in tools if tool.function.strict)


def schema_fields(functions: Sequence[Function | None]) -> dict[str, str]:
    """The fields with the schemas of the functions of `tools`, by name; None: another tool."""
    return {
        each.name: f"tools[{index}].function.parameters"
        for index, each in enumerate(functions)
        if each is not None
    }


def described(functions: Sequence[Function]) -> tuple[dict[str, Any], ...]:
    """The functions of the field `tools` as templates read them. Raises RequestError for names that
    occur twice and for oversized schemas."""
    names = set()
    for function in functions:
        if function.name in names:
            raise RequestError(f'field "tools" has the name "{function.name}" twice')
        names.add(function.name)
    tools = tuple(_described(function) for function in functions)
    check_value("tools", list(tools), max_bytes=MAX_TOOLS_BYTES)
    return tools


def decoded_arguments(place: str, text: str) -> dict[str, Any]:
    """The arguments of a call in a history from the text of the field `place`. Templates need an
    object: a text that is not one, such as of a call that `max_tokens` has cut, has no arguments.
    """
    try:
        arguments = decoded_json(text)
    except RequestError:
        return {}
    if not isinstance(arguments, dict):
        return {}
    return checked_arguments(place, arguments)


def checked_arguments(place: str, arguments: Any) -> dict[str, Any]:
    """The arguments of a call in a history at `place`, with numbers that replicas can be sent.
    Raises RequestError for others than an object, and for what is too large or nests too deeply."""
    if not isinstance(arguments, dict):
        raise RequestError(f'field "{place}" must be an object')
    found: dict[str, Any] = carried(place, arguments, max_bytes=_MAX_ARGUMENTS_BYTES)
    return found


def new_call_id() -> str:
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))


def _described(function: Function) -> dict[str, Any]:
    parameters = function.parameters or {"type": "object", "properties": {}}
    return {
        "type": "function",
        "function": {
            "name": function.name,
            "description": function.description or "",
            "parameters": parameters,
        },
    }
