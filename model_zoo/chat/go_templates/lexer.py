"""Divides a Go template into texts and actions, and actions into tokens."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from model_zoo.chat.go_templates.syntax import refuse

_SPACE = " \t\r\n"
_COMMENT = re.compile(r"/\*(?:(?!\*/).)*\*/(?:[ \t\r\n]-)?\}\}", re.DOTALL)
_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+)
    |(?P<close>\}\})
    |(?P<string>"(?:[^"\\\n]|\\.)*")
    |(?P<raw>`[^`]*`)
    |(?P<char>'(?:[^'\\\n]|\\.)+')
    |(?P<number>[+-]?(?:0[xX][0-9a-fA-F]+|(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)(?![\w.]))
    |(?P<field>\.[^\W\d]\w*)
    |(?P<variable>\$\w*)
    |(?P<word>[^\W\d]\w*)
    |(?P<sign>:=|[=|,().])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\([abfnrtv\\'\"]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})")


@dataclass(frozen=True, slots=True)
class Token:
    """`kind`: "string", "number", "field", "variable", "word" or "sign". `value`: the constant of a
    string or number, otherwise the text. `spaced`: white space precedes it."""

    kind: str
    value: str | int | float
    spaced: bool = True


@dataclass(frozen=True, slots=True)
class TextPiece:
    text: str


@dataclass(frozen=True, slots=True)
class ActionPiece:
    tokens: tuple[Token, ...]
    line: int


def pieces(source: str) -> Iterator[TextPiece | ActionPiece]:
    """The texts, trimmed as the actions beside them state, and actions; comments are dropped.

    ModelFileError names the line of what cannot be read.
    """
    at, line, trimmed = 0, 1, False
    while True:
        opening = source.find("{{", at)
        text = source[at:] if opening < 0 else source[at:opening]
        line += text.count("\n")
        kept = text.lstrip(_SPACE) if trimmed else text
        if opening < 0:
            if kept:
                yield TextPiece(kept)
            return
        begin = opening + 2
        if source[begin : begin + 1] == "-" and source[begin + 1 : begin + 2] in tuple(_SPACE):
            kept = kept.rstrip(_SPACE)
            begin += 2
        if kept:
            yield TextPiece(kept)
        comment = _COMMENT.match(source, begin)
        if comment is not None:
            at, trimmed = comment.end(), comment[0].endswith("-}}")
        elif source.startswith("/*", begin):
            refuse(line, "a comment is not closed, or other text follows it")
        else:
            tokens, at, trimmed = _action(source, begin, line)
            yield ActionPiece(tokens, line)
        line += source.count("\n", opening, at)


def _action(source: str, at: int, line: int) -> tuple[tuple[Token, ...], int, bool]:
    """The tokens of an action, the position after it, and whether the text after it is trimmed."""
    tokens: list[Token] = []
    spaced = True
    while True:
        if source.startswith("-}}", at) and spaced and at and source[at - 1] in _SPACE:
            return tuple(tokens), at + 3, True
        found = _TOKEN.match(source, at)
        if found is None:
            refuse(line, f"the action cannot be read at {source[at : at + 20]!r}")
        at = found.end()
        kind = str(found.lastgroup)
        if kind == "close":
            return tuple(tokens), at, False
        if kind != "space":
            tokens.append(_token(kind, found[0], line, spaced=spaced))
        spaced = kind == "space"


def _token(kind: str, text: str, line: int, *, spaced: bool) -> Token:
    if kind == "raw":
        return Token("string", text[1:-1].replace("\r", ""), spaced)
    if kind == "string":
        return Token("string", _unescaped(text[1:-1], line), spaced)
    if kind == "char":
        value = _unescaped(text[1:-1], line)
        if len(value) != 1:
            refuse(line, f"the character constant {text[:20]} has {len(value)} characters")
        return Token("number", ord(value), spaced)
    if kind == "number":
        return Token("number", _number(text, line), spaced)
    return Token(kind, text.removeprefix("$") if kind == "variable" else text, spaced)


def _unescaped(text: str, line: int) -> str:
    if "\\" in _ESCAPE.sub("", text):
        refuse(line, f"a string has an escape sequence that is not supported: {text[:40]!r}")
    return _ESCAPE.sub(lambda found: str(ast.literal_eval(f'"{found[0]}"')), text)


def _number(text: str, line: int) -> int | float:
    if len(text) > 30:
        refuse(line, f"the number {text[:30]}… is too long")
    if text.lstrip("+-").lower().startswith("0x"):
        return int(text, 16)
    if any(char in text for char in ".eE"):
        return float(text)
    return int(text)
