r"""Regular expressions for the texts of a Lark grammar whose rules do not refer to themselves.

A grammar can be matched only where its text is free. Arguments of calls are written as strings of
JSON or between marks, where a regular expression can be enforced (`pattern` of JSON schemas).
Source: the grammar reference of Lark 1.3; `(?s:.)` and other syntax of regular expressions is
Rust's.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from model_zoo.grammars.token_grammar import GrammarError, check_pattern

MAX_CHARACTERS = 32 * 1024  # of a regular expression; its rules are repeated wherever they occur
MAX_LEVELS = 64  # nesting of rules and groups

_TOKENS = re.compile(
    r"""
      (?P<blank>[\s]+ | (?://|\#)[^\n]*)
    | (?P<define>!?\??[A-Za-z_][A-Za-z_0-9]*(?:\.-?[0-9]+)?[ \t]*:)
    | (?P<command>%[a-z]+)
    | (?P<alias>->[ \t]*[A-Za-z_][A-Za-z_0-9]*)
    | (?P<name>[A-Za-z_][A-Za-z_0-9]*)
    | (?P<string>"(?:[^"\\\n]|\\.)*"i?)
    | (?P<regex>/(?:[^/\\\n]|\\.)+/[imsux]*)
    | (?P<times>~[ \t]*[0-9]+(?:[ \t]*\.\.[ \t]*[0-9]+)? | \{[ \t]*[0-9]+[ \t]*(?:,[ \t]*[0-9]*[ \t]*)?\})
    | (?P<mark>\.\. | [|()\[\]?*+.,])
    """,  # noqa: E501
    re.VERBOSE,
)
_META = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")
# Terminals of Lark's library `common`.
_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
}
_COMMON["SIGNED_FLOAT"] = f"[+-]?{_COMMON['FLOAT']}"


def regex_of(grammar: str) -> str:
    """A regular expression that matches exactly the texts of `grammar`, from its rule `start`.

    Raises GrammarError for rules that refer to themselves, for unknown names, for other syntax than
    rules, terminals, `%import common…` and `%ignore`, and for grammars whose expression is long.
    """
    return _Grammar(_definitions(_tokens(grammar))).start()


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str


@dataclass(slots=True)
class _Definitions:
    """The tokens of each rule and terminal by name, of imported terminals their expressions, and
    the tokens of what is ignored, as alternatives."""

    bodies: dict[str, list[_Token]] = field(default_factory=dict)
    imported: dict[str, str] = field(default_factory=dict)
    ignored: list[_Token] = field(default_factory=list)


def _tokens(grammar: str) -> list[_Token]:
    found, at = [], 0
    while at < len(grammar):
        match = _TOKENS.match(grammar, at)
        if match is None:
            line = grammar[at:].partition("\n")[0]
            raise GrammarError(f"the grammar has unknown syntax at {line[:40]!r}")
        if match.lastgroup != "blank":
            found.append(_Token(str(match.lastgroup), match[0].strip()))
        at = match.end()
    return found


def _definitions(tokens: list[_Token]) -> _Definitions:
    known = _Definitions()
    if tokens and tokens[0].kind not in ("define", "command"):
        raise GrammarError(f"the grammar begins with {tokens[0].text[:40]!r} instead of a rule")
    begins = [at for at, token in enumerate(tokens) if token.kind in ("define", "command")]
    for begin, end in zip(begins, [*begins[1:], len(tokens)], strict=True):
        head, body = tokens[begin], tokens[begin + 1 : end]
        if head.kind == "define":
            name = head.text.rstrip(": \t").lstrip("!?").partition(".")[0]
            if name in known.bodies:
                raise GrammarError(f'the grammar defines "{name[:40]}" twice')
            known.bodies[name] = body
        elif head.text == "%ignore":
            known.ignored += [_Token("mark", "|"), *body] if known.ignored else body
        elif head.text == "%import":
            _import(body, known.imported)
        else:
            raise GrammarError(f"{head.text[:40]} is not served")
    return known


def _import(tokens: list[_Token], imported: dict[str, str]) -> None:
    """Reads `common.NAME`, `common.NAME -> OTHER` and `common (NAME, …)`."""
    names = [token.text for token in tokens if token.kind == "name"]
    aliases = [token.text.removeprefix("->").strip() for token in tokens if token.kind == "alias"]
    if names[:1] != ["common"]:
        raise GrammarError("%import is served only for terminals of `common`")
    for name in names[1:]:
        if name not in _COMMON:
            raise GrammarError(f'%import: "{name[:40]}" is not a served terminal of `common`')
        imported[aliases[0] if aliases else name] = _COMMON[name]


class _Grammar:
    """The expressions of the definitions, each written once."""

    def __init__(self, known: _Definitions) -> None:
        self._known = known
        self._written: dict[str, str] = {}
        self._open: list[str] = []
        self._levels = 0
        self._ignored = ""  # while what is ignored is read, which consists of terminals
        ignored = _Reader(known.ignored, self, "").all()
        self._ignored = f"(?:{ignored})*" if ignored else ""

    def start(self) -> str:
        if "start" not in self._known.bodies:
            raise GrammarError('the grammar has no rule "start"')
        return self.named("start")

    def named(self, name: str) -> str:
        """The expression of a rule or terminal."""
        if name in self._known.imported:
            return self._known.imported[name]
        if name in self._open:
            raise GrammarError(
                f'rule "{name[:40]}" refers to itself; only rules that do not can be enforced here'
            )
        if name not in self._known.bodies:
            raise GrammarError(f'the grammar does not define "{name[:40]}"')
        if name not in self._written:
            self._open.append(name)
            # As in llguidance, text is ignored after terminals, never within or before them.
            ignored = "" if _is_terminal(name) else self._ignored
            self._written[name] = _Reader(self._known.bodies[name], self, ignored).all()
            self._open.pop()
        return self._written[name]

    @contextmanager
    def level(self) -> Iterator[None]:
        """A level of rules and groups within each other. Raises GrammarError for too many."""
        if self._levels == MAX_LEVELS:
            raise GrammarError(f"rules and groups are nested more than {MAX_LEVELS} deep")
        self._levels += 1
        yield
        self._levels -= 1


class _Reader:
    """Reads one definition. `ignored`: the expression of texts that are ignored after each
    terminal."""

    def __init__(self, tokens: list[_Token], grammar: _Grammar, ignored: str) -> None:
        self._tokens = tokens
        self._at = 0
        self._grammar = grammar
        self._ignored = ignored

    def all(self) -> str:
        expression = self._alternatives()
        if self._at < len(self._tokens):
            raise GrammarError(f"{self._tokens[self._at].text[:40]!r} is at a wrong place")
        return expression

    def _next(self, *texts: str) -> str | None:
        """The next token if it is one of the marks `texts`."""
        if self._at == len(self._tokens) or self._tokens[self._at].text not in texts:
            return None
        self._at += 1
        return self._tokens[self._at - 1].text

    def _alternatives(self) -> str:
        with self._grammar.level():
            expression, several = self._sequence(), False
            while self._next("|"):
                expression, several = _limited(f"{expression}|{self._sequence()}"), True
        return f"(?:{expression})" if several else expression

    def _sequence(self) -> str:
        written = ""
        while self._at < len(self._tokens):
            token = self._tokens[self._at]
            if token.kind == "alias":
                self._at += 1
                break
            if token.text in ("|", ")", "]"):
                break
            written = _limited(written + self._repeated())
        return written

    def _repeated(self) -> str:
        expression = self._atom()
        sign = self._next("?", "*", "+")
        if sign is None and self._at < len(self._tokens):
            token = self._tokens[self._at]
            if token.kind == "times":
                self._at += 1
                counts = re.findall("[0-9]+", token.text)
                closed = len(counts) > 1 or "," not in token.text
                sign = f"{{{counts[0]},{counts[-1] if closed else ''}}}"
        return expression if sign is None else f"(?:{expression}){sign}"

    def _atom(self) -> str:
        token = self._tokens[self._at]
        self._at += 1
        match token.kind:
            case "name" if _is_terminal(token.text):
                return f"{self._grammar.named(token.text)}{self._ignored}"
            case "name":
                return self._grammar.named(token.text)
            case "string":
                return f"{self._string(token.text)}{self._ignored}"
            case "regex":
                body, _, flags = token.text[1:].rpartition("/")
                check_pattern(body)
                flags = flags.replace("u", "")
                return f"(?{flags}:{body}){self._ignored}"
        if token.text in ("(", "["):
            expression = self._alternatives()
            if self._next(")" if token.text == "(" else "]") is None:
                raise GrammarError("a group is not closed")
            return f"(?:{expression}){'' if token.text == '(' else '?'}"
        raise GrammarError(f"{token.text[:40]!r} is at a wrong place")

    def _string(self, text: str) -> str:
        first = _unquoted(text)
        if self._next("..") is None:
            escaped = _escaped(first)
            return f"(?i:{escaped})" if text.endswith("i") else f"(?:{escaped})"
        last = self._tokens[self._at].text if self._at < len(self._tokens) else ""
        self._at += 1
        end = _unquoted(last) if last[:1] == '"' else ""
        if len(first) != 1 or len(end) != 1:
            raise GrammarError("a range is written between texts of one character")
        return f"[{_escaped(first)}-{_escaped(end)}]"


def _is_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _unquoted(text: str) -> str:
    try:
        return str(json.loads(text.removesuffix("i"), strict=False))
    except ValueError:
        raise GrammarError(f"{text[:40]} has an unknown escape") from None


def _escaped(text: str) -> str:
    """A regular expression for exactly this text."""
    controls = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
    return "".join(controls.get(char) or _META.sub(r"\\\g<0>", char) for char in text)


def _limited(expression: str) -> str:
    if len(expression) > MAX_CHARACTERS:
        raise GrammarError(
            f"the grammar stands for a regular expression of more than {MAX_CHARACTERS:,} "
            "characters; simplify it"
        )
    return expression
