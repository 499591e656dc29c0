"""What requests demand of the form of a reply, as plain values that cross processes."""

from dataclasses import dataclass
from enum import Enum


class OutputKind(Enum):
    """How the form of a reply's text is written down."""

    JSON_SCHEMA = "json_schema"  # JSON text
    REGEX = "regex"  # Rust's syntax, without look-around; matches the whole text
    LARK = "lark"  # llguidance's variant
    GBNF = "gbnf"  # llama.cpp's form


@dataclass(frozen=True, slots=True)
class OutputForm:
    """The text of a reply, after its thinking, must have this form. `field`: of the request."""

    kind: OutputKind
    source: str
    field: str


@dataclass(frozen=True, slots=True)
class CallRule:
    """How a reply may call tools.

    `tools`: the names of those that it may call; `strict`: of those whose arguments must follow
    their schemas, any JSON object for the others. `required`: the reply consists of calls.
    `parallel`: it may have several. `field`: of the request.
    """

    tools: tuple[str, ...]
    strict: tuple[str, ...]
    required: bool
    parallel: bool
    field: str
