"""`caravan logs`: lines of Ray and of the application, selected and shown."""

import io
import os
from types import SimpleNamespace

import pytest

from serve_app.cli import logs
from serve_app.cli.log_file import LogWriter, last_lines, log_path, new_lines, previous_log
from serve_app.cli.log_lines import LogFilter, parse_line
from serve_app.logs import get_logger
from serve_app.telemetry.request_context import RequestContext, current_request
from tests.unit.serve_app.cli.cli_runs import run

REPLICA = "\x1b[36m(ServeReplica:caravan:demo pid=13276, ip=10.0.0.2)\x1b[0m "
# Lines that Ray 2.60 has written.
RAY = """\
2026-11-23 17:00:39,742	INFO scripts.py:489 -- Running config file: 'configs/quickstart.yaml'.
2026-11-23 17:00:46,603	SUCC scripts.py:546 -- \x1b[32mSubmitted deploy config successfully.\x1b[39m
\x1b[36m(ServeController pid=6215)\x1b[0m WARNING 2026-11-23 17:00:44,821 controller 62 -- HTTPOpt
INFO 2026-11-23 17:00:46,587 serve 5772 -- Started Serve in namespace "serve".
"""
ALL = {"level": "debug", "model": None, "request": None}


def written(capsys, level="info", *, form="json", **facts) -> str:
    """The line that the application logs."""
    token = current_request.set(RequestContext("r-1"))
    log = get_logger({"CARAVAN_LOG_LEVEL": "debug", "CARAVAN_LOG_FORMAT": form})
    getattr(log, level)("happened", **facts)
    current_request.reset(token)
    return capsys.readouterr().err


def test_lines_of_ray_have_level_source_and_time():
    parsed = [parse_line(line) for line in RAY.splitlines()]
    assert [(line.level, line.source, line.when[-8:]) for line in parsed] == [
        ("info", "", "17:00:39"),
        ("info", "", "17:00:46"),
        ("warning", "ServeController", "17:00:44"),
        ("info", "", "17:00:46"),
    ]
    assert [line.event for line in parsed] == [
        "Running config file: 'configs/quickstart.yaml'.",
        "Submitted deploy config successfully.",
        "HTTPOpt",
        'Started Serve in namespace "serve".',
    ]


@pytest.mark.parametrize("form", ["json", "text"])
@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_lines_of_the_application_have_level_model_and_request(capsys, form, level):
    line = parse_line(REPLICA + written(capsys, level, form=form, model="demo"))
    assert (line.source, line.level) == ("ServeReplica:caravan:demo", level)
    assert "happened" in line.event and "demo" in line.models and line.request == "r-1"
    assert line.when


@pytest.mark.parametrize(
    ("wanted", "selected"),
    [
        ({}, True),
        ({"level": "warning"}, True),
        ({"level": "error"}, False),
        ({"model": "demo"}, True),
        ({"model": "other"}, False),
        ({"request": "r-1"}, True),
        ({"request": "r"}, False),
        ({"model": "demo", "request": "r-2"}, False),
    ],
)
def test_lines_are_selected(capsys, wanted, selected):
    line = parse_line(written(capsys, "warning", model="demo"))
    assert LogFilter(**ALL | wanted).selects(line) == selected


def test_a_stack_trace_belongs_to_the_line_before_of_its_source(capsys):
    lines = [
        "(A pid=1) " + written(capsys, "error"),
        "(B pid=2) " + written(capsys, "info"),
        '(A pid=1)   File "x.py", line 3',
        "(B pid=2) not a record",
    ]
    chosen = LogFilter(**ALL | {"level": "error"})
    assert [chosen.selects(parse_line(line)) for line in lines] == [True, False, True, False]


def test_the_last_of_the_selected_lines_are_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert "has no logs" in run("logs", status=1).stderr
    (tmp_path / "caravan").mkdir()
    lines = [written(capsys, "info", model=f"m{i}") + RAY for i in range(3)]
    (tmp_path / "caravan" / "serve-8000.log").write_text("".join(lines))
    shown = run("logs", "--lines", 1, "--model", "m1").stdout.splitlines()
    assert len(shown) == 1 and shown[0].endswith("model=m1 request=r-1")
    assert len(run("logs", "-n", 7).stdout.splitlines()) == 7
    assert len(run("logs", "--level", "warning").stdout.splitlines()) == 3
    assert run("logs", "-n", 0).stdout == ""


def test_a_request_without_lines_has_a_note_of_the_level_that_writes_them(
    tmp_path, monkeypatch, capsys
):
    notes = []
    monkeypatch.setattr(logs, "print_note", notes.append)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "caravan").mkdir()
    (tmp_path / "caravan" / "serve-8000.log").write_text(written(capsys) + RAY)
    assert run("logs", "--request", "r-1").stdout and run("logs").stdout and notes == []
    assert run("logs", "--request", "r-2").stdout == ""
    assert len(notes) == 1 and "CARAVAN_LOG_LEVEL=debug" in notes[0]


def test_each_server_has_a_log_and_the_one_that_wrote_last_is_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for port, time in ((8000, 1), (8001, 3), (8002, 2)):
        path = log_path(os.environ, port)
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"of {port}\n")
        os.utime(path, (time, time))
    assert run("logs").stdout.strip() == "of 8001"
    assert run("logs", "--port", 8000).stdout.strip() == "of 8000"
    assert "serve-8003.log does not exist" in run("logs", "--port", 8003, status=1).stderr


def test_texts_cannot_control_the_terminal(capsys):
    hostile = "\x1b]0;owned\x07\x1b[2J\u202e"
    for line in (
        written(capsys, model=hostile, traceback=f"line 1\n{hostile}\n"),
        f"(a\x1b]b pid=1) {hostile}",
        f"INFO 2026-11-23 17:00:46,587 serve 5772 -- {hostile}",
        '{"event": "' + hostile + '", "level": "\x1b[2J", "timestamp": "\x1b[2J"}',
    ):
        logs.show(parse_line(line))
    shown = capsys.readouterr().out
    assert "\\x1b]0;owned\\x07" in shown
    assert all(c.isprintable() or c == "\n" for c in shown)


@pytest.mark.parametrize(
    "line", ['{"event"', '{"event": 1, "models": 3}', '{"event"' + ":[" * 50_000, "\0", ""]
)
def test_damaged_lines_are_shown_as_they_are(line, capsys):
    logs.show(parse_line(line))
    assert capsys.readouterr().out.endswith("\n")


def test_new_lines_follow_even_after_a_new_start(tmp_path):
    path = tmp_path / "serve.log"
    path.write_text("one\ntw")
    steps = ["o\nthree\n", None, "four\n"]

    def wait() -> None:
        if not steps:
            raise KeyboardInterrupt
        step = steps.pop(0)
        if step is None:  # a server that starts empties the file
            os.truncate(path, 0)
        else:
            with path.open("a") as file:
                file.write(step)

    chosen, followed = LogFilter(**ALL), []
    file = path.open("rb")
    assert [line.event for line in last_lines([file], chosen, 9)] == ["one"]
    with pytest.raises(KeyboardInterrupt):
        for line in new_lines(path, file, chosen, wait):
            followed.append(line.event)
    assert followed == ["two", "three", "four"] and file.closed


def test_new_lines_follow_into_a_new_file(tmp_path):
    path, followed = tmp_path / "serve.log", []
    with LogWriter(path, pytest.fail, limit_bytes=8) as writer:
        steps = [("one\n",), ("two\n", "three\n"), ("four\n",)]

        def wait() -> None:
            if not steps:
                raise KeyboardInterrupt
            for line in steps.pop(0):
                writer.write(line.encode())

        with pytest.raises(KeyboardInterrupt):
            for line in new_lines(path, path.open("rb"), LogFilter(**ALL), wait):
                followed.append(line.event)
    assert followed == ["one", "two", "three", "four"]


def test_a_log_is_kept_in_two_files_of_limited_size(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = log_path(os.environ, 8000)
    with LogWriter(path, pytest.fail, limit_bytes=40) as writer:
        for i in range(99):
            writer.write(f"line {i}\n".encode())
        longest = max(each.stat().st_size for each in (path, previous_log(path)))
        assert 30 < longest <= 40
        assert path.stat().st_mode & 0o777 == 0o600
    shown = run("logs").stdout.split("\n")
    assert "    line 98" in shown and "    line 94" in shown, "from both files"
    with LogWriter(path, pytest.fail):
        assert run("logs").stdout == "", "a starting server begins anew"


def test_a_log_that_cannot_be_written_is_reported_once_and_tried_again(tmp_path):
    path, warnings = tmp_path / "serve.log", []
    with LogWriter(path, warnings.append, limit_bytes=8) as writer:
        writer.write(b"line 1\n")
        previous_log(path).mkdir()  # the file cannot be renamed
        for i in (2, 3):
            writer.write(b"line %d\n" % i)
        previous_log(path).rmdir()
        writer.write(b"line 4\n")
    assert path.read_text() == "line 4\n"
    (warning,) = warnings
    assert "serve.log cannot be written: Is a directory" in warning


@pytest.mark.parametrize("obstacle", ["folder", "log", "previous log"])
def test_a_log_that_cannot_be_created_is_reported_once(tmp_path, obstacle):
    path, warnings = tmp_path / "state" / "serve.log", []
    if obstacle == "folder":
        path.parent.write_text("a file")
    else:
        (path if obstacle == "log" else previous_log(path)).mkdir(parents=True)
    with LogWriter(path, warnings.append, limit_bytes=8) as writer:
        for i in range(9):
            writer.write(b"line %d\n" % i)
    assert not writer.exists
    (warning,) = warnings
    assert f"the log {path} cannot be written: " in warning and "XDG_STATE_HOME" in warning


def test_a_line_after_a_part_of_one_begins_anew(tmp_path, monkeypatch):
    path = tmp_path / "serve.log"
    with LogWriter(path, pytest.fail) as writer:
        writer.write(b"one\n")
        with monkeypatch.context() as full:
            file = SimpleNamespace(write=lambda line, write=writer._file.write: write(line[:2]))
            full.setattr(writer, "_file", file)
            writer.write(b"two\n")
        writer.write(b"three\n")
    assert path.read_text() == "one\ntw\nthree\n"


def test_a_line_without_end_is_read_in_parts():
    lines = last_lines([io.BytesIO(b"x" * (3 << 20) + b"\n")], LogFilter(**ALL), 9)
    assert [len(line.event) for line in lines] == [1 << 20] * 3 + [0]
