"""Every file of configs/ is accepted by Serve and by this application."""

from pathlib import Path

import pytest
import yaml

from runtime.errors import ConfigurationError
from serve_app.config.settings import deployment_name, read_settings
from tests.checkout import ROOT
from tests.serve_configs import arguments, deployments, on_demo, parsed
from tests.tiny_vision_model import write_tiny_vision_model

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture(autouse=True)
def in_the_repository_with_an_empty_store(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("CARAVAN_MODELS", str(tmp_path))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_vision_model(path)
    return path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_config_builds_an_application_with_all_models(path: Path):
    args = arguments(parsed(path.read_text()))
    expected = {deployment_name(model.name) for model in read_settings(args).models}
    assert expected | {"Ingress"} <= set(deployments(args))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_config_builds_with_local_files(path: Path, seeing: Path):
    """Models that are not pulled are not checked, so local files replace them here."""
    args = on_demo(arguments(parsed(path.read_text())), vision_model=seeing)
    assert "Ingress" in deployments(args)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_config_enables_haproxy(path: Path):
    schema = parsed(path.read_text())
    environment = schema.controller_options.runtime_env["env_vars"]
    assert environment["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert environment["RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S"] == "1"
    for limit in ("READY_CHECK_TIMEOUT_S", "HEALTH_CHECK_TIMEOUT_S"):
        assert environment[f"RAY_SERVE_PROXY_{limit}"] == "60"
    assert schema.http_options.host in ("127.0.0.1", "0.0.0.0")


def test_an_unknown_key_of_serve_is_detected():
    config = yaml.safe_load(CONFIGS[0].read_text())
    config["http_options"]["prot"] = 8001
    with pytest.raises(AssertionError, match="prot"):
        parsed(yaml.safe_dump(config))


def test_an_unknown_key_of_ours_is_detected():
    args = arguments(parsed(CONFIGS[0].read_text()))
    args["models"][0]["context_token"] = 4096
    with pytest.raises(ConfigurationError, match="context_tokens"):
        read_settings(args)
