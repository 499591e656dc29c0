"""Regular expressions of schemas as terminals of llguidance."""

import json
import re

import pytest

from model_zoo.chat.formats.schema_place import Place
from model_zoo.chat.formats.text_patterns import strings_of
from model_zoo.grammars.token_grammar import terminal_matches

# Rust's digits, letters and white space are Unicode's; JavaScript's are ASCII.
TEXTS = ["a", "Z", "_", "7", "-", " ", "\t", "é", "٣", "\u065d", "\u2003", "–", "𝟘", "\\d", "\\"]


@pytest.mark.parametrize(
    "pattern", [r"\d", r"\w", r"\s", r"\D", r"\W", r"[\d-]", r"[^\w\s]", r"[\\][d\]]?", r"\\d?"]
)
def test_a_pattern_matches_no_more_than_in_other_dialects(pattern: str) -> None:
    strings = strings_of(Place.whole({"type": "string", "pattern": f"^({pattern})$"}))
    matched = [
        text
        for text in TEXTS
        if terminal_matches(f"({strings}) & {json.dumps(text, ensure_ascii=False)}")
    ]
    assert matched
    for flags in (re.ASCII, re.UNICODE):
        assert all(re.fullmatch(pattern, text, flags) for text in matched)
