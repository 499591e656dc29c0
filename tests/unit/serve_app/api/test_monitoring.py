"""`/status.json`: the state of the engines, for keys that may use their models."""

import dataclasses
import time

import pytest

from runtime.engine.engine_statistics import EngineStatistics
from serve_app.api import monitoring
from serve_app.messages.replica_status import ReplicaStatus
from tests.unit.serve_app.api.api_keys import api_key
from tests.unit.serve_app.fake_replicas import PretendReplica, http_client

KEYS = (api_key("all"), api_key("some", models=["demo"]), api_key("none", models=["x"]))


def status(replica: str, **engines: EngineStatistics) -> ReplicaStatus:
    return ReplicaStatus(replica, {name: dataclasses.asdict(e) for name, e in engines.items()})


STATUSES = [
    status("b", demo=EngineStatistics(running=1)),
    status("a", demo=EngineStatistics(running=2, slots=4, cached_tokens_total=7)),
    status("c", other=EngineStatistics(), x=EngineStatistics(waiting=3)),
]


def test_the_shown_fields_are_those_of_engines():
    fields = {field.name for field in dataclasses.fields(EngineStatistics)}
    assert set(monitoring.SHOWN) <= fields


@pytest.mark.parametrize(
    ("key", "found"),
    [
        ("all", {"demo": ["a", "b"], "other": ["c"], "x": ["c"]}),
        ("some", {"demo": ["a", "b"]}),
        ("none", {"x": ["c"]}),
    ],
)
async def test_a_key_sees_the_replicas_of_its_models(key, found):
    async with http_client(PretendReplica(), api_keys=KEYS, statuses=STATUSES) as client:
        answer = await client.get("/status.json", headers={"authorization": f"Bearer {key}"})
        assert (await client.get("/status.json")).status_code == 401
    models = {each["name"]: each["replicas"] for each in answer.json()["models"]}
    assert {name: [one["id"] for one in replicas] for name, replicas in models.items()} == found
    if "demo" in models:
        first = models["demo"][0]
        assert (first["running"], first["slots"], first["cached_tokens_total"]) == (2, 4, 7)
        assert first.keys() == {"id", *monitoring.SHOWN}


async def test_a_model_without_replicas_is_listed():
    async with http_client(PretendReplica(), statuses=[]) as client:
        answer = await client.get("/status.json")
    assert answer.json()["models"] == [{"name": "demo", "replicas": []}]


async def test_the_time_of_the_reading_is_that_of_all_hosts():
    began = time.time()
    async with http_client(PretendReplica(), statuses=STATUSES) as client:
        answer = await client.get("/status.json")
    assert began <= answer.json()["at"] <= time.time()


async def test_replicas_are_asked_once_a_second_for_all_readers():
    statuses = [STATUSES[0]]
    async with http_client(PretendReplica(), statuses=statuses) as client:
        first = (await client.get("/status.json")).json()
        statuses[0] = STATUSES[1]
        assert (await client.get("/status.json")).json() == first
