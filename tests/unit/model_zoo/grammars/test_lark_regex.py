"""Regular expressions of Lark grammars accept the texts that llguidance accepts by the grammars."""

import re
import textwrap

import pytest
from llguidance import LLMatcher, LLTokenizer

from model_zoo.grammars.lark_regex import MAX_LEVELS, regex_of
from model_zoo.grammars.token_grammar import GrammarError

# The grammar of patches that Codex sends, with other names.
PATCH = r"""
start: opening change+ closing
opening: "*** Begin Patch" LF
closing: "*** End Patch" LF?

change: added | removed | changed
added: "*** Add File: " path LF added_line+
removed: "*** Delete File: " path LF
changed: "*** Update File: " path LF moved? hunk?

path: /(.+)/
added_line: "+" /(.*)/ LF -> line

moved: "*** Move to: " path LF
hunk: (place | line)+ end?
place: ("@@" | "@@ " /(.+)/) LF
line: ("+" | "-" | " ") /(.*)/ LF
end: "*** End of File" LF

%import common.LF
"""
SUM = r"""
// A sum of products.
start: term (PLUS term)*   # with spaces
term: factor ("*" factor)*
factor: INT | "(" INT "," INT ")"
PLUS: "+"
%import common.INT
%import common.WS_INLINE
%ignore WS_INLINE
"""
WORDS = r"""
start: word{2,3} [ending]
?word: ("a".."f")~2 | "Ok"i | DASHED
DASHED.2: "x-" /[0-9]{2}/i
ending: ("."
       | "!"+)
%import common (LETTER, CNAME)
"""
PATCHED = "*** Begin Patch\n*** Update File: a.py\n*** Move to: b\n@@ def f():\n- 1\n+ 2\n"
CASES = {
    PATCH: (
        [
            PATCHED + "*** End Patch",
            PATCHED + "*** End of File\n*** Add File: c\n+\n*** Delete File: d\n*** End Patch\n",
        ],
        [
            "",
            PATCHED,
            PATCHED.replace("@@", "##") + "*** End Patch",
            PATCHED.replace("*** Move", "** Move") + "*** End Patch",
            PATCHED + "*** End Patch\n\n",
        ],
    ),
    SUM: (["1", "1+2", "12 * 3 + (4, 5)", "1\t+ 2 "], ["", " 1", "1+", "1 2", "(1)", "1+2)"]),
    WORDS: (
        ["abcd", "okab", "abx-12OK", "abcd.", "abcdef!!!"],
        ["ab", "abcdefab", "agab", "abcd.!", "abx-1", "ab cd"],
    ),
}


def follows(grammar: str, text: str) -> bool:
    """Whether llguidance accepts the text."""
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("grammar", CASES, ids=["patch", "sum", "words"])
def test_the_expression_matches_the_texts_of_the_grammar(grammar: str) -> None:
    regex, (good, bad) = regex_of(grammar), CASES[grammar]
    for text in good + bad:
        matches = re.fullmatch(regex, text) is not None
        assert matches is (text in good), text
        assert follows(LLMatcher.grammar_from_regex(regex), text) is matches, text


def test_definitions_may_be_indented() -> None:
    """As in a text within a program."""
    assert regex_of(textwrap.indent(PATCH, "    ")) == regex_of(PATCH)
    assert regex_of(textwrap.indent(SUM, "\t")) == regex_of(SUM)


@pytest.mark.parametrize("grammar", [PATCH, SUM], ids=["patch", "sum"])
def test_the_texts_are_those_of_llguidance(grammar: str) -> None:
    good, bad = CASES[grammar]
    for text in good + bad:
        assert follows(grammar, text) is (text in good), text


BAD = {
    "start: a\na: start": 'rule "start" refers to itself',
    'start: "a" start | "b"': 'rule "start" refers to itself',
    "start: nothing": 'does not define "nothing"',
    'first: "a"': 'no rule "start"',
    '"a"': "begins with '\"a\"' instead of a rule",
    'start: "a"\nstart: "b"': 'defines "start" twice',
    "start: @json": "unknown syntax at '@json'",
    "start: <[5]>": "unknown syntax at '<[5]>'",
    'start: "a': "unknown syntax at '\"a'",
    'start: ("a"': "a group is not closed",
    'start: "a")': "')' is at a wrong place",
    "start: *": "'*' is at a wrong place",
    'start: "a" "ab".."c"': "a range is written between",
    'start: "a"..': "a range is written between",
    r'start: "\q"': "unknown escape",
    "start: A\n%import other.A": "only for terminals of `common`",
    "start: A\n%import common.A": '"A" is not a served terminal',
    "start: A\n%declare A": "%declare is not served",
    f"start: {'(' * (MAX_LEVELS + 1)}": "nested more than 64 deep",
    "start: r0\n" + "\n".join(f"r{n}: {'(' * 40}r{n + 1}{')' * 40}" for n in range(40)): (
        "rules and groups are nested more than 64 deep"
    ),
    "start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(99)): "nested more than 64 deep",
    'start: r0\nr32: "a"\n' + "\n".join(f"r{n}: r{n + 1} r{n + 1}" for n in range(32)): "32,768",
    "start:\nA: /" + "a" * 30_000 + "/\n" + "%ignore A\n" * 2: "32,768",
}


@pytest.mark.parametrize("grammar", BAD, ids=BAD.values())
def test_what_is_no_regular_grammar_is_refused_with_the_reason(grammar: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(BAD[grammar])):
        regex_of(grammar)
