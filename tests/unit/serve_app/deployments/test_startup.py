"""How an application and its replicas start: log lines, errors, and the order of steps."""

import json
import os
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from ray.serve.exceptions import RayServeException

from runtime.errors import CaravanError, EngineDeadError, ModelUnavailableError
from runtime.worker.runner import DeviceRunner
from serve_app.app import build
from serve_app.config.on_demand_settings import OnDemandSettings
from serve_app.config.settings import ModelSettings
from serve_app.deployments.model_deployments import (
    ModelDeployment,
    OnDemandDeployment,
    VisionEncoder,
)
from serve_app.transport.stream_server import StreamServer
from tests.checkout import DEMO_MODEL

MODEL = {
    "name": "demo",
    "source": str(DEMO_MODEL),
    "device": "cpu",
    "context_tokens": 64,
    "max_sequences": 2,
}


@pytest.fixture
def done(monkeypatch) -> list[str]:
    """The steps of a start that have been done."""
    done: list[str] = []
    warm_up, start = DeviceRunner.warm_up, StreamServer.start

    def warming_up(runner, *arguments, **options):
        warm_up(runner, *arguments, **options)
        done.append("warmed up")

    async def starting(server, host):
        done.append("listening")
        return await start(server, "127.0.0.1")

    monkeypatch.setattr(DeviceRunner, "warm_up", warming_up)
    monkeypatch.setattr(StreamServer, "start", starting)
    # Metrics name the replica, which only Serve gives a name.
    monkeypatch.setattr("serve_app.deployments.model_deployments._publish", lambda *arguments: None)
    return done


class LocalDeployment(ModelDeployment):
    """A deployment in this process, where no Serve awaits `__del__`."""

    def __del__(self) -> None:
        """The test closes it."""


class LocalEncoder(VisionEncoder):
    def __del__(self) -> None:
        """The test closes it."""


class LocalPool(OnDemandDeployment):
    def __del__(self) -> None:
        """The test closes it."""


@dataclass(frozen=True)
class Kind:
    """A deployment, its settings, where its load begins, the method that needs what is loaded, and
    the name of that in messages."""

    deployment: type
    settings: object
    load: str
    method: str
    what: str


KINDS = [
    Kind(
        LocalDeployment,
        ModelSettings(**MODEL),
        "serve_app.replica.loading.load",
        "describe",
        "model 'demo'",
    ),
    Kind(
        LocalEncoder,
        ModelSettings(**MODEL),
        "serve_app.replica.loading._load_model",
        "address",
        "the vision encoder of model 'demo'",
    ),
    Kind(
        LocalPool,
        OnDemandSettings(),
        "serve_app.on_demand.store_manager_assembly.StoreLoader",
        "report",
        "models on demand",
    ),
]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.method)
def failing(request, monkeypatch) -> Kind:
    """A kind of deployment that cannot load what it serves."""
    kind: Kind = request.param
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="r"))
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: context)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr("serve_app.deployments.model_deployments._publish", lambda *arguments: None)
    monkeypatch.setattr(kind.load, fail)
    return kind


def events(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_building_an_application_logs_the_checked_models(capsys):
    build({"models": [MODEL, {**MODEL, "name": "other"}]})
    [configured] = [
        event for event in events(capsys.readouterr().err) if event["event"] == "configured"
    ]
    assert configured["models"] == ["demo", "other"]
    assert configured["check_s"] > 0


def fail(*arguments, **named):
    raise RuntimeError("a shape is wrong\nin layer 3")


def served_elsewhere(monkeypatch, served: bool) -> None:
    """Whether other replicas serve the model, of which only Serve knows."""

    async def answer(probe: str) -> bool:
        return served

    monkeypatch.setattr("serve_app.deployments.model_deployments._is_served_elsewhere", answer)


@pytest.mark.parametrize(
    ("where", "parallel"),
    [
        ("serve_app.replica.loading.load", {}),
        ("serve_app.replica.rank_actors.RankActors", {"tensor": 2}),
    ],
)
async def test_every_failure_of_a_replica_is_one_line(done, monkeypatch, capsys, where, parallel):
    served_elsewhere(monkeypatch, False)
    monkeypatch.setattr(where, fail)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    deployment = object.__new__(LocalDeployment)
    await deployment.__init__(ModelSettings(**MODEL, parallel=parallel))
    try:
        reason = "Model demo could not be loaded: RuntimeError: a shape is wrong"
        with pytest.raises(ModelUnavailableError) as caught:
            await deployment.describe()
        assert str(caught.value) == f"model 'demo' cannot be served: {reason}"
    finally:
        await deployment._opened.aclose()
    lines = events(capsys.readouterr().err)
    assert {"event": "not served", "reason": reason}.items() <= lines[-1].items()
    assert any("in layer 3" in line.get("traceback", "") for line in lines)


@pytest.mark.parametrize("key", ["source", "projector"])
async def test_a_file_that_is_missing_on_this_node_is_reported_with_the_node(
    monkeypatch, capsys, tmp_path, key
):
    """The node of the check had it."""
    served_elsewhere(monkeypatch, False)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr("serve_app.deployments.model_deployments._publish", lambda *arguments: None)
    path = tmp_path / "demo.gguf"
    deployment = object.__new__(LocalDeployment)
    await deployment.__init__(ModelSettings(**MODEL | {key: str(path)}))
    try:
        with pytest.raises(ModelUnavailableError) as caught:
            await deployment.describe()
    finally:
        await deployment._opened.aclose()
    reason = f"Model demo: {path}: there is no such file on {os.uname().nodename}."
    assert str(caught.value) == f"model 'demo' cannot be served: {reason}"
    assert events(capsys.readouterr().err)[-1]["reason"] == reason


async def test_a_replica_does_not_start_without_what_others_serve(failing, monkeypatch, capsys):
    served_elsewhere(monkeypatch, True)
    deployment = object.__new__(failing.deployment)
    with pytest.raises(CaravanError, match=r" could not be loaded: Runtime"):
        await deployment.__init__(failing.settings)
    assert "not started" in [line["event"] for line in events(capsys.readouterr().err)]


async def test_a_replica_that_cannot_load_answers_with_the_reason_and_is_replaced_later(
    failing, monkeypatch, capsys
):
    """Serve gives up after a few failed constructors in a row, but replaces unhealthy replicas."""
    served_elsewhere(monkeypatch, False)
    deployment = object.__new__(failing.deployment)
    await deployment.__init__(failing.settings)
    try:
        reason = "could not be loaded: RuntimeError: a shape is wrong"
        with pytest.raises(ModelUnavailableError, match=reason) as caught:
            await getattr(deployment, failing.method)()
        assert str(caught.value).startswith(f"{failing.what} cannot be served: ")
        assert not any((await deployment.record_autoscaling_stats()).values())
        await deployment.check_health()
        monkeypatch.setattr("serve_app.deployments.unavailable.RETRY_S", -1.0)
        with pytest.raises(EngineDeadError, match=f"load {failing.what}: .*{reason}"):
            await deployment.check_health()
    finally:
        await deployment._opened.aclose()
    lines = events(capsys.readouterr().err)
    assert [reason in line["reason"] for line in lines if line["event"] == "not served"] == [True]


def test_every_failure_of_a_configuration_is_one_line(monkeypatch):
    monkeypatch.setattr("serve_app.replica.loading.load", fail)
    with pytest.raises(RayServeException, match=r"^Model demo could not be loaded: Runtime"):
        build({"models": [MODEL]})


async def test_a_replica_warms_up_before_it_listens(done, capsys):
    deployment = object.__new__(LocalDeployment)
    await deployment.__init__(ModelSettings(**MODEL))
    try:
        assert done == ["warmed up", "listening"]
    finally:
        await deployment._opened.aclose()
    logged = [event["event"] for event in events(capsys.readouterr().err)]
    assert logged[0] == "starting" and logged[-1] == "ready"
