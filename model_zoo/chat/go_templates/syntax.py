"""The syntax tree of a template in the language of Go's `text/template`."""

from dataclasses import dataclass, field
from typing import NoReturn

from runtime.errors import ModelFileError


def refuse(line: int, reason: str) -> NoReturn:
    raise ModelFileError(f"line {line}: {reason}")


@dataclass(frozen=True, slots=True)
class Literal:
    """A constant; None is `nil`."""

    value: str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Dot:
    """The current value."""


@dataclass(frozen=True, slots=True)
class Variable:
    """`$` or `$name`; `name` without the dollar sign."""

    name: str


@dataclass(frozen=True, slots=True)
class FunctionName:
    name: str


@dataclass(frozen=True, slots=True)
class FieldAccess:
    """`name` of the value of `of`."""

    of: "Operand"
    name: str


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Commands, each of which receives the previous result as its last argument.

    `variables`: names that the result is assigned to; `declares`: whether they are new (`:=`).
    """

    commands: "tuple[tuple[Operand, ...], ...]"
    variables: tuple[str, ...] = ()
    declares: bool = False
    line: int = 0


Operand = Literal | Dot | Variable | FunctionName | FieldAccess | Pipeline


@dataclass(frozen=True, slots=True)
class TextNode:
    text: str


@dataclass(frozen=True, slots=True)
class ActionNode:
    """Prints the value of its pipeline, unless the pipeline sets a variable."""

    pipeline: Pipeline


@dataclass(frozen=True, slots=True)
class BranchNode:
    """`kind`: "if", "with" or "range"."""

    kind: str
    pipeline: Pipeline
    body: "tuple[Node, ...]"
    otherwise: "tuple[Node, ...]" = ()


@dataclass(frozen=True, slots=True)
class TemplateNode:
    """`{{ template "name" pipeline }}`."""

    name: str
    pipeline: Pipeline | None
    line: int


@dataclass(frozen=True, slots=True)
class JumpNode:
    """`kind`: "break" or "continue"."""

    kind: str
    line: int


Node = TextNode | ActionNode | BranchNode | TemplateNode | JumpNode


@dataclass(frozen=True, slots=True)
class GoTemplate:
    """The main template, and the templates that it defines, by name."""

    main: tuple[Node, ...]
    defined: dict[str, tuple[Node, ...]] = field(default_factory=dict)
