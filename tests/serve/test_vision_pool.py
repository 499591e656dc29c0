"""Encoders that replicas share, in processes of their own: shared work, and encoders that die."""

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
from serve_app.vision.encoder import EncoderStatistics
from tests.patience import HANG_S
from tests.serve.application import CALL_TIMEOUT_S, Application, await_http, eventually
from tests.tiny_seeing import write_tiny_seeing
from tests.unit.serve_app.test_seeing import answer, likelihoods
from tests.vision_prompts import png

NAME, PATH = "pooled", "/pooled"
MODEL, ENCODERS = "eyes", "VisionEncoder:eyes"
WAIT_S = 280.0  # for an encoder, the most that a model may be given
TOKENS = 6
Likelihoods = list[tuple[str, float]]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> dict:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    projector = write_tiny_seeing(path, flavour="llama.cpp")
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
    return told_by(ENCODERS)


def replicas() -> list[EngineStatistics]:
    return told_by(MODEL)


def told_by(deployment: str) -> list:
    """The statistics of those of its replicas that answer."""
    asked = serve.get_deployment_handle(deployment, NAME).broadcast("statistics")
    told = asked.results(timeout_s=CALL_TIMEOUT_S, return_exceptions=True)
    return [each for each in told if not isinstance(each, Exception)]


def total(statistics: list, name: str = "images_encoded_total") -> int:
    return sum(getattr(each, name) for each in statistics)


def both_there() -> bool:
    return len(encoders()) == 2


class Client:
    """Holds conversations of one turn, all at once; an answer is its tokens' likelihoods."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=HANG_S)
        self._threads = ThreadPoolExecutor(16)

    def ask(self, *turns: tuple[str, bytes | None]) -> list[Future[Likelihoods]]:
        return [self._threads.submit(self._answer, *turn) for turn in turns]

    def _answer(self, text: str, image: bytes | None) -> Likelihoods:
        shown = {} if image is None else {"images": [b64encode(image).decode()]}
        message = {"role": "user", "content": text, **shown}
        options = {"temperature": 0, "num_predict": TOKENS}
        asked = {"model": MODEL, "messages": [message], "options": options}
        asked |= {"stream": False, "logprobs": True}
        response = self._http.post("/api/chat", json=asked)
        assert response.status_code == 200, response.text
        return [(entry["token"], entry["logprob"]) for entry in response.json()["logprobs"]]


@pytest.fixture(scope="module")
def client(url: str) -> Client:
    return Client(url)


def said(answers: list[Future[Likelihoods]]) -> list[Likelihoods]:
    return [answer.result(HANG_S) for answer in answers]


def test_the_answer_is_that_of_a_replica_with_eyes_of_its_own(client, model) -> None:
    image = png(30, 40)
    replica = load_replica(ModelSettings(**model))
    try:
        own = asyncio.run(answer(replica, image, "hello", max_tokens=TOKENS))
    finally:
        replica.close()
    [seen], [blind] = (said(client.ask(("hello", shown))) for shown in (image, None))
    assert [token for token, _ in seen] == [entry.drawn.text for entry in own.logprobs]
    # Features are rounded on their way.
    expected = pytest.approx(likelihoods(own), abs=0.02)
    assert [likelihood for _, likelihood in seen] == expected
    assert [likelihood for _, likelihood in blind] != expected


def test_all_replicas_and_turns_share_one_encoding(client) -> None:
    image, encoded, received = png(40, 30, seed=1), total(encoders()), received_by_each()
    for turn in range(20):
        said(client.ask(*((f"{turn} {number}", image) for number in range(8))))
        if all(now > before for now, before in zip(received_by_each(), received, strict=True)):
            break
    assert received_by_each() == [before + 1 for before in received]
    assert total(encoders()) == encoded + 1


def received_by_each() -> list[int]:
    return [replica.images_encoded_total for replica in replicas()]


def test_images_in_flight_on_an_encoder_that_is_killed_go_to_the_other(client) -> None:
    eventually(both_there)
    first, second = encoders()
    os.kill(first.pid, signal.SIGSTOP)
    os.kill(second.pid, signal.SIGSTOP)
    try:
        asked = client.ask(*((f"n{n}", png(20 + n, 30, seed=n)) for n in range(8)))
        eventually(lambda: total(replicas(), "images_waiting") == 8)
    finally:
        os.kill(first.pid, signal.SIGKILL)
        os.kill(second.pid, signal.SIGCONT)
    assert len(said(asked)) == 8


def test_when_all_encoders_are_killed_images_wait_for_the_next_ones(client) -> None:
    eventually(both_there)
    gone = encoders()
    for encoder in gone:
        os.kill(encoder.pid, signal.SIGSTOP)
    try:
        seeing = client.ask(("a", png(50, 30, seed=50)))
        eventually(lambda: total(replicas(), "images_waiting") == 1)
        assert said(client.ask(("b", None))), "who sees nothing waits for nobody"
    finally:
        for encoder in gone:
            with suppress(ProcessLookupError):
                os.kill(encoder.pid, signal.SIGKILL)
    assert said(seeing)
    assert {encoder.pid for encoder in encoders()}.isdisjoint(each.pid for each in gone)
