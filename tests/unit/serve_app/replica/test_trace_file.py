"""Traces of a real replica, and the files that hold them."""

import dataclasses
import json
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from runtime.engine.request import SamplingParams
from runtime.engine.tracing import TraceEvent
from runtime.errors import ConfigurationError, RequestError
from serve_app.messages.tasks import ChatTask, EndRules, RawText
from serve_app.replica import trace_file
from serve_app.replica.replica import ModelReplica
from serve_app.replica.trace_file import TraceFile
from tests.unit.serve_app.answers import answer_of
from tests.unit.serve_app.loaded_replicas import loaded

TEXT = "A secret sentence, which is long enough for two pages of the prefix cache of the model."
TASK = ChatTask("plain", "demo", RawText(TEXT), SamplingParams(temperature=0.0), max_tokens=5)


def task(name: str, *, trace: bool) -> ChatTask:
    return ChatTask(name, "demo", TASK.prompt, TASK.sampling, max_tokens=5, trace=trace)


@pytest.fixture
def load() -> Iterator[Callable[..., ModelReplica]]:
    with ExitStack() as stack:
        yield lambda **change: stack.enter_context(loaded(context_tokens=128, **change))


def lines(folder: Path) -> list[dict[str, Any]]:
    [path] = folder.glob("*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_the_lines_have_the_prompt_its_computation_and_the_answer(
    load: Callable[..., ModelReplica], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "traces"
    replica = load(trace_folder=str(folder))
    tokenizer = replica._model.tokenizer
    plain = await answer_of(replica, task("plain", trace=False))
    traced = await answer_of(replica, task("traced", trace=True))
    replica.close()
    assert (traced.tokens, traced.text) == (plain.tokens, plain.text)
    found = lines(folder)
    assert {line["request"] for line in found} == {"traced/1"}
    prompt, admitted, *rest = found
    assert (prompt["event"], admitted["event"]) == ("request", "admitted")
    assert tuple(prompt["tokens"]) == tuple(tokenizer.encode_document(TEXT))
    assert prompt["strings"] == [tokenizer.token_text(token) for token in prompt["tokens"]]
    assert TEXT in "".join(prompt["strings"])
    assert admitted["cached_tokens"] == traced.usage.cached_tokens > 0
    deltas = [line for line in rest if line["event"] == "delta"]
    assert tuple(token for line in deltas for token in line["tokens"]) == traced.tokens
    assert "".join(line["text"] for line in deltas) == traced.text
    assert deltas[-1]["finish"] == traced.finish.value
    position = admitted["cached_tokens"]
    for line in rest:
        if line["event"] == "chunk":
            assert line["start"] == position
            position += line["length"]
    assert position == len(prompt["tokens"]) + len(traced.tokens) - 1
    out, err = capfd.readouterr()
    assert "secret" not in out + err
    assert '"traces"' in err, "the log says where traces are written"


async def test_log_probabilities_are_written_by_name(
    load: Callable[..., ModelReplica], tmp_path: Path
) -> None:
    replica = load(trace=True, trace_folder=str(tmp_path))
    sampling = SamplingParams(temperature=0.0, logprobs=1)
    answer = await answer_of(
        replica, dataclasses.replace(TASK, sampling=sampling, ending=EndRules(ignore_model=True))
    )
    replica.close()
    deltas = [line for line in lines(tmp_path) if line["event"] == "delta"]
    written = [scored for line in deltas for scored in line["logprobs"]]
    assert tuple(scored["token"] for scored in written) == answer.tokens
    for scored, given in zip(written, answer.logprobs, strict=True):
        assert scored["logprob"] == pytest.approx(given.drawn.logprob)
        assert scored["top"] == [{"token": scored["token"], "logprob": scored["logprob"]}]


async def test_a_model_that_traces_every_request_needs_no_request_for_it(
    load: Callable[..., ModelReplica], tmp_path: Path
) -> None:
    replica = load(trace=True, trace_folder=str(tmp_path / "traces"))
    await answer_of(replica, task("plain", trace=False))
    replica.close()
    assert lines(tmp_path / "traces")[0]["request"] == "plain/0"


async def test_a_model_without_a_folder_refuses_to_trace(
    load: Callable[..., ModelReplica],
) -> None:
    with pytest.raises(RequestError, match="trace_folder"):
        await answer_of(load(), task("traced", trace=True))


def event(tokens: int, name: str = "r") -> TraceEvent:
    return TraceEvent(name, "request", 1, tuple(range(tokens)), {"text": "ä\n"})


def opened(folder: Path, *, max_bytes: int = 2**16) -> TraceFile:
    return TraceFile(folder, "a/b:c", max_bytes=max_bytes, every=False, spell=str)


def test_files_are_bounded_and_private(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    file = opened(folder, max_bytes=1000)
    for number in range(100):
        file.write(event(5, str(number)))
    file.write(event(1000, "longer than a file"))
    file.write(event(1, "last"))
    file.close()
    before = file.path.with_name(file.path.name + ".1")
    assert {path.suffix for path in folder.iterdir()} == {".jsonl", ".1", ".lock"}
    for path in (file.path, before):
        assert 0 < path.stat().st_size <= 1000
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    kept = [json.loads(line) for p in (before, file.path) for line in p.read_text().splitlines()]
    numbers = [int(line["request"]) for line in kept[:-1]]
    assert numbers == list(range(numbers[0], 100)), "the latest lines, without a gap"
    assert (kept[-1]["request"], kept[-1]["left_out"]) == ("last", 1)


def test_a_restarted_replica_continues_its_file_and_one_beside_it_has_its_own(
    tmp_path: Path,
) -> None:
    first, beside = opened(tmp_path), opened(tmp_path)
    assert first.path != beside.path
    first.close()
    again = opened(tmp_path)
    assert again.path == first.path
    again.close()
    beside.close()


@pytest.mark.parametrize("kind", ["link", "readable"])
def test_an_existing_file_or_link_does_not_expose_the_text(kind: str, tmp_path: Path) -> None:
    file = opened(tmp_path)
    file.close()
    file.path.unlink()
    if kind == "link":
        file.path.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ConfigurationError, match="trace_folder"):
            opened(tmp_path)
        assert not (tmp_path / "elsewhere").exists()
    else:
        file.path.touch(0o644)
        opened(tmp_path).close()
        assert stat.S_IMODE(file.path.stat().st_mode) == 0o600


def test_a_full_queue_leaves_events_out_and_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_file, "QUEUED_EVENTS", 2)
    file = opened(tmp_path)
    monkeypatch.setattr(file, "_thread", object())  # not started yet
    for number in range(5):
        file.write(event(1, str(number)))
    monkeypatch.undo()
    file._events.get()
    file.write(event(1, "later"))
    file.close()
    found = [json.loads(line) for line in file.path.read_text().splitlines()]
    assert [line["request"] for line in found] == ["1", "later"]
    assert found[-1]["left_out"] == 3


def test_an_event_that_cannot_be_written_does_not_end_the_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = opened(tmp_path)
    file.write(TraceEvent("r", "delta", 1, (), {"text": "secret \ud800"}))
    file.write(event(1, "last"))
    file.close()
    [line] = [json.loads(line) for line in file.path.read_text().splitlines()]
    assert (line["request"], line["left_out"]) == ("last", 1)
    err = capsys.readouterr().err
    assert "UnicodeEncodeError" in err and "secret" not in err


def test_a_disk_that_fails_is_logged_once_without_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(path: Path) -> Any:
        raise OSError(28, "No space left on device")

    file = opened(tmp_path, max_bytes=600)
    monkeypatch.setattr(trace_file, "_opened", failing)
    for _ in range(20):
        file.write(event(5, "secret"))
    file.close()
    err = capsys.readouterr().err
    assert err.count("trace not written") == 1
    assert "secret" not in err


def test_a_file_that_could_not_be_opened_is_opened_for_a_later_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_file, failures = trace_file._opened, iter([True])

    def failing_once(path: Path) -> Any:
        if next(failures, False):
            raise OSError(24, "Too many open files")
        return open_file(path)

    file = opened(tmp_path, max_bytes=600)
    monkeypatch.setattr(trace_file, "_opened", failing_once)
    for number in range(20):
        file.write(event(5, str(number)))
    file.close()
    last = json.loads(file.path.read_text().splitlines()[-1])
    assert (last["request"], last["left_out"]) == ("19", 1)
