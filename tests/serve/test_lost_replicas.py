"""Replicas are killed and replaced under their streams: clients get what they would have got."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import ollama
import openai
import pytest
from ray import serve

from serve_app.app import build
from tests.patience import HANG_S
from tests.serve.application import (
    CALL_TIMEOUT_S,
    ENDLESS,
    Application,
    arguments,
    await_http,
    eventually,
)
from tests.serve.mortal import POISON, Sight, mortal_replicas

NAME, PATH = "lasting", "/lasting"
REPLICAS, CROWD = 2, 6
LONG = 150  # tokens, enough to be killed among
HOT = {**ENDLESS, "num_predict": 300}

# Of a part of an answer: its text, and the scores of its tokens where they are asked for.
Part = tuple[str, list[float]]
GenerateRequest = Callable[[str, int], Iterator[Part]]


def deploy(**change) -> None:
    few = {"replicas": REPLICAS, "threads": 1, "num_cpus": 0.25, "max_sequences": 8}
    args = arguments(**{**few, **change}) | {"failover": {"max_retries": 9}}
    serve.run(build(args), name=NAME, route_prefix=PATH)


@pytest.fixture(scope="module")
def url(application: Application) -> Iterator[str]:
    with mortal_replicas():
        try:
            deploy()
            await_http(f"{application.url}{PATH}")
            yield f"{application.url}{PATH}"
        finally:
            serve.delete(NAME)


def asked(method: str, *args) -> list:
    """What all replicas say, once nobody is asked who has just died."""
    answers: list = []

    def answered() -> bool:
        handle = serve.get_deployment_handle("demo", NAME)
        answers[:] = handle.broadcast(method, *args).results(timeout_s=CALL_TIMEOUT_S)
        return True

    eventually(answered)
    return answers


def sights() -> list[Sight]:
    return asked("sight")


@contextmanager
def slowly(step_s: float = 0.01) -> Iterator[None]:
    """Those that are there now take so long for each token, at least."""
    asked("pace", step_s)
    try:
        yield
    finally:
        asked("pace", 0.0)


def all_there() -> bool:
    return len({sight.pid for sight in sights()}) == REPLICAS


def native_stream(url: str, seed: int) -> Iterator[Part]:
    client = ollama.Client(host=url, timeout=HANG_S)
    options = {**HOT, "seed": seed}
    for part in client.generate("demo", "a", raw=True, options=options, stream=True):
        yield f"{part.response}{part.eval_count or ''}", []


def native_whole(url: str, seed: int) -> Iterator[Part]:
    client = ollama.Client(host=url, timeout=HANG_S)
    messages = [{"role": "user", "content": "hello"}]
    reply = client.chat("demo", messages, options={**HOT, "seed": seed})
    yield f"{reply.message.content} {reply.prompt_eval_count} {reply.eval_count}", []


def oai(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="-", timeout=HANG_S, max_retries=0)


def chat_stream(url: str, seed: int) -> Iterator[Part]:
    """Said again and again, since that is wanted, with log-probabilities."""
    drawn = {"temperature": 2, "frequency_penalty": -2, "max_tokens": 300, "logprobs": True}
    messages = [{"role": "user", "content": "hello"}]
    stream = oai(url).chat.completions.create(
        model="demo", messages=messages, stream=True, seed=seed, **drawn
    )
    for part in stream:
        (choice,) = part.choices
        scores = choice.logprobs.content if choice.logprobs else []
        yield choice.delta.content or "", [each.logprob for each in scores]


def completion_whole(url: str, seed: int) -> Iterator[Part]:
    drawn = {"temperature": 2, "frequency_penalty": -2, "max_tokens": 300}
    reply = oai(url).completions.create(model="demo", prompt="hello", seed=seed, **drawn)
    assert reply.usage is not None
    counts = f"{reply.usage.prompt_tokens} {reply.usage.completion_tokens}"
    yield f"{reply.choices[0].text} {counts}", []


def said(ask: GenerateRequest, url: str, seed: int) -> Part:
    """The whole: how it comes in parts is not part of the answer."""
    texts, scores = zip(*ask(url, seed), strict=True)
    return "".join(texts), [score for some in scores for score in some]


def long_answer(ask: GenerateRequest, url: str) -> int:
    """A seed that gives one."""
    return next(seed for seed in range(50) if len(said(ask, url, seed)[0]) > 3 * LONG)


@contextmanager
def held_in_the_middle() -> Iterator[None]:
    """Answers stop at their second delta, where there is one, until their replica is gone."""
    asked("hold_after", 1)
    try:
        yield
    finally:
        asked("hold_after", None)


def kill_whoever_works() -> int:
    """The id of the process that is gone then."""
    at_work: list[int] = []

    def found() -> bool:
        at_work[:] = [sight.pid for sight in sights() if sight.holding]
        return bool(at_work)

    eventually(found)
    os.kill(at_work[0], signal.SIGKILL)
    return at_work[0]


@pytest.mark.parametrize("ask", [native_stream, native_whole, chat_stream, completion_whole])
def test_a_killed_replica_changes_no_answer(url: str, ask: GenerateRequest):
    eventually(all_there)
    seed = long_answer(ask, url)
    undisturbed = said(ask, url, seed)
    with slowly(), held_in_the_middle(), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(said, ask, url, seed)
        killed = kill_whoever_works()
        assert answer.result() == undisturbed
    assert killed not in [sight.pid for sight in sights()]


def test_a_request_that_kills_replicas_is_stopped_after_the_second_and_the_others_go_on(
    url: str, tmp_path: Path
):
    eventually(all_there)
    seeds = range(CROWD)
    undisturbed = [said(native_stream, url, seed) for seed in seeds]
    deaths = tmp_path / "deaths"
    with slowly(), ThreadPoolExecutor(CROWD) as pool:
        answers = [pool.submit(said, native_stream, url, seed) for seed in seeds]
        deadly = {"model": "demo", "raw": True, "prompt": f"{POISON}{deaths}", "stream": False}
        refused = httpx.post(f"{url}/api/generate", json=deadly, timeout=HANG_S)
        assert [answer.result() for answer in answers] == undisturbed
    assert refused.status_code == 500
    assert "2 replicas of model 'demo' died while" in refused.json()["error"]
    assert len(set(deaths.read_text().split())) == len(deaths.read_text().split()) == 2


def test_a_new_version_changes_no_answer(url: str):
    """Clients ask on while every replica is replaced, and the ingress with them."""
    eventually(all_there)
    seeds = range(CROWD)
    undisturbed = [said(native_stream, url, seed) for seed in seeds]
    before = {sight.pid for sight in sights()}
    done = threading.Event()

    def ask_on(seed: int) -> list[Part]:
        answers = []
        while not done.is_set():
            answers.append(said(native_stream, url, seed))
        return answers

    with slowly(), ThreadPoolExecutor(CROWD) as pool:
        asking = [pool.submit(ask_on, seed) for seed in seeds]
        try:
            deploy(max_sequences=9)
            eventually(lambda: all_there() and before.isdisjoint(s.pid for s in sights()))
        finally:
            done.set()
        for seed, each in zip(seeds, asking, strict=True):
            assert all(answer == undisturbed[seed] for answer in each.result())
    assert sum(sight.continued for sight in sights()) > 0, "no stream was handed over"
