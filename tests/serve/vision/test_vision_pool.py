"""A pool of encoders that replicas share: each image is encoded once, and encoders die."""

import asyncio
import os
import signal
from base64 import b64encode
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import httpx
import pytest

from runtime.engine.engine_statistics import EngineStatistics
from serve_app.config.settings import ModelSettings
from serve_app.replica.loading import load_replica
from tests.patience import HANG_S
from tests.serve.application import call_replicas, engine_of, eventually
from tests.serve.vision.application import NAME, models
from tests.unit.serve_app.replica.test_vision_replica import answer, likelihoods
from tests.vision_prompts import png

MODEL, ENCODERS = "shared", "VisionEncoder:shared"
TOKENS = 6
Likelihoods = list[tuple[str, float]]


def encoders() -> list[int]:
    """The process ids of the encoders that answer."""
    return call_replicas("pid", deployment=ENCODERS, application=NAME, skip_dead=True)


def encoded() -> float:
    """The images that the encoders which answer have computed."""
    report = "record_autoscaling_stats"
    reports = call_replicas(report, deployment=ENCODERS, application=NAME, skip_dead=True)
    return sum(each["work_total"] for each in reports)


def replicas() -> list[EngineStatistics]:
    """Of the replicas that answer."""
    statuses = call_replicas("status", deployment=MODEL, application=NAME, skip_dead=True)
    return [engine_of(status) for status in statuses]


def images_waiting() -> int:
    return sum(replica.images_waiting for replica in replicas())


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
        images = {} if image is None else {"images": [b64encode(image).decode()]}
        message = {"role": "user", "content": text, **images}
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


def test_answers_are_those_of_a_replica_with_its_own_encoder(client, tmp_path) -> None:
    image = png(30, 40)
    (model,) = (each for each in models(tmp_path) if each["name"] == MODEL)
    replica = load_replica(ModelSettings(**{**model, "vision": {}}))
    try:
        own = asyncio.run(answer(replica, image, "hello", max_tokens=TOKENS))
    finally:
        replica.close()
    [with_image], [text] = (results(client.ask(("hello", each))) for each in (image, None))
    assert [token for token, _ in with_image] == [entry.drawn.text for entry in own.logprobs]
    # Features are rounded on their way.
    expected = pytest.approx(likelihoods(own), abs=0.02)
    assert [likelihood for _, likelihood in with_image] == expected
    assert [likelihood for _, likelihood in text] != expected


def test_all_replicas_and_turns_share_one_encoding(client) -> None:
    image, before, received = png(40, 30, seed=2), encoded(), received_by_each()
    for turn in range(20):
        results(client.ask(*((f"{turn} {number}", image) for number in range(8))))
        if all(now > then for now, then in zip(received_by_each(), received, strict=True)):
            break
    assert received_by_each() == [then + 1 for then in received]
    assert encoded() == before + 1


def received_by_each() -> list[int]:
    return [replica.images_encoded_total for replica in replicas()]


def test_images_wait_for_new_encoders_when_all_are_killed(client) -> None:
    eventually(both_encoders_run)
    killed = encoders()
    for encoder in killed:
        os.kill(encoder, signal.SIGSTOP)
    try:
        waiting = client.ask(("a", png(50, 30, seed=50)))
        eventually(lambda: images_waiting() == 1)
        assert results(client.ask(("b", None))), "requests without images do not wait"
    finally:
        for encoder in killed:
            with suppress(ProcessLookupError):
                os.kill(encoder, signal.SIGKILL)
    assert results(waiting)
    assert set(encoders()).isdisjoint(killed)


def test_images_of_a_killed_encoder_are_encoded_by_the_other(client) -> None:
    eventually(both_encoders_run)
    first, second = encoders()
    os.kill(first, signal.SIGSTOP)
    os.kill(second, signal.SIGSTOP)
    try:
        answers = client.ask(*((f"n{n}", png(20 + n, 30, seed=n)) for n in range(8)))
        eventually(lambda: images_waiting() == 8)
    finally:
        os.kill(first, signal.SIGKILL)
        os.kill(second, signal.SIGCONT)
    assert len(results(answers)) == 8
