"""Log lines: one JSON object each, on standard error."""

import json

import pytest

from serve_app.logs import get_logger


@pytest.mark.parametrize("level", ["info", "warning", "error"])
def test_every_level_is_one_line_of_json(capsys, level):
    getattr(get_logger(), level)("started", model="demo")
    line = json.loads(capsys.readouterr().err)
    assert (line["event"], line["level"], line["model"]) == ("started", level, "demo")
