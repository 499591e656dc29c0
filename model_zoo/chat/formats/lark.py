"""Writing llguidance's grammars: rules in Lark that refer to JSON schemas by name."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from model_zoo.chat.formats.schema_place import Place
from model_zoo.grammars.json_schema import compilable, rebased, refers
from model_zoo.grammars.token_grammar import GrammarError, check_terminal

MAX_TERMINALS = 2000  # checking one takes about a millisecond
MAX_SCHEMA_BYTES = 4 * 2**20  # of all schemas, in which definitions are repeated

_TERMINALS = {
    "TEXT": "/(?s:.*)/",
    # Text of a reply that does not begin like a JSON call.
    "PLAIN": r"/[^\s\[{](?s:.*)/",
    "BLANK": r"/[ \n]{1,4}/",
}


class Unwritable(Exception):
    """What a schema demands at `pointer` cannot be expressed in the family's form of calls."""

    def __init__(self, pointer: str, reason: str) -> None:
        super().__init__(reason)
        self.pointer = pointer
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Match:
    """Any text that a regular expression matches."""

    regex: str


@dataclass(frozen=True, slots=True)
class Maybe:
    """What may be missing."""

    pieces: "tuple[Piece, ...]"


Piece = str | Match | Maybe
Pieces = tuple[Piece, ...]
LINE_END = Maybe(("\n",))


@dataclass(slots=True)
class LarkGrammar:
    """Collects the rules of one reply. `control`: ids of control tokens by text; a text with one of
    them is written with the token."""

    control: Mapping[str, int]
    rules: list[str] = field(default_factory=list)
    _schemas: dict[str, str] = field(default_factory=dict)
    _terminals: dict[str, str] = field(default_factory=dict)
    _schema_bytes: int = 0
    _named: int = 0

    def first(self, name: str, rule: str) -> str:
        """A reference to `rule`, which ends as soon as it matches and has precedence over free
        text. Control tokens are never part of free text."""
        lazy = "" if "<[" in rule else "[lazy]"
        self.rules.append(f"{name}{lazy}: {rule}")
        return name

    def rule(self, body: str) -> str:
        """A reference to a rule of its own."""
        name = self.name()
        self.rules.append(f"{name}: {body}")
        return name

    def name(self) -> str:
        """The name of one more rule."""
        self._named += 1
        return f"rule_{self._named}"

    def rule_of(
        self, place: Place, names: dict[str, str], options: Callable[[Place], list[str]]
    ) -> str:
        """A reference to the rule of a part of the schema, whose alternatives `options` writes.

        `names`: of the rules so far by place; a rule may refer to itself.
        """
        if place.schema is True or place.schema == {}:
            place = Place(place.root, {}, "any")
        name = names.get(place.pointer)
        if name is None:
            name = self.name()
            names[place.pointer] = name  # before its rule, which may contain it
            written = options(place)
            if not written:
                raise Unwritable(place.pointer, "no value is allowed there")
            self.rules.append(f"{name}: {' | '.join(written)}")
        return name

    def terminal(self, place: Place, expression: str) -> str:
        """A reference to what a regular expression with Lark's operators matches. `place`: the part
        of the schema that demands it."""
        if expression not in self._terminals:
            if len(self._terminals) == MAX_TERMINALS:
                raise Unwritable(place.pointer, "there are too many different texts")
            try:
                check_terminal(expression)
            except GrammarError as error:
                raise Unwritable(place.pointer, str(error)) from None
            self._terminals[expression] = f"T{len(self._terminals)}"
        return self._terminals[expression]

    def schema(self, place: Place, *, merged: bool = False) -> str:
        """A reference to JSON of a part of a schema. `merged`: it is one of several ways to write a
        value."""
        schema = place.schema
        if place.pointer and refers(schema):
            whole = rebased(place.root, "/$defs/whole")
            reference = quote(f"#/$defs/whole{place.pointer}", safe="#/$~")
            schema = {"$defs": {"whole": whole}, "$ref": reference}
        text = json.dumps(compilable(schema, merged=merged))
        if text not in self._schemas:
            self._schema_bytes += len(text)
            if self._schema_bytes > MAX_SCHEMA_BYTES:
                raise Unwritable("", "the schemas with their definitions are too large")
            self._schemas[text] = f"json_{len(self._schemas)}"
        return f"@{self._schemas[text]}"

    def spelled(self, *pieces: Piece) -> str:
        """Lark for these texts."""
        written, text = [], ""
        for piece in (*pieces, None):
            if isinstance(piece, str):
                text += piece
                continue
            written.append(self._spelled(text))
            text = ""
            if isinstance(piece, Match):
                written.append(f"/{piece.regex}/")
            elif piece is not None:
                written.append(f"({self.spelled(*piece.pieces)})?")
        return " ".join(filter(None, written))

    def until(
        self, place: Place, text: str, end: str, *, stop: str = "", without: Iterable[str] = ()
    ) -> str:
        """Text that the terminal expression `text` matches, and `end`.

        The text does not contain `stop`, or else `end`. `without`: terminal expressions of what it
        must not be.
        """
        stopped = json.dumps(stop or end, ensure_ascii=False)
        refused = [f"({_TERMINALS['TEXT']} {stopped} {_TERMINALS['TEXT']})", *without]
        free = " & ".join([f"({text})", *(f"~{each}" for each in refused)])
        literal, control, rest = self._spelled(end).partition("<[")
        terminal = self.terminal(place, f"({free}) {literal}")
        if literal:
            # It cannot continue after its end, which the library must know before a control token.
            name = f"until_{terminal.lower()}"
            if f"{name}[lazy]: {terminal}" not in self.rules:
                self.rules.append(f"{name}[lazy]: {terminal}")
            terminal = name
        return f"{terminal} {control}{rest}"

    def listed(self, start: str, answer: Mapping[str, Any] | None, *, name: str) -> str:
        """The list of grammars. `answer`: the grammar called `name`."""
        lines = [f"start: {start}", *self.rules]
        lines += [f"{name}: {expression}" for expression, name in self._terminals.items()]
        lark = "\n".join(lines)
        lines += [f"{name}: {each}" for name, each in _TERMINALS.items() if name in lark]
        others = [
            {"name": each, "json_schema": json.loads(schema)}
            for schema, each in self._schemas.items()
        ]
        if answer is not None:
            others.append({**answer, "name": name})
        return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, *others]})

    def _spelled(self, text: str) -> str:
        """Lark for exactly this text."""
        found = [marker for marker in self.control if marker in text]
        if not found:
            return json.dumps(text, ensure_ascii=False) if text else ""
        markers = "|".join(map(re.escape, sorted(found, key=len, reverse=True)))
        pieces = re.split(f"({markers})", text)
        return " ".join(
            f"<[{self.control[piece]}]>"
            if piece in self.control
            else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
            if piece
        )
