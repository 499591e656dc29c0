"""How an application and its replicas start: what is told, and what comes before traffic."""

import json
from pathlib import Path

import pytest
from ray.serve.exceptions import RayServeException

from runtime.errors import CaravanError, ModelUnavailableError
from runtime.worker.runner import DeviceRunner
from serve_app.app import build
from serve_app.config.settings import ModelSettings
from serve_app.replica.deployments import ModelDeployment, VisionEncoder
from serve_app.transport.server import StreamServer

DEMO = str(Path(__file__).parents[3] / "models" / "demo.gguf")
MODEL = {"name": "demo", "source": DEMO, "device": "cpu", "context_tokens": 64, "max_sequences": 2}


@pytest.fixture
def done(monkeypatch) -> list[str]:
    """What a replica has done so far of two things."""
    done: list[str] = []
    warm_up, start = DeviceRunner.warm_up, StreamServer.start

    def warming_up(runner, *arguments):
        warm_up(runner, *arguments)
        done.append("warmed up")

    async def starting(server, host):
        done.append("told its address")
        return await start(server, "127.0.0.1")

    monkeypatch.setattr(DeviceRunner, "warm_up", warming_up)
    monkeypatch.setattr(StreamServer, "start", starting)
    return done


class Here(ModelDeployment):
    """As Serve makes one, but in this process, where nobody awaits what Serve does at the end."""

    def __del__(self) -> None:
        """The test ends what it has opened."""


class HereEncoder(VisionEncoder):
    def __del__(self) -> None:
        """The same."""


def events(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_an_application_says_which_models_it_has_checked(capsys):
    build({"models": [MODEL, {**MODEL, "name": "other"}]})
    [told] = [event for event in events(capsys.readouterr().err) if event["event"] == "configured"]
    assert told["models"] == ["demo", "other"]
    assert told["check_s"] > 0


def fail(*arguments, **named):
    raise RuntimeError("a shape is wrong\nin layer 3")


@pytest.mark.parametrize(
    ("where", "parallel"),
    [
        ("serve_app.replica.loading.load", {}),
        ("serve_app.replica.rank_actors.RankActors", {"tensor": 2}),
    ],
)
async def test_whatever_a_replica_fails_at_is_told_in_one_line(
    done, monkeypatch, capsys, where, parallel
):
    monkeypatch.setattr(where, fail)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    deployment = object.__new__(Here)
    await deployment.__init__(ModelSettings(**MODEL, parallel=parallel))
    try:
        told = "Model demo could not be loaded: RuntimeError: a shape is wrong"
        with pytest.raises(ModelUnavailableError) as caught:
            await deployment.describe()
        assert str(caught.value) == f"model 'demo' cannot be served: {told}"
    finally:
        await deployment._opened.aclose()
    lines = events(capsys.readouterr().err)
    assert {"event": "not served", "reason": told}.items() <= lines[-1].items()
    assert any("in layer 3" in line.get("traceback", "") for line in lines)


async def test_whatever_an_encoder_fails_at_is_told_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr("serve_app.replica.loading._loaded", fail)
    encoder = object.__new__(HereEncoder)
    with pytest.raises(CaravanError, match=r"^Model demo could not be loaded: Runtime"):
        await encoder.__init__(ModelSettings(**MODEL))
    assert "not served" in [line["event"] for line in events(capsys.readouterr().err)]


def test_whatever_a_configuration_fails_at_is_told_in_one_line(monkeypatch):
    monkeypatch.setattr("serve_app.replica.loading.load", fail)
    with pytest.raises(RayServeException, match=r"^Model demo could not be loaded: Runtime"):
        build({"models": [MODEL]})


async def test_a_replica_has_warmed_up_before_anybody_can_reach_it(done, capsys):
    deployment = object.__new__(Here)
    await deployment.__init__(ModelSettings(**MODEL))
    try:
        assert done == ["warmed up", "told its address"]
    finally:
        await deployment._opened.aclose()
    told = [event["event"] for event in events(capsys.readouterr().err)]
    assert told[0] == "starting" and told[-1] == "ready"
