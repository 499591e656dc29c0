"""Declarations of tools in OpenAI's /v1/responses, in the request and in its items."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from runtime.errors import RequestError
from serve_app.api.fields import MAX_ITEMS, Body, Items, harmless, parsed
from serve_app.api.tools import NAME

NAMESPACE = "namespace"
# Names of typed tools that differ from their types.
_NAMES = {"computer_use_preview": "computer"}


class ShellSkill(Body):
    """Instructions for a task, in a directory on the machine of the shell tool."""

    name: str
    description: str
    path: str


class ShellEnvironment(Body):
    """Where a shell tool runs its commands. Types other than `local` are containers of OpenAI."""

    type: str
    skills: Items[ShellSkill] = Field(default_factory=list)


class ResponseFunction(Body):
    """A function, or a custom tool, which has a `format` instead of parameters."""

    type: str = "function"
    name: str | None = Field(default=None, pattern=NAME)
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    format: Any = None
    strict: bool = False
    defer_loading: bool = False
    output_schema: Any = harmless()
    asynchronous: Any = harmless(alias="async")
    allowed_callers: Any = harmless()


class ResponseTool(ResponseFunction):
    """A tool, or a namespace of tools. The type may determine name and parameters. `environment`:
    where a shell runs, or the operating system of a computer."""

    tools: Items[ResponseFunction] = Field(default_factory=list)
    environment: ShellEnvironment | str | None = None
    execution: str | None = None
    display_width: int | None = None
    display_height: int | None = None


@dataclass(frozen=True, slots=True)
class PlacedTool:
    """A tool with its place in the request and its namespace, if it is in one."""

    place: str
    tool: ResponseFunction
    namespace: str | None = None

    @property
    def name(self) -> str:
        """The tool's name, which some types determine."""
        kind = self.tool.type
        if kind not in ("function", "custom", NAMESPACE):
            return _NAMES.get(kind, kind)
        if self.tool.name is None:
            raise RequestError(f'field "{self.place}.name" is required')
        return self.tool.name

    @property
    def full_name(self) -> str:
        return full_name(self.namespace, self.name)


def full_name(namespace: str | None, name: str) -> str:
    """The name of a function as the model sees it. Deferred tools may be in a namespace of their
    own name (`offered_tools`), which is not repeated."""
    return name if namespace in (None, name) else f"{namespace}.{name}"


def declarations(place: str, tools: Iterable[ResponseTool]) -> Iterator[PlacedTool]:
    """The tools and namespaces of the field `place`."""
    return (PlacedTool(f"{place}[{index}]", tool) for index, tool in enumerate(tools))


def in_namespace(namespace: PlacedTool) -> Iterator[PlacedTool]:
    """The tools of a namespace."""
    assert isinstance(namespace.tool, ResponseTool)
    for index, tool in enumerate(namespace.tool.tools):
        yield PlacedTool(f"{namespace.place}.tools[{index}]", tool, namespace.name)


def placed_tools(place: str, tools: Iterable[ResponseTool]) -> Iterator[PlacedTool]:
    """The tools of the field `place`, including those in namespaces."""
    for each in declarations(place, tools):
        yield from in_namespace(each) if each.tool.type == NAMESPACE else (each,)


def tools_in(place: str, item: dict[str, Any]) -> list[ResponseTool]:
    """The tools that the item at `place` declares. Raises RequestError that names the field."""
    tools = item.get("tools")
    if not isinstance(tools, list) or len(tools) > MAX_ITEMS:
        raise RequestError(f'field "{place}.tools" must be a list of at most {MAX_ITEMS:,} tools')
    return [
        parsed(ResponseTool, f"{place}.tools[{index}]", tool) for index, tool in enumerate(tools)
    ]
