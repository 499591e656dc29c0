"""Writes llguidance grammars: rules in Lark that refer to JSON schemas by name."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

from model_zoo.chat.formats.scanner import MAX_DEPTH, encoded
from model_zoo.chat.formats.schema_place import Place
from model_zoo.grammars.json_schema import compilable, rebased, refers
from model_zoo.grammars.token_grammar import GrammarError, check, followed, terminal_matches

MAX_RULES = 50_000  # a recursive schema needs several for each level
MAX_TERMINALS = 2000  # checking one takes about a millisecond
MAX_SCHEMA_BYTES = 4 * 2**20  # limit of all schemas, which repeat their definitions

_UNSATISFIABLE = "Unsatisfiable"  # occurs in error messages of llguidance
_TERMINALS = {
    "TEXT": "/(?s:.*)/",
    # PLAIN: text of a reply that does not begin like a JSON call.
    "PLAIN": r"/[^\s\[{](?s:.*)/",
    "BLANK": r"/[ \n]{1,4}/",
}


class Unwritable(Exception):
    """A requirement of a schema, at `pointer`, cannot be expressed in the family's form of
    calls."""

    def __init__(self, pointer: str, reason: str) -> None:
        super().__init__(reason)
        self.pointer = pointer.partition("/~2")[0]  # without the names that `plain` makes up
        self.reason = reason


class NoValue(Unwritable):
    """The schema at `pointer` allows no value, or none that can be written."""

    def __init__(self, pointer: str, reason: str = "") -> None:
        none = f"the schema allows no value nested at most {MAX_DEPTH} deep"
        super().__init__(pointer, reason or none)


@dataclass(frozen=True, slots=True)
class Match:
    """Any text that a regular expression matches."""

    regex: str


@dataclass(frozen=True, slots=True)
class Maybe:
    """Optional pieces."""

    pieces: "tuple[Piece, ...]"


Piece = str | Match | Maybe
Pieces = tuple[Piece, ...]
LINE_END = Maybe(("\n",))


@dataclass(slots=True)
class LarkGrammar:
    """Collects the rules of one reply. `control`: ids of control tokens by text; where such a text
    occurs, the grammar demands the token."""

    control: Mapping[str, int]
    rules: list[str] = field(default_factory=list)
    _schemas: dict[str, str] = field(default_factory=dict)
    _terminals: dict[str, str] = field(default_factory=dict)
    _checked: dict[str, bool] = field(default_factory=dict)
    _schema_bytes: int = 0
    _named: int = 0

    def first(self, name: str, rule: str) -> str:
        """A reference to `rule`, which ends as soon as it matches and has precedence over free
        text. Control tokens are never part of free text."""
        lazy = "" if "<[" in rule else "[lazy]"
        self.rules.append(f"{name}{lazy}: {rule}")
        return name

    def rule(self, body: str) -> str:
        """A reference to a new rule with this body."""
        name = self.name()
        self.rules.append(f"{name}: {body}")
        return name

    def name(self) -> str:
        """A name for a new rule."""
        if self._named == MAX_RULES:
            raise Unwritable("", "the schemas have too many parts")
        self._named += 1
        return f"rule_{self._named}"

    def rule_of(
        self,
        place: Place,
        key: str,
        names: dict[str, str | None],
        options: Callable[[Place], list[str]],
    ) -> str:
        """A reference to the rule of a part of the schema, whose alternatives `options` writes.

        `names`: names of existing rules by `key`; None if the part has no values. Raises NoValue.
        """
        if key not in names:
            names[key] = name = self.name()  # set before the rule is written, which may refer to it
            try:
                written = options(place)
            except NoValue:
                written = []
            if written:
                self.rules.append(f"{name}: {' | '.join(written)}")
            else:
                names[key] = None
        found = names[key]
        if found is None:
            raise NoValue(place.pointer)
        return found

    def terminal(self, place: Place, expression: str) -> str:
        """A reference to a terminal: a regular expression with Lark's operators. `place`: the part
        of the schema that it belongs to, for errors."""
        if not self.allows(place, expression):
            raise self.refusal(place, "the schema allows no text")
        return self._terminals.setdefault(expression, f"T{len(self._terminals)}")

    def allows(self, place: Place, expression: str) -> bool:
        """Whether a terminal expression matches some text."""
        if expression not in self._checked:
            if len(self._checked) == MAX_TERMINALS:
                raise Unwritable(place.pointer, "there are too many different texts")
            try:
                self._checked[expression] = terminal_matches(expression)
            except GrammarError as error:
                raise Unwritable(place.pointer, str(error)) from None
        return self._checked[expression]

    def refusal(self, place: Place, reason: str) -> Unwritable:
        """The error for a part of the schema: NoValue if it allows no value even as JSON, else
        Unwritable with the reason."""
        kind = Unwritable if self._error(self._source(place)) is None else NoValue
        return kind(place.pointer, reason)

    def followed(self, place: Place, values: Sequence[Any]) -> list[Any]:
        """The values that follow the schema."""
        source = self._source(place)
        self._charge(source)
        schema = json.loads(source)
        try:
            follow = followed(schema, (encoded(v) for v in values))
        except GrammarError:
            return []
        return list(compress(values, follow))

    def schema(self, place: Place, *, merged: bool = False) -> str:
        """A reference to the JSON of a part of a schema. `merged`: JSON is one of several notations
        of the value."""
        text = self._source(place, merged=merged)
        if text not in self._schemas:
            error = self._error(text)
            if error is not None:
                raise (NoValue if _UNSATISFIABLE in error else Unwritable)(place.pointer, error)
            self._schemas[text] = f"json_{len(self._schemas)}"
        return f"@{self._schemas[text]}"

    def _error(self, source: str) -> str | None:
        """The error that llguidance reports for a grammar; None if it compiles."""
        self._charge(source)
        try:
            check(json.dumps({"grammars": [{"json_schema": json.loads(source)}]}))
        except GrammarError as error:
            return str(error)
        return None

    def _charge(self, source: str) -> None:
        """Raises Unwritable if too much has been compiled."""
        self._schema_bytes += len(source)
        if self._schema_bytes > MAX_SCHEMA_BYTES:
            raise Unwritable("", "the schemas with their definitions are too large")

    def _source(self, place: Place, *, merged: bool = False) -> str:
        """A part of a schema as a separate schema, in JSON."""
        schema = place.schema
        if place.pointer and refers(schema):
            moved, whole = (rebased(each, "/$defs/whole") for each in (schema, place.root))
            schema = {**moved, "$defs": {"whole": whole}}
        return json.dumps(compilable(schema, merged=merged))

    def spelled(self, *pieces: Piece) -> str:
        """Lark for a sequence of pieces."""
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
        """Lark for a text that the terminal expression `text` matches, followed by `end`.

        The text must not contain `stop`, by default `end`. `without`: terminal expressions that it
        must not match.
        """
        stopped = encoded(stop or end)
        refused = [f"({_TERMINALS['TEXT']} {stopped} {_TERMINALS['TEXT']})", *without]
        free = " & ".join([f"({text})", *(f"~{each}" for each in refused)])
        literal, control, rest = self._spelled(end).partition("<[")
        terminal = self.terminal(place, f"({free}) {literal}")
        if literal:
            # Lazy, because the library must know before a control token that the text has ended.
            name = f"until_{terminal.lower()}"
            if f"{name}[lazy]: {terminal}" not in self.rules:
                self.rules.append(f"{name}[lazy]: {terminal}")
            terminal = name
        return f"{terminal} {control}{rest}"

    def listed(self, start: str, answer: Mapping[str, Any] | None, *, name: str) -> str:
        """The complete list of grammars. `answer`: a further grammar, called `name`."""
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
            return encoded(text) if text else ""
        markers = "|".join(map(re.escape, sorted(found, key=len, reverse=True)))
        pieces = re.split(f"({markers})", text)
        return " ".join(
            f"<[{self.control[piece]}]>" if piece in self.control else encoded(piece)
            for piece in pieces
            if piece
        )
