"""Errors of loading are reported in one line."""

import json

from runtime.errors import CaravanError, StoreError
from serve_app.replica.load_errors import explained


def test_a_caravan_error_is_reported_with_its_message_only():
    error = StoreError("full")
    assert explained("Model x", error) is error


def test_other_errors_are_reported_in_one_line_with_their_operation(capsys):
    error = explained("Model x", RuntimeError("shape mismatch\n  at layer 3"))
    assert type(error) is CaravanError
    assert str(error) == "Model x could not be loaded: RuntimeError: shape mismatch"
    assert str(explained("Model x", AssertionError())).endswith(": AssertionError")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert "at layer 3" in lines[0]["traceback"]
