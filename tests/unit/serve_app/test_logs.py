"""Log lines: one JSON object each, on standard error."""

import json
import logging
from types import SimpleNamespace

import pytest

from serve_app.logs import get_logger, structure_records
from serve_app.replica import rank_actors

LEVELS = ("debug", "info", "warning", "error")


@pytest.mark.parametrize("level", ["info", "warning", "error"])
def test_every_level_is_one_line_of_json(capsys, level):
    getattr(get_logger(), level)("started", model="demo")
    line = json.loads(capsys.readouterr().err)
    assert (line["event"], line["level"], line["model"]) == ("started", level, "demo")


def written(capsys) -> list[tuple[str, str]]:
    lines = map(json.loads, capsys.readouterr().err.splitlines())
    return [(line["logger"], line["level"]) for line in lines]


@pytest.mark.parametrize(
    ("stated", "least"),
    [({}, 1), ({"CARAVAN_LOG_LEVEL": "debug"}, 0), ({"CARAVAN_LOG_LEVEL": "warning"}, 2)],
)
def test_records_of_logging_are_written_from_the_same_level_on(stated, least, capsys):
    structure_records(stated)
    structure_records(stated)  # a process may have several deployments
    names = ("runtime.kernels.build", "model_zoo.gguf.tiled_copy", "serve_app.transport.sockets")
    for name in names:
        for level in LEVELS:
            getattr(logging.getLogger(name), level)("happened")
    assert written(capsys) == [(name, level) for name in names for level in LEVELS[least:]]


def test_a_rank_writes_records_of_logging_too(monkeypatch, capsys):
    def run_rank(*arguments: object) -> None:
        logging.getLogger("runtime.worker.recorded_steps").info("happened")

    monkeypatch.setattr("serve_app.replica.loading.run_rank", run_rank)
    left = SimpleNamespace(actor=SimpleNamespace(exit_actor=lambda: None))
    monkeypatch.setattr(rank_actors, "ray", left)
    rank_actors._Rank().compute(None, None)
    assert written(capsys) == [("runtime.worker.recorded_steps", "info")]
