"""Turns the references of a schema into references to its definitions."""

from typing import Any
from urllib.parse import quote, urldefrag, urljoin

from model_zoo.grammars.schema_parts import (
    DEFINITIONS,
    REFERENCES,
    Schema,
    escaped,
    located,
    parts,
    steps_of,
    typed,
    with_parts,
)

# Characters of pointers and addresses that are read to find the parts that references lead to.
MAX_CHARACTERS = 16 << 20


class _TooManyCharacters(Exception):
    pass


def localised(schema: Any) -> Any:
    """An equivalent schema whose references lead to the whole schema or to a definition at its top.

    Parts that other references lead to, by JSON pointer, `$id` or anchor, become definitions, so
    that rewriting the schema does not move them. References to other documents, to absent parts,
    and dynamic ones with several possible targets stay as they are, as do all of a schema with more
    than `MAX_CHARACTERS`.
    """
    try:
        return _Document(schema).localised() if isinstance(schema, dict) else schema
    except _TooManyCharacters:
        return schema


class _Document:
    """`parts`: the schemas of a document by JSON pointer, including those that only references
    reach."""

    def __init__(self, root: Schema) -> None:
        self._root, self._characters = root, 0
        self._parts: dict[str, Schema] = {}
        self._bases: dict[str, str] = {}  # base URIs by pointer
        self._addresses = {"": ""}  # pointers by URI
        self._dynamic: dict[str, list[str]] = {}  # pointers by dynamic anchor
        self._targets: dict[str, Any] = {}  # parts that become definitions
        self._read("", root, "")
        pending = [*self._parts]
        while pending:
            known = len(self._parts)
            for pointer in pending:
                self._follow(pointer)
            pending = [*self._parts][known:]
        self._names = self._named()

    def localised(self) -> Schema:
        whole = self._written("", self._root)
        if not self._targets:
            return whole
        defined = {
            self._names[pointer]: self._written(pointer, part, as_definition=True)
            for pointer, part in self._targets.items()
        }
        return {**whole, "$defs": {**typed(whole, "$defs", dict), **defined}}

    def _read(self, pointer: str, part: Any, base: str) -> None:
        if not isinstance(part, dict) or pointer in self._parts:
            return
        self._count(pointer)
        identity = part.get("$id")
        if isinstance(identity, str) and identity[:1] != "#":
            base = urldefrag(self._address(base, identity)).url
            self._addresses.setdefault(base, pointer)
        elif isinstance(identity, str):  # which is an anchor in older drafts
            self._addresses.setdefault(self._address(base, identity), pointer)
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(part.get(key), str):
                self._addresses.setdefault(self._address(base, f"#{part[key]}"), pointer)
        if isinstance(part.get("$dynamicAnchor"), str):
            self._dynamic.setdefault(part["$dynamicAnchor"], []).append(pointer)
        if part.get("$recursiveAnchor") is True:
            self._dynamic.setdefault("", []).append(pointer)
        self._parts[pointer], self._bases[pointer] = part, base
        for place, inner in parts(part):
            self._read(pointer + place, inner, base)

    def _follow(self, pointer: str) -> None:
        for key in REFERENCES:
            found = self._target(pointer, key)
            if found is None:
                continue
            target, part = found
            steps = steps_of(f"#{target}")
            if steps and not (len(steps) == 2 and steps[0] in DEFINITIONS):
                self._targets[target] = part
            self._read(target, part, self._bases[pointer])

    def _target(self, pointer: str, key: str) -> tuple[str, Any] | None:
        """The pointer and the part that a reference of the part at `pointer` leads to."""
        reference = self._parts[pointer].get(key)
        if not isinstance(reference, str):
            return None
        uri, fragment = urldefrag(reference)
        if key != "$ref" and len(self._dynamic.get(fragment, ())) > 1:
            return None
        base = self._bases[pointer]
        address = urldefrag(self._address(base, uri)).url if uri else base
        if fragment and fragment[0] != "/":
            place = self._addresses.get(f"{address}#{fragment}")
            return None if place is None else located(self._root, steps_of(f"#{place}"))
        resource = self._addresses.get(address)
        if resource is None:
            return None
        steps = steps_of(f"#{fragment}")
        # Some programs give parts an `$id`, but write pointers from the top.
        found = located(self._root, [*steps_of(f"#{resource}"), *steps])
        return found if found is not None or uri else located(self._root, steps)

    def _address(self, base: str, uri: str) -> str:
        self._count(base)
        self._count(uri)
        return urljoin(base, uri) if uri[:1] != "#" else base + uri

    def _count(self, text: str) -> None:
        self._characters += len(text)
        if self._characters > MAX_CHARACTERS:
            raise _TooManyCharacters

    def _named(self) -> dict[str, str]:
        names: dict[str, str] = {}
        taken = (
            {*self._root.get("$defs", ())} if isinstance(self._root.get("$defs"), dict) else set()
        )
        for pointer in self._targets:
            name = pointer
            while name in taken:
                name += "'"
            names[pointer] = name
            taken.add(name)
        return names

    def _written(self, pointer: str, part: Any, *, as_definition: bool = False) -> Any:
        if not isinstance(part, dict):
            return part
        if pointer in self._targets and not as_definition:
            return {"$ref": self._reference(pointer)}
        written = with_parts(part, lambda place, inner: self._written(pointer + place, inner))
        for key in REFERENCES:
            found = self._target(pointer, key)
            if found is not None and (key == "$ref" or "$ref" not in written):
                del written[key]
                written["$ref"] = self._reference(found[0])
        if not any(key in written for key in REFERENCES[1:]):
            for key in ("$anchor", "$dynamicAnchor", "$recursiveAnchor"):
                written.pop(key, None)
        return written

    def _reference(self, pointer: str) -> str:
        if pointer in self._targets:
            pointer = f"/$defs/{escaped(self._names[pointer])}"
        return quote(f"#{pointer}", safe="#/$~")
