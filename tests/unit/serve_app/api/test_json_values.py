"""JSON texts of clients: which are accepted, and why others are not."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import RequestError
from serve_app.api.json_values import decoded_json

HALF = "is half of a UTF-16 surrogate pair; only both halves together are a character"


@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_any_text_is_decoded_from_escapes_and_from_utf8(text: str) -> None:
    for ascii_only in (True, False):
        encoded = json.dumps({text: text}, ensure_ascii=ascii_only)
        for given_as in (encoded, encoded.encode(), bytearray(encoded.encode())):
            assert decoded_json(given_as) == {text: text}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (r'"\ud800"', rf"the escape \ud800 (byte 1) {HALF}"),
        (r'"ab\uDFFF and more"', rf"the escape \uDFFF (byte 3) {HALF}"),
        (r'"\ud83d\ude00\ude00"', rf"the escape \ude00 (byte 13) {HALF}"),
        (r'"\ud800\ud83d\ude00"', rf"the escape \ud800 (byte 1) {HALF}"),
        (r'"\ud800\n, and more text"', rf"the escape \ud800 (byte 1) {HALF}"),
        (r'{"\udc00": 1}', rf"the escape \udc00 (byte 2) {HALF}"),
        (r'"\\ud800 \q"', "JSON is malformed: invalid escape character in string (byte 11)"),
        ('"', "Input data was truncated"),
        (b'"a\xff"', "byte 2 is 0xff, which is not UTF-8"),
        (b'"\xc3', "byte 1 is 0xc3, which is not UTF-8"),
        ('"\ud800"', "byte 1 is 0xed, which is not UTF-8"),
        ("[" * 30_000, "it is nested too deeply"),
    ],
)
def test_other_texts_are_refused_with_the_reason(text: str | bytes, reason: str) -> None:
    with pytest.raises(RequestError) as refused:
        decoded_json(text)
    assert str(refused.value) == f"invalid JSON: {reason}"
