"""A pool of encoders that replicas share: each image is encoded once, and encoders die."""

import asyncio
import os
import signal
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import httpx
import pytest
from ray import serve

from runtime.engine.engine import EngineStatistics
from serve_app.app import build
from serve_app.config.settings import ModelSettings
from serve_app.replica.loading import load_replica
from serve_app.vision.encoder_replica import EncoderStatistics
from tests.patience import HANG_S
from tests.serve.application import Application, await_http, call_replicas, eventually
from tests.tiny_vision_model import write_tiny_vision_model
from tests.unit.serve_app.replica.test_vision_replica import answer, likelihoods
from tests.vision_prompts import png

NAME, PATH = "pooled", "/pooled"
MODEL, ENCODERS = "shared", "VisionEncoder:shared"
WAIT_S = 280.0  # for an encoder, the most that a model may be given
TOKENS = 6
Likelihoods = list[tuple[str, float]]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> dict:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    projector = write_tiny_vision_model(path, flavour="llama.cpp")
    files = {"source": str(path), "projector": str(projector)}
    limits = {"context_tokens": 128, "max_sequences": 8, "num_cpus": 0.1, "threads": 1}
    limits |= {"image_cache_bytes": 2**20}  # for all images of a test, if they meet on one replica
    return {"name": MODEL, "device": "cpu", **files, **limits}


@pytest.fixture(scope="module")
def url(application: Application, model: dict) -> Iterator[str]:
    """Of an application with two replicas and two encoders."""
    pool = {"replicas": 2, "num_cpus": 0.1, "threads": 1, "batch_images": 4, "timeout_s": WAIT_S}
    try:
        args = {"models": [{**model, "replicas": 2, "vision": pool}]}
        serve.run(build(args), name=NAME, route_prefix=PATH)
        await_http(f"{application.url}{PATH}")
        yield f"{application.url}{PATH}"
    finally:
        serve.delete(NAME)


def encoders() -> list[EncoderStatistics]:
    return statistics(ENCODERS)


def replicas() -> list[EngineStatistics]:
    return statistics(MODEL)


def statistics(deployment: str) -> list:
    """Of the replicas that answer."""
    return call_replicas("statistics", deployment=deployment, application=NAME, skip_dead=True)


def total(statistics: list, name: str = "images_encoded_total") -> int:
    return sum(getattr(each, name) for each in statistics)


def both_encoders_run() -> bool:
    return len(encoders()) == 2


class Client:
    """Sends chats at once; an answer is its tokens with their log-probabilities."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=HANG_S)
        self._threads = ThreadPoolExecutor(16)

    def ask(self, *turns: tuple[str, bytes | None]) -> list[Future[Likelihoods]]:
        return [self._threads.submit(self._answer, *turn) for turn in turns]

    def _answer(self, text: str, image: bytes | None) -> Likelihoods:
        shown = {} if image is None else {"images": [b64encode(image).decode()]}
        message = {"role": "user", "content": text, **shown}
        options = {"temperature": 0, "num_predict": TOKENS}
        body = {"model": MODEL, "messages": [message], "options": options}
        body |= {"stream": False, "logprobs": True}
        response = self._http.post("/api/chat", json=body)
        assert response.status_code == 200, response.text
        return [(entry["token"], entry["logprob"]) for entry in response.json()["logprobs"]]


@pytest.fixture(scope="module")
def client(url: str) -> Client:
    return Client(url)


def results(answers: list[Future[Likelihoods]]) -> list[Likelihoods]:
    return [answer.result(HANG_S) for answer in answers]


def test_answers_are_those_of_a_replica_with_its_own_encoder(client, model) -> None:
    image = png(30, 40)
    replica = load_replica(ModelSettings(**model))
    try:
        own = asyncio.run(answer(replica, image, "hello", max_tokens=TOKENS))
    finally:
        replica.close()
    [seen], [text] = (results(client.ask(("hello", shown))) for shown in (image, None))
    assert [token for token, _ in seen] == [entry.drawn.text for entry in own.logprobs]
    # Features are rounded on their way.
    expected = pytest.approx(likelihoods(own), abs=0.02)
    assert [likelihood for _, likelihood in seen] == expected
    assert [likelihood for _, likelihood in text] != expected


def test_all_replicas_and_turns_share_one_encoding(client) -> None:
    image, encoded, received = png(40, 30, seed=1), total(encoders()), received_by_each()
    for turn in range(20):
        results(client.ask(*((f"{turn} {number}", image) for number in range(8))))
        if all(now > before for now, before in zip(received_by_each(), received, strict=True)):
            break
    assert received_by_each() == [before + 1 for before in received]
    assert total(encoders()) == encoded + 1


def received_by_each() -> list[int]:
    return [replica.images_encoded_total for replica in replicas()]


def test_images_of_a_killed_encoder_are_encoded_by_the_other(client) -> None:
    eventually(both_encoders_run)
    first, second = encoders()
    os.kill(first.pid, signal.SIGSTOP)
    os.kill(second.pid, signal.SIGSTOP)
    try:
        answers = client.ask(*((f"n{n}", png(20 + n, 30, seed=n)) for n in range(8)))
        eventually(lambda: total(replicas(), "images_waiting") == 8)
    finally:
        os.kill(first.pid, signal.SIGKILL)
        os.kill(second.pid, signal.SIGCONT)
    assert len(results(answers)) == 8


def test_images_wait_for_new_encoders_when_all_are_killed(client) -> None:
    eventually(both_encoders_run)
    killed = encoders()
    for encoder in killed:
        os.kill(encoder.pid, signal.SIGSTOP)
    try:
        waiting = client.ask(("a", png(50, 30, seed=50)))
        eventually(lambda: total(replicas(), "images_waiting") == 1)
        assert results(client.ask(("b", None))), "requests without images do not wait"
    finally:
        for encoder in killed:
            with suppress(ProcessLookupError):
                os.kill(encoder.pid, signal.SIGKILL)
    assert results(waiting)
    assert {encoder.pid for encoder in encoders()}.isdisjoint(each.pid for each in killed)
