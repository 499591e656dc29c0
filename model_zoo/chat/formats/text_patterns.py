"""Regular expressions for the strings that a JSON schema allows.

They are llguidance's terminals: regular expressions of Rust without look-around, combined with `|`,
`&` and `~`.
"""

from collections.abc import Mapping

from model_zoo.chat.formats.lark import Unwritable
from model_zoo.chat.formats.scanner import encoded
from model_zoo.chat.formats.schema_place import MAX_DEPTH, MAX_PARTS, PER_PART, Place
from model_zoo.grammars.text_formats import FORMATS

ANY = "/(?s:.*)/"
_ASCII = {"d": "0-9", "w": "A-Za-z0-9_", "s": r" \t\n\r\f\v"}
_LISTS = ("allOf", "anyOf", "oneOf")
_TOO_MANY = "too many schemas refer to each other"
_UNSERVED = ("not", "if", "$dynamicRef", "$recursiveRef")


def strings_of(place: Place) -> str | None:
    """A terminal expression for the allowed strings; None if there are none. Raises Unwritable."""
    return _strings(place, 0, [MAX_PARTS])


def _strings(place: Place, depth: int, budget: list[int]) -> str | None:
    schema = place.schema
    if not isinstance(schema, Mapping):
        return None if schema is False else ANY
    refuse(place, _UNSERVED)
    if depth > MAX_DEPTH:
        raise Unwritable(place.pointer, _TOO_MANY)
    kinds = schema.get("type", "string")
    if "string" not in ([kinds] if isinstance(kinds, str) else kinds):
        return None
    # Parts are paid before they are read: several references may lead to the same long list.
    listed = sum(len(schema.get(keyword, ())) for keyword in _LISTS) + ("$ref" in schema)
    budget[0] -= listed + len(schema.get("enum", ())) // PER_PART
    if budget[0] < 0:
        raise Unwritable(place.pointer, _TOO_MANY)
    terms: list[str | None] = _constraints(place)
    target = place.target()
    parts = [*place.options("allOf"), *([] if target is None else [target])]
    terms += [_strings(part, depth + 1, budget) for part in parts]
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            options = [_strings(part, depth + 1, budget) for part in place.options(keyword)]
            found = [f"({each})" for each in options if each is not None]
            terms.append(" | ".join(found) or None)
    known = [each for each in terms if each is not None]
    if len(known) < len(terms):
        return None
    return " & ".join(f"({each})" for each in known if each != ANY) or ANY


def refuse(place: Place, keywords: tuple[str, ...]) -> None:
    """Raises Unwritable if the schema has one of the keywords."""
    found = next((each for each in keywords if each in place.schema), None)
    if found is not None:
        raise Unwritable(place.pointer, f'"{found}" cannot be expressed')


def _constraints(place: Place) -> list[str | None]:
    schema = place.schema
    terms: list[str | None] = []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        texts = [encoded(each) for each in values if isinstance(each, str)]
        terms.append(" | ".join(texts) or None)
    least, most = schema.get("minLength"), schema.get("maxLength")
    if least is not None or most is not None:
        terms.append(f"/(?s:.{{{int(least or 0)},{'' if most is None else int(most)}}})/")
    if "pattern" in schema:
        terms.append(searched(place, narrowed(schema["pattern"])))
    if schema.get("format") in FORMATS:
        terms.append(_regex(FORMATS[schema["format"]]))
    return terms


def searched(place: Place, pattern: str) -> str:
    """A terminal expression for texts in which `pattern` is found; it may be anchored."""
    body = pattern.removeprefix("^")
    from_begin = body != pattern
    to_end = body.endswith("$") and (len(body) - len(body[:-1].rstrip("\\"))) % 2 == 1
    body = body[:-1] if to_end else body
    if (from_begin or to_end) and _has_alternatives(body):
        raise Unwritable(place.pointer, '"pattern" has "^" or "$" in one of several alternatives')
    before, after = "" if from_begin else "(?s:.*)", "" if to_end else "(?s:.*)"
    return _regex(f"{before}(?:{body}){after}")


def narrowed(pattern: str) -> str:
    r"""A regular expression for Rust that matches no more than ECMA-262's and Python's do: Rust's
    \d, \w and \s match all of Unicode, so they are replaced by ASCII classes."""
    written, at, in_class, negated = "", 0, False, False
    while at < len(pattern):
        char, following = pattern[at], pattern[at + 1 : at + 2]
        step = 2 if char == "\\" else 1
        piece = pattern[at : at + step]
        if char == "[" and not in_class:
            in_class, negated = True, following == "^"
        elif char == "]":
            in_class = False
        elif char == "\\" and following in _ASCII and not (in_class and negated):
            piece = _ASCII[following] if in_class else f"[{_ASCII[following]}]"
        written, at = written + piece, at + step
    return written


def _has_alternatives(regex: str) -> bool:
    """Whether a regular expression has `|` outside of groups."""
    depth, in_class, escaped = 0, False, False
    for char in regex:
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and depth == 0:
            return True
    return False


def _regex(pattern: str) -> str:
    """A regular expression in Lark's notation: without line ends and with escaped slashes."""
    written: list[str] = []
    for char in pattern:
        escaped = bool(written) and written[-1] == "\\"
        if char == "/" and not escaped:
            written.append("\\/")
        elif char == "\n":
            written.append("n" if escaped else "\\n")
        elif escaped:
            written[-1] += char
        else:
            written.append(char)
    return f"/{''.join(written)}/"
