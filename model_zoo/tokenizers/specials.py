"""Splits text at the special tokens in it."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property

from tokenizers import AddedToken
from tokenizers import Tokenizer as NativeTokenizer
from tokenizers.models import WordLevel

from model_zoo.tokenizers.stripping import NO_STRIPPING, Stripping

# The deepest nesting of groups that the regular expression compiler handles quickly.
_MAX_DEPTH = 40
# The most comparisons at one position of a text. Llama 3's 256 control tokens take 67.
_MAX_STEPS = 1000

# White space as the `tokenizers` library strips it, which lacks Python's separators 1C to 1F.
_BLANK = re.compile(r"[^\S\x1C-\x1F]")

Span = tuple[int, int]
Finder = Callable[[str], Iterable[Span]]


class SpecialTexts:
    """Finds special tokens in text: leftmost first, the longest at each position.

    `surface`: maps texts and tokens to the form in which they are compared; it keeps lengths.
    """

    def __init__(
        self,
        *,
        control: Mapping[str, int],
        user_defined: Mapping[str, int],
        stripping: Stripping = NO_STRIPPING,
        surface: Callable[[str], str] = str,
    ) -> None:
        self._surface, self._stripping = surface, stripping
        self._user_defined = {surface(text): token for text, token in user_defined.items()}
        control = {surface(text): token for text, token in control.items()}
        self._ids = {**self._user_defined, **control}

    def cut(self, text: str, *, parse_special: bool) -> list[str | int]:
        """Ordinary texts and token ids in order; control tokens only with `parse_special`.

        White space that a token strips is removed.
        """
        find = self._every if parse_special else self._ordinary
        surface = self._surface(text)
        parts: list[str | int] = []
        done = 0
        for begin, end in find(surface):
            if begin < done:  # the token is in white space that the previous token strips
                continue
            token = self._ids[surface[begin:end]]
            if token in self._stripping.left:
                begin = _blanks_begin(text, done, begin)
            if begin > done:
                parts.append(text[done:begin])
            parts.append(token)
            done = _blanks_end(text, end) if token in self._stripping.right else end
        if done < len(text):
            parts.append(text[done:])
        return parts

    @cached_property
    def _every(self) -> Finder:
        return finder(self._ids)

    @cached_property
    def _ordinary(self) -> Finder:
        return finder(self._user_defined)


def _blanks_begin(text: str, least: int, end: int) -> int:
    """The beginning of the white space before `end`, at least `least`."""
    while end > least and _BLANK.match(text, end - 1):
        end -= 1
    return end


def _blanks_end(text: str, begin: int) -> int:
    """The end of the white space that begins at `begin`."""
    while _BLANK.match(text, begin):
        begin += 1
    return begin


def finder(texts: Collection[str]) -> Finder:
    """Finds `texts` in a text: leftmost first, the longest at each position.

    The search time is linear in the length of the text for any `texts`.
    """
    if not texts:
        return lambda text: ()
    expression = any_of(texts)
    if expression is None:
        return _automaton(texts)
    pattern = re.compile(expression, re.DOTALL)
    return lambda text: (match.span() for match in pattern.finditer(text))


def any_of(texts: Iterable[str]) -> str | None:
    """A regular expression, built as a prefix tree, that matches the longest of `texts`.

    A flat alternation would try thousands of texts at every `<`. None if the tree is too deep or
    needs too many comparisons at one position.
    """
    tree = _tree(sorted(set(texts)), _MAX_DEPTH)
    return tree[0] if tree is not None and tree[1] <= _MAX_STEPS else None


def _tree(texts: list[str], depth: int) -> tuple[str, int] | None:
    """The expression for sorted texts, and its most comparisons at one position; None if it is too
    deep."""
    by_first: dict[str, list[str]] = {}
    for text in texts:
        by_first.setdefault(text[:1], []).append(text)
    optional = by_first.pop("", None) is not None
    branches, most = [], 0
    for group in by_first.values():
        shared = _shared_prefix(group[0], group[-1])  # of the whole group: it is sorted
        if len(shared) > _MAX_STEPS or not depth:
            return None
        ends = [text[len(shared) :] for text in group]
        rest = _tree(ends, depth - 1) if len(group) > 1 else ("", 0)
        if rest is None:
            return None
        branches.append(re.escape(shared) + rest[0])
        most = max(most, len(shared) + rest[1])
    if not branches:
        return "", 0
    joined = branches[0] if len(branches) == 1 and not optional else f"(?:{'|'.join(branches)})"
    return (f"{joined}?" if optional else joined), most + len(branches)


def _shared_prefix(left: str, right: str) -> str:
    shorter = min(left, right, key=len)
    differing = (n for n, pair in enumerate(zip(left, right, strict=False)) if len(set(pair)) > 1)
    return shorter[: next(differing, len(shorter))]


def _automaton(texts: Iterable[str]) -> Finder:
    """The Aho-Corasick automaton of `tokenizers`: slower on average, but linear for all texts."""
    unknown = "\uffff"
    native = NativeTokenizer(WordLevel({unknown: 0}, unk_token=unknown))
    native.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in texts if t])
    known = frozenset(texts)

    def find(text: str) -> Iterable[Span]:
        spans = native.encode(text, add_special_tokens=False).offsets
        return (span for span in spans if text[slice(*span)] in known)

    return find
