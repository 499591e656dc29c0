"""Replicas on the device behind Ray Serve: answers over HTTP, their speed, and a lost replica."""

import asyncio
import base64
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch

from bench.make_model import write_model
from bench.vocabulary import synthetic_vocabulary
from serve_app.config.settings import ModelSettings
from serve_app.load_test.measuring import Load, LoadClient, Sample, run_load
from serve_app.load_test.summary import summarise
from serve_app.load_test.workload import LengthRange, random_requests
from serve_app.replica.model_check import check_model
from tests.checkout import DEMO_MODEL
from tests.cuda.large_model import SHAPE
from tools.gpu_check import speed
from tools.gpu_check.report import Task
from tools.gpu_check.server import (
    APPLICATION,
    REQUEST_S,
    Server,
    ServerEndedError,
    running_server,
)

_REPLICAS = 2  # of the demo model
_PICTURE = DEMO_MODEL.with_suffix(".png")
# What the answers have, by questions; the last two are about the picture.
_KNOWN = {
    "What is 17 + 25?": ("42", False),
    "What number do you see?": ("30", True),
    "What do you see?": ("blue square", True),
}
_START_S, _LARGE_START_S, _REPLACEMENT_S, _METRICS_S = 100.0, 60.0, 40.0, 15.0
_LOG_S = 10.0
_ROUNDS = 5  # of requests while a replica is lost
_LOAD_S = 40.0  # time limit of one number of streams
_STREAMS = (1, 16, 64)
_WORDS, _ANSWER = LengthRange(32, 32), 100  # about 100 tokens of the random model's vocabulary
_CONTEXT = 512  # of a conversation with it
_GIB = 1 << 30


def run(task: Task) -> None:
    models = [_demo(task)]
    with task.report.guarding("8B is written"):
        large = _large(task)
        check_model(ModelSettings.model_validate(large))
        models.append(large)
    with running_server(models) as server:
        began = time.monotonic()
        try:
            _check(task, server, began)
        finally:
            failed = '"passed": false' in task.report.path.read_text()
            for line in server.trouble()[-8:] if failed else ():
                task.report.check("log of the server", False, line=line)
            if failed:
                server.print_log()
        with task.report.guarding("the server stops"):
            took_s, left = server.stop()
            task.report.check("the server stops and leaves no process", not left, left=left[:3])
            task.report.figure("stop of the server", took_s, "s")


def _demo(task: Task) -> dict[str, Any]:
    """The demo model: replicas that share the device."""
    return {
        "name": "demo",
        "source": str(DEMO_MODEL),
        "context_tokens": 1024,
        "replicas": _REPLICAS,
        **_device(task, 0.1, 4),
    }


def _large(task: Task) -> dict[str, Any]:
    path, shape = task.folder / "8B.gguf", speed.TINY if task.dry else replace(SHAPE, layers=32)
    write_model(path, speed.LABEL, synthetic_vocabulary(), shape)
    return {
        "name": "8B",
        "source": str(path),
        "context_tokens": _CONTEXT,
        "max_sequences": max(_STREAMS),
        "step_tokens": 2048,
        **_device(task, 0.5, 24),
    }


def _device(task: Task, share: float, memory_gib: int) -> dict[str, Any]:
    if task.dry:
        return {"device": "cpu", "num_cpus": 0.25, "threads": 1}
    return {"device": "cuda", "num_gpus": share, "memory_bytes": memory_gib * _GIB}


def _check(task: Task, server: Server, began: float) -> None:
    with task.report.guarding("the server starts"):
        _wait_ready(server, "demo", _REPLICAS, _START_S)
        task.report.figure("start until all demo replicas are ready", time.monotonic() - began, "s")
        task.report.check("the server starts", True)
        _check_answers(task, server)
        with task.report.guarding("replicas use the device"):
            _check_devices(task, server, "demo", _REPLICAS)
        with task.report.guarding("metrics"):
            slots = partial(server.metric, "caravan_engine_slots", 'model="demo"')
            server.wait("slots in /metrics", lambda: bool(slots()), _METRICS_S)
            task.report.check("metrics", True, slots=slots())
        with task.report.guarding("a replica is lost"):
            _check_loss(task, server)
        with task.report.guarding("8B over HTTP"):
            _measure_large(task, server)


def _wait_ready(server: Server, model: str, count: int, timeout_s: float) -> None:
    def ready() -> bool:
        if refused := _logged(server, model, "not served"):
            raise ServerEndedError(f"{model} is not served: {refused[0]['reason']}")
        return len(server.replicas(model)) == count

    server.wait(f"replicas of {model}", ready, timeout_s)


def _check_answers(task: Task, server: Server) -> None:
    picture = base64.b64encode(_PICTURE.read_bytes()).decode()
    for question, (known, pictured) in _KNOWN.items():
        with task.report.guarding(question):
            message: dict[str, object] = {"role": "user", "content": question}
            message |= {"images": [picture]} if pictured else {}
            body = {"model": "demo", "messages": [message], "options": {"temperature": 0}}
            whole = server.json("POST", "/api/chat", stream=False, **body)["message"]["content"]
            task.report.check(f"{question} {known}", known in whole, answer=whole)
            streamed = _streamed(server, body)
            same = "".join(streamed) == whole and len(streamed) > 1
            task.report.check(f"{question} streamed", same, parts=streamed)


def _streamed(server: Server, body: dict[str, Any]) -> list[str]:
    with httpx.stream("POST", f"{server.url}/api/chat", json=body, timeout=REQUEST_S) as reply:
        documents = [json.loads(line) for line in reply.iter_lines()]
    return [text for each in documents if (text := each["message"]["content"])]


def _check_devices(task: Task, server: Server, model: str, count: int) -> None:
    """By the files that the processes have open, and by what they have logged."""
    opened = {pid: _devices(pid) for pid in server.processes(model)}
    passed = len(opened) == count and all(bool(each) != task.dry for each in opened.values())
    task.report.check(f"{model}: processes have the device open", passed, opened=opened)
    logged = partial(_logged, server, model)
    server.wait("lines of the log", lambda: len(logged("ready")) >= count, _LOG_S)
    kinds = {(facts["kind"], facts["kernels"] == "triton") for facts in logged("device")}
    wanted = {("cpu", False)} if task.dry else {("cuda", True)}
    task.report.check(f"{model}: logged devices", kinds == wanted, seen=logged("device")[:1])
    for part in ("load_s", "warm_up_s"):
        longest = max(facts[part] for facts in logged("ready"))
        task.report.figure(f"{model}: {part} of the slowest replica", longest, "s")
    if not task.dry:
        free, total = torch.cuda.mem_get_info(task.device)
        task.report.figure(f"{model}: memory in use by all processes", (total - free) / _GIB, "GiB")


def _logged(server: Server, model: str, event: str) -> list[Mapping[str, Any]]:
    """What the replicas of the model have logged."""
    source = f"ServeReplica:{APPLICATION}:{model}"
    lines = server.log()
    return [line.facts for line in lines if line.event == event and line.source == source]


def _devices(pid: int) -> list[str]:
    """The GPUs that a process has open, as paths such as /dev/nvidia0."""
    found = set[str]()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it has been closed
            found.add(os.readlink(link))
    return sorted(path for path in found if path.removeprefix("/dev/nvidia").isdigit())


def _check_loss(task: Task, server: Server) -> None:
    """Streams continue when the process of one of two replicas is killed, and it is replaced."""
    streams, tokens = (8, 100) if task.dry else (16, 800)
    lost, *_ = server.processes("demo")
    samples = asyncio.run(_under_load(server, streams, tokens, lost))
    errors = [sample.error for sample in samples if sample.error]
    whole = not errors and all(sample.answer_tokens == tokens for sample in samples)
    passed = whole and len(samples) == _ROUNDS * streams
    task.report.check("streams continue after kill -9", passed, errors=errors[:2], of=len(samples))
    killed = time.monotonic()

    def replaced() -> bool:
        there = server.processes("demo")
        is_whole = lost not in there and len(there) == _REPLICAS
        return is_whole and len(server.replicas("demo")) == _REPLICAS

    server.wait("a new replica", replaced, _REPLACEMENT_S)
    task.report.figure("new replica after kill -9 and its streams", time.monotonic() - killed, "s")
    _check_devices(task, server, "demo", _REPLICAS)
    failovers = partial(server.metric, "caravan_failovers_total", 'cause="lost"')
    server.wait("failovers in /metrics", lambda: bool(failovers()), _METRICS_S)
    task.report.check("streams were cut by kill -9", True, failovers=failovers())


async def _under_load(server: Server, streams: int, tokens: int, lost: int) -> list[Sample]:
    """Sends requests; kills the process when so many are answered that others surely run."""
    answered = itertools.count(1)

    def kill_once(sample: Sample) -> None:
        if next(answered) == streams * 3 // 2:
            os.kill(lost, signal.SIGKILL)

    return await _load(server, "demo", _ROUNDS * streams, streams, tokens, kill_once)


async def _load(
    server: Server,
    model: str,
    count: int,
    streams: int,
    tokens: int,
    ended: Callable[[Sample], None] = lambda sample: None,
) -> list[Sample]:
    """The samples of `count` requests, `streams` at a time."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=REQUEST_S, limits=limits) as http:
        client = LoadClient(http, model, ignore_eos=True)
        requests = random_requests(_WORDS, LengthRange(tokens, tokens), seed=streams)
        return await run_load(client, requests, count, Load(streams, None, _LOAD_S), ended)


def _measure_large(task: Task, server: Server) -> None:
    _wait_ready(server, "8B", 1, _LARGE_START_S)
    _check_devices(task, server, "8B", 1)
    asyncio.run(_load(server, "8B", 2, 2, _ANSWER))  # compiles what the first step did not
    for streams in _STREAMS[:1] if task.dry else _STREAMS:
        name = f"8B over HTTP, {streams} streams"
        with task.report.guarding(name):
            samples = asyncio.run(_load(server, "8B", streams, streams, _ANSWER))
            found = summarise(samples)
            whole = found.complete == streams and found.answer_tokens == streams * _ANSWER
            task.report.check(f"{name} have whole answers", whole, errors=dict(found.errors))
            task.report.figure(name, found.answer_tokens_per_s, "tokens/s")
            decoding = streams / found.spreads["per token"].p50
            task.report.figure(f"{name}, after first tokens", decoding, "tokens/s")
            first_ms = found.spreads["first token"].p50 * 1e3
            task.report.figure(f"{name}, first token", first_ms, "ms")
