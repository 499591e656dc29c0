"""Models of the store, loaded on demand and managed by the official client, next to configured
models."""

import json
import os
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import ollama
import openai
import pytest

from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store
from tests.loopback import digest
from tests.patience import HANG_S
from tests.serve.application import Application, eventually
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
    assert description.license == "MIT" and "completion" in description.capabilities
    oai = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
    assert {"fixed", "demo:latest", "tiny:latest"} <= {model.id for model in oai.models.list()}
    reply = oai.chat.completions.create(
        model="demo", messages=QUESTION, temperature=0, max_completion_tokens=8
    )
    assert "cold" in reply.choices[0].message.content


def test_unknown_models_are_not_found(url, client):
    for call, arguments in [
        (client.chat, ("nobody", QUESTION)),
        (client.generate, ("nobody", "x")),
        (client.embed, ("nobody", "x")),
        (client.show, ("nobody",)),
        (client.delete, ("nobody",)),
        (client.copy, ("nobody", "other")),
    ]:
        refused = failing(call, *arguments)
        assert refused.status_code == 404 and "'nobody'" in refused.error
    assert httpx.get(f"{url}/v1/models/nobody").status_code == 404


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


def test_a_model_is_created_from_another_one(url, client):
    statuses = [
        step.status
        for step in client.create(
            "brief",
            from_="demo",
            system="You are brief.",
            parameters={"temperature": 0, "num_predict": 2},
            stream=True,
        )
    ]
    assert statuses[-2:] == ["writing manifest", "success"]
    assert client.chat("brief", QUESTION).eval_count <= 2
    description = client.show("brief")
    assert description.modelfile.startswith("FROM brief:latest\n")
    assert "PARAMETER num_predict 2" in description.modelfile
    modelfile = "FROM brief\nSYSTEM You are not.\nPARAMETER num_predict 1"
    made = httpx.post(
        f"{url}/api/create", json={"model": "briefer", "modelfile": modelfile}, timeout=HANG_S
    )
    assert json.loads(made.text.splitlines()[-1]) == {"status": "success"}
    assert client.chat("briefer", QUESTION).eval_count == 1
    refused = httpx.post(f"{url}/api/create", json={"model": "x", "modelfile": "FROM /etc/passwd"})
    assert refused.status_code == 400 and "is a path" in refused.json()["error"]
    for name in ("brief", "briefer"):
        client.delete(name)


def test_a_session_with_a_configured_model_is_saved_and_continues(client):
    """As `/save` of `ollama run` does."""
    session = [*QUESTION, {"role": "assistant", "content": "Cold."}]
    steps = client.create(
        "session", from_="fixed", parameters={"num_predict": 8}, messages=session, stream=True
    )
    assert [step.status for step in steps][-1] == "success"
    description = client.show("session")
    assert "num_ctx                        128" in description.parameters
    again = client.chat("session", QUESTION, options={"temperature": 0})
    assert "cold" in again.message.content and again.prompt_eval_count > 20
    assert loaded(client)["session:latest"].context_length == 128
    client.delete("session")


def test_a_configured_model_is_copied(client):
    client.copy("fixed", "me/own")
    assert "cold" in client.chat("me/own", QUESTION, options=GREEDY).message.content
    long = failing(client.chat, "me/own", [{"role": "user", "content": "word " * 500}])
    assert long.status_code == 400 and "'me/own:latest'" in long.error
    client.delete("me/own")


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


def test_foreign_web_pages_may_not_manage_models(url):
    own = url.removesuffix(urlsplit(url).path)
    for origin, status in [("https://elsewhere.test", 403), ("null", 403), (own, 404)]:
        body = {"source": "nobody", "destination": "x"}
        answer = httpx.post(f"{url}/api/copy", json=body, headers={"origin": origin})
        assert answer.status_code == status, origin


def test_without_management_nothing_is_managed(application: Application):
    for method, path in [("POST", "pull"), ("POST", "create"), ("DELETE", "delete")]:
        answer = httpx.request(method, f"{application.url}/api/{path}", json={"model": "demo"})
        assert answer.status_code == 403 and "manage_models" in answer.json()["error"]
    with suppress(ollama.ResponseError):
        ollama.Client(host=application.url).delete("demo")
    assert [m.model for m in ollama.Client(host=application.url).list().models] == ["demo:latest"]
