"""Replicas are killed and replaced during streams: clients get the answers of undisturbed ones."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import httpx
import ollama
import openai

from tests.patience import HANG_S
from tests.serve.application import ENDLESS, eventually
from tests.serve.fragile_replicas import CRASH_PROMPT
from tests.serve.pair.application import MAX_RETRIES, both_run, call, deploy, reports

CLIENTS = 3
PAUSE_S = 0.5  # between their answers, which would leave no time to replicas that start
LONG = 150  # tokens, enough to be killed among
HOT = {**ENDLESS, "num_predict": 300}

# Text of a part of an answer, and the log-probabilities of its tokens where requested.
Part = tuple[str, list[float]]
Ask = Callable[[str, int], Iterator[Part]]


@contextmanager
def slow_steps(step_s: float = 0.01) -> Iterator[None]:
    """Each step of the current replicas takes at least so long."""
    call("pace", step_s)
    try:
        yield
    finally:
        call("pace", 0.0)


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
    """Repetitive answers, by a negative penalty, with log-probabilities."""
    drawn = {"temperature": 2, "frequency_penalty": -2, "max_tokens": 300, "logprobs": True}
    messages = [{"role": "user", "content": "hello"}]
    stream = oai(url).chat.completions.create(
        model="demo", messages=messages, stream=True, seed=seed, **drawn
    )
    for part in stream:
        (choice,) = part.choices
        scores = choice.logprobs.content if choice.logprobs else []
        yield choice.delta.content or "", [each.logprob for each in scores]


def whole(ask: Ask, url: str, seed: int) -> Part:
    """The whole answer: its division into parts may differ."""
    texts, scores = zip(*ask(url, seed), strict=True)
    return "".join(texts), [score for some in scores for score in some]


def long_answers(ask: Ask, url: str, count: int) -> dict[int, Part]:
    """The undisturbed answers of so many seeds that have long ones."""
    answers = ((seed, whole(ask, url, seed)) for seed in range(50))
    return dict(islice((each for each in answers if len(each[1][0]) > 3 * LONG), count))


@contextmanager
def answers_held() -> Iterator[None]:
    """Answers stop after their first delta; they continue at the end, or on another replica."""
    call("hold_after", 1)
    try:
        yield
    finally:
        call("hold_after", None)


def test_a_request_that_crashes_replicas_ends_after_max_retries_and_changes_no_answer(
    url: str, tmp_path: Path
):
    undisturbed = {ask: long_answers(ask, url, 2) for ask in (native_stream, chat_stream)}
    undisturbed[native_whole] = long_answers(native_whole, url, 1)
    asked = [(ask, seed) for ask, answers in undisturbed.items() for seed in answers]
    deaths = tmp_path / "deaths"
    with answers_held(), ThreadPoolExecutor(len(asked)) as pool:
        answers = [pool.submit(whole, ask, url, seed) for ask, seed in asked]
        eventually(lambda: sum(report.held for report in reports()) == len(asked))
        deadly = {
            "model": "demo",
            "raw": True,
            "prompt": f"{CRASH_PROMPT}{deaths}",
            "stream": False,
        }
        refused = httpx.post(f"{url}/api/generate", json=deadly, timeout=HANG_S)
        found = [answer.result() for answer in answers]
    assert found == [undisturbed[ask][seed] for ask, seed in asked]
    assert refused.status_code == 500
    assert f"`failover.max_retries` is {MAX_RETRIES}" in refused.json()["error"]
    pids = deaths.read_text().split()
    assert len(set(pids)) == len(pids) == MAX_RETRIES + 1
    assert set(pids).isdisjoint(str(report.pid) for report in reports())


def test_a_new_version_changes_no_answer(url: str):
    """Clients send requests while all replicas and the ingress are replaced."""
    seeds = range(CLIENTS)
    undisturbed = [whole(native_stream, url, seed) for seed in seeds]
    before = {report.pid for report in reports()}
    done = threading.Event()

    def ask_repeatedly(seed: int) -> list[Part]:
        answers = []
        while not done.wait(PAUSE_S):
            answers.append(whole(native_stream, url, seed))
        return answers

    with slow_steps(), ThreadPoolExecutor(CLIENTS) as pool:
        asking = [pool.submit(ask_repeatedly, seed) for seed in seeds]
        try:
            deploy(max_sequences=7)
            eventually(lambda: both_run() and before.isdisjoint(report.pid for report in reports()))
        finally:
            done.set()
        for seed, each in zip(seeds, asking, strict=True):
            assert all(answer == undisturbed[seed] for answer in each.result())
    assert sum(report.resumed for report in reports()) > 0, "no stream was resumed"
