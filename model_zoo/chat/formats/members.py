"""The members of objects that a schema allows, for grammars."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from model_zoo.chat.formats.lark import LarkGrammar, NoValue, Unwritable
from model_zoo.chat.formats.plain_schemas import plain
from model_zoo.chat.formats.scanner import encoded
from model_zoo.chat.formats.schema_place import Place
from model_zoo.chat.formats.text_patterns import ANY, narrowed, refuse, searched
from model_zoo.grammars.json_schema import closed

Parts = list[tuple[str, Place]]


@dataclass(frozen=True, slots=True)
class Members:
    """The members of an object. `declared`: name, schema, and whether it is required, in the order
    of declaration. `others`: terminal expressions of undeclared names, with their schemas; there
    must be from `least` (0 or 1) to `most` of them."""

    declared: tuple[tuple[str, Place, bool], ...]
    others: tuple[tuple[str, Place], ...]
    least: int
    most: int | None

    @property
    def names(self) -> frozenset[str]:
        """The names of declared members."""
        return frozenset(name for name, _, _ in self.declared)

    @classmethod
    def of(cls, lark: LarkGrammar, place: Place) -> "Members":
        """The members that a schema allows, which must not combine other schemas. Raises
        Unwritable."""
        refuse(place, ("enum", "const"))
        schema = closed(place.schema)
        patterns = [
            (searched(place, each), place.part("patternProperties", each))
            for each in schema.get("patternProperties", ())
        ]
        further = schema.get("additionalProperties", True)
        rest = Place(place.root, {} if further is True else further, f"{place.pointer}/~2")
        required = dict.fromkeys(schema.get("required", ()))
        declared = []
        for name in dict.fromkeys((*schema.get("properties", ()), *required)):
            parts = [
                part for names, part in patterns if lark.allows(place, f"{encoded(name)} & {names}")
            ]
            if name in schema.get("properties", ()):
                parts.append(place.part("properties", name))
            declared.append(
                (name, _all_of(place, name, parts) if parts else rest, name in required)
            )
        others = [
            (_without(searched(place, narrowed(each)), names, patterns), part)
            for each, (names, part) in zip(
                schema.get("patternProperties", ()), patterns, strict=True
            )
        ]
        if further is not False:
            others.append((_without(ANY, "", patterns), rest))
        low, high = schema.get("minProperties", 0), schema.get("maxProperties")
        least = max(0, low - len(required))
        most = None if high is None else high - len(declared)
        if least > (1 if others and most != 0 else 0) or (most is not None and most < 0):
            raise Unwritable(place.pointer, "this number of members cannot be enforced")
        return cls(tuple(declared), tuple(others) if most != 0 else (), least, most)


def _all_of(place: Place, name: str, parts: list[Place]) -> Place:
    if len(parts) == 1:
        return parts[0]
    schema = {"allOf": [part.schema for part in parts]}
    return Place(place.root, schema, f"{place.pointer}/~2/{name}")


def _without(names: str, own: str, patterns: Parts) -> str:
    """A terminal expression for the `names` that only their `own` pattern matches."""
    others = [f" & ~({each})" for each, _ in patterns if each != own]
    return f"({names}){''.join(others)}" if others else names


def of_objects(lark: LarkGrammar, schema: Place, write: Callable[[Place], str]) -> str:
    """A reference to a rule with the alternatives of a schema, each of which `write` writes. Raises
    Unwritable."""
    written, refused = [], NoValue(schema.pointer)
    for place in plain(schema):
        if "object" in (place.types() or ("object",)):
            try:
                written.append(write(place))
            except NoValue as error:
                refused = error
    if not written:
        raise refused
    return lark.rule(" | ".join(written))


@dataclass(frozen=True, slots=True)
class Names:
    """Names that need no escapes: those that a regular expression matches."""

    regex: str

    def check(self, place: Place, name: str) -> None:
        """Raises Unwritable if the declared name of the part `place` is not one of them."""
        if re.fullmatch(self.regex, name) is None:
            raise Unwritable(place.pointer, f'the name "{name[:80]}" cannot be written')

    def among(self, names: str) -> str:
        """A terminal expression for those that another expression matches too."""
        return f"/{self.regex}/" if names == ANY else f"/{self.regex}/ & ({names})"


def besides(names: str, declared: frozenset[str]) -> str:
    """A terminal expression without certain names."""
    texts = " | ".join(map(encoded, sorted(declared)))
    return f"({names}) & ~({texts})" if texts else names
