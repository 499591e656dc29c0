"""Models of the store, loaded on demand and managed by the official client, next to configured
models."""

import os
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

import httpx
import ollama
import openai
import pytest

from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store
from tests.loopback import digest
from tests.patience import HANG_S
from tests.serve.application import eventually
from tests.serve.many.application import DEMO_BYTES

QUESTION = [{"role": "user", "content": "What is the opposite of hot?"}]
GREEDY = {"temperature": 0, "num_predict": 8}


def loaded(client: ollama.Client) -> dict[str, ollama.ProcessResponse.Model]:
    return {model.model: model for model in client.ps().models}


def listed(client: ollama.Client) -> dict[str, ollama.ListResponse.Model]:
    return {model.model: model for model in client.list().models}


def failing(call, *arguments, **options) -> ollama.ResponseError:
    with pytest.raises(ollama.ResponseError) as caught:
        list(call(*arguments, **options) or [])
    return caught.value


def test_a_model_that_no_node_can_host_fails_at_once_while_others_serve(url, client):
    eventually(lambda: failing(client.chat, "huge", QUESTION).status_code == 503)
    refused = httpx.post(
        f"{url}/api/chat", json={"model": "huge", "messages": QUESTION}, timeout=HANG_S
    )
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 1
    reason = refused.json()["error"]
    assert "model 'huge' cannot be scheduled: a replica needs 1 CPU and 4 GPU on one node" in reason
    assert "largest have 4 CPU and 0 GPU" in reason
    reply = client.chat("fixed", QUESTION, options=GREEDY)
    assert "cold" in reply.message.content
    assert "huge:latest" in listed(client) and "huge:latest" not in loaded(client)


def test_a_model_is_loaded_on_demand_and_unloaded_for_the_next(client):
    assert "cold" in client.chat("demo", QUESTION, options=GREEDY).message.content
    assert "demo:latest" in loaded(client) and "tiny:latest" not in loaded(client)
    assert client.generate("TINY", "a b", raw=True, options=GREEDY).eval_count > 0
    assert "tiny:latest" in loaded(client) and "demo:latest" not in loaded(client)
    assert loaded(client)["fixed:latest"].expires_at.year > 2300
    assert loaded(client)["tiny:latest"].context_length == 128


def test_a_full_cluster_is_reported_at_once(url):
    hot = {"temperature": 50.0, "top_k": 0, "num_predict": 100}
    request = {"model": "demo", "messages": QUESTION, "options": hot, "stream": False}
    clients = 8
    while True:
        with ThreadPoolExecutor(clients) as pool:
            post = partial(httpx.post, f"{url}/api/chat", json=request, timeout=HANG_S)
            replies = [pool.submit(post) for _ in range(clients)]
            wait(replies, return_when=FIRST_COMPLETED)
            refused = httpx.post(f"{url}/api/generate", json={"model": "tiny"}, timeout=HANG_S)
            too_late = all(each.done() for each in replies)
        assert {each.result().status_code for each in replies} == {200}
        if not too_late:
            break
        clients *= 2
        assert clients < 500, "no number of clients keeps a model in use"
    assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
    assert "needs" in refused.json()["error"]


def test_keep_alive_sets_how_long_a_model_stays_loaded(client):
    client.chat("demo", QUESTION, options=GREEDY, keep_alive="1s")
    eventually(lambda: "demo:latest" not in loaded(client))
    assert client.chat("demo", [], keep_alive=-1).done_reason == "load"
    assert loaded(client)["demo:latest"].expires_at.year > 2300
    assert client.chat("demo", [], keep_alive=0).done_reason == "unload"
    assert "demo:latest" not in loaded(client)
    assert client.chat("fixed", [], keep_alive=0).done_reason == "unload"
    assert "fixed:latest" in loaded(client)


def test_lists_name_the_models_that_can_be_served(url, client):
    found = listed(client)
    assert {"fixed:latest", "demo:latest", "tiny:latest"} <= set(found)
    stored = Store(Path(os.environ["CARAVAN_MODELS"])).open(ModelName.parse("demo"))
    model = found["demo:latest"]
    assert (model.digest, model.size) == (stored.manifest.digest, stored.manifest.size_bytes)
    assert model.modified_at.timestamp() == pytest.approx(stored.modified_at, abs=1)
    assert model.details.family == "gemma3"
    description = client.show("demo")
    assert description.license == "MIT"
    assert {"completion", "vision"} <= set(description.capabilities)
    assert "vision" not in client.show("tiny").capabilities
    oai = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
    assert {"fixed", "demo:latest", "tiny:latest"} <= {model.id for model in oai.models.list()}
    reply = oai.chat.completions.create(
        model="demo", messages=QUESTION, temperature=0, max_completion_tokens=8
    )
    assert "cold" in reply.choices[0].message.content


def test_a_model_is_pulled_with_progress_and_serves(client, registry):
    name = f"{registry.host}/library/parrot:latest"
    steps = list(client.pull(name, stream=True))
    statuses = [step.status for step in steps]
    assert statuses[0] == "pulling manifest" and statuses[-1] == "success"
    assert any(step.total == step.completed == len(DEMO_BYTES) for step in steps)
    assert name in listed(client)
    assert client.chat(name, QUESTION).eval_count == 3
    again = client.pull(name)
    assert again.status == "success"
    missing = failing(client.pull, f"{registry.host}/library/nobody", stream=True)
    assert missing.error.startswith("pull model manifest: file does not exist")
    assert "pull_hosts" in failing(client.pull, "elsewhere.test/library/x").error


def test_a_model_is_copied_and_deleted(client):
    client.copy("demo", "me/second")
    assert listed(client)["me/second:latest"].digest == listed(client)["demo:latest"].digest
    assert "cold" in client.chat("me/second", QUESTION, options=GREEDY).message.content
    client.delete("me/second")
    assert "me/second:latest" not in listed(client) and "me/second:latest" not in loaded(client)
    assert failing(client.chat, "me/second", QUESTION).status_code == 404
    assert failing(client.delete, "fixed").status_code == 400


def test_a_cold_load_reports_its_duration(client):
    client.chat("demo", [], keep_alive=0)
    cold = client.chat("demo", QUESTION, options=GREEDY)
    assert 10e6 < cold.load_duration < cold.total_duration


def test_a_file_of_the_client_becomes_a_model(url, client, tiny):
    found = client.create_blob(tiny)
    assert found == digest(tiny.read_bytes())
    assert httpx.head(f"{url}/api/blobs/{found}").status_code == 200
    assert client.create("uploaded", files={"model.gguf": found}).status == "success"
    assert client.generate("uploaded", "a b", raw=True, options=GREEDY).eval_count > 0
    client.delete("uploaded")
    wrong = f"sha256:{'0' * 64}"
    assert httpx.head(f"{url}/api/blobs/{wrong}").status_code == 404
    refused = httpx.post(f"{url}/api/blobs/{wrong}", content=b"something else")
    assert refused.status_code == 400 and "digest mismatch" in refused.json()["error"]
