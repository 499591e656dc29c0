"""The forms that requests demand of replies, as plain values that cross processes."""

from dataclasses import dataclass
from enum import Enum

# The argument of a custom tool, whose only argument is a text.
CUSTOM_INPUT = "input"


class OutputKind(Enum):
    """The language in which the form of a reply's text is stated."""

    JSON_SCHEMA = "json_schema"  # JSON text
    REGEX = "regex"  # Rust's syntax, without look-around; matches the whole text
    LARK = "lark"  # llguidance's variant
    GBNF = "gbnf"  # llama.cpp's form


@dataclass(frozen=True, slots=True)
class OutputForm:
    """The form that the text of a reply must have, after its thinking. `field`: the field of the
    request, for error messages."""

    kind: OutputKind
    source: str
    field: str


@dataclass(frozen=True, slots=True)
class CallRule:
    """How a reply may call tools.

    `tools`: names of the tools that it may call; `strict`: names of those whose arguments must
    follow their schemas (otherwise they may be any JSON object). `required`: the reply must consist
    of calls. `parallel`: it may have several calls. `field`: the field of the request, for errors.
    `inputs`: names of strict custom tools and the forms of their inputs. `schemas`: the names of
    strict tools, each with the field of the request that has its schema, for errors.
    """

    tools: tuple[str, ...]
    strict: tuple[str, ...]
    required: bool
    parallel: bool
    field: str
    inputs: tuple[tuple[str, OutputForm], ...] = ()
    schemas: tuple[tuple[str, str], ...] = ()

    def schema_field(self, tool: str) -> str:
        return dict(self.schemas).get(tool, "tools")
