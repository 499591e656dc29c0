"""The calls that a reply may have, and grammars of their arguments."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model_zoo.chat.formats.arguments import Arguments
from model_zoo.chat.formats.lark import LarkGrammar, Unwritable
from model_zoo.chat.formats.schema_place import Place


@dataclass(frozen=True, slots=True)
class AllowedCalls:
    """`arguments`: the schema of the arguments by tool. `required`: only calls may follow the
    thinking. `parallel`: there may be several calls."""

    arguments: Mapping[str, Any]
    required: bool
    parallel: bool


class UnwritableArguments(Exception):
    """A tool's schema cannot be enforced for its arguments; `pointer`: the place in the schema."""

    def __init__(self, tool: str, error: Unwritable) -> None:
        super().__init__(error.reason)
        self.tool = tool
        self.pointer = error.pointer
        self.reason = error.reason


def argument_rules(lark: LarkGrammar, form: Arguments, calls: AllowedCalls) -> dict[str, str]:
    """Lark for the arguments of each tool. Raises UnwritableArguments."""
    rules = {}
    for name, schema in calls.arguments.items():
        try:
            rules[name] = form.rule(lark, Place.whole(schema))
        except Unwritable as error:
            raise UnwritableArguments(name, error) from None
        except RecursionError:
            deep = Unwritable("", "its parts refer to each other too deeply")
            raise UnwritableArguments(name, deep) from None
    return rules
