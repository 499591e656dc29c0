"""Metrics of all processes, recorded with Ray and collected by the ingress."""

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.patience import HANG_S
from tests.serve.application import Application, eventually


def totals(application: Application) -> dict[str, float]:
    """Sums over the series of the demo model, or of all if they have no model."""
    text = httpx.get(f"{application.url}/metrics", timeout=HANG_S).text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.get("model", "demo") == "demo":
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def test_the_ingress_exports_what_ingress_and_engine_have_counted(application: Application):
    before = totals(application).get("caravan_replies_total", 0)
    body = {"model": "demo", "prompt": "Hi", "options": {"num_predict": 4}, "stream": False}
    answer = httpx.post(f"{application.url}/api/generate", json=body, timeout=HANG_S).json()
    eventually(lambda: totals(application).get("caravan_replies_total", 0) > before)
    eventually(lambda: totals(application).get("caravan_engine_slots", 0) >= 32)
    eventually(lambda: totals(application).get("caravan_engine_steps_total", 0) >= 1)
    found = totals(application)
    assert found["caravan_completion_tokens_total"] >= answer["eval_count"]
    assert found["caravan_time_to_first_token_seconds_count"] >= 1
    assert found["caravan_nodes_unreachable"] == 0
    assert not [name for name in found if not name.startswith("caravan_")]


def test_a_response_has_the_id_of_its_request_once(application: Application):
    for given in ({}, {"x-request-id": "one"}):
        answer = httpx.get(f"{application.url}/api/version", headers=given, timeout=HANG_S)
        (id,) = answer.headers.get_list("x-request-id")
        assert id == given.get("x-request-id", id)
        assert id


def test_the_status_shows_the_engine_of_each_replica(application: Application):
    (model,) = httpx.get(f"{application.url}/status.json", timeout=HANG_S).json()["models"]
    (replica,) = model["replicas"]
    assert (model["name"], replica["slots"]) == ("demo", 32)
    assert replica["pages_total"] == application.statistics().pages_total
