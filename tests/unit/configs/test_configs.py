"""Every file of configs/ is one that Serve and we understand, to the last key."""

import re
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from runtime.errors import ConfigurationError
from serve_app.api.keys import ApiKey
from serve_app.config.sections import AutoscalingSettings
from serve_app.config.settings import (
    AppSettings,
    FailoverSettings,
    ImageUrlSettings,
    ModelSettings,
    ParallelSettings,
    VisionSettings,
    deployment_name,
    read_settings,
)
from serve_app.on_demand.settings import OnDemandSettings
from tests.serve_configs import ROOT, arguments, deployments, on_demo, parsed
from tests.tiny_seeing import write_tiny_seeing

SECTIONS = (
    ApiKey,
    AppSettings,
    AutoscalingSettings,
    FailoverSettings,
    ImageUrlSettings,
    ModelSettings,
    OnDemandSettings,
    ParallelSettings,
    VisionSettings,
)
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture(autouse=True)
def in_the_repository_with_an_empty_store(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("CARAVAN_MODELS", str(tmp_path))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_seeing(path)
    return path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_config_becomes_an_application_with_all_its_models(path: Path):
    args = arguments(parsed(path.read_text()))
    expected = {deployment_name(model.name) for model in read_settings(args).models}
    assert expected | {"Ingress"} <= set(deployments(args))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_config_serves_a_model_that_is_here(path: Path, seeing: Path):
    """What is still to be pulled is not looked into; with a file in its place, all is checked."""
    args = on_demo(arguments(parsed(path.read_text())), seeing=seeing)
    assert "Ingress" in deployments(args)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_config_turns_haproxy_on_and_listens_where_it_says(path: Path):
    schema = parsed(path.read_text())
    environment = schema.controller_options.runtime_env["env_vars"]
    assert environment["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert schema.http_options.host in ("127.0.0.1", "0.0.0.0")


def test_a_key_that_serve_would_pass_over_is_noticed():
    config = yaml.safe_load(CONFIGS[0].read_text())
    config["http_options"]["prot"] = 8001
    with pytest.raises(AssertionError, match="prot"):
        parsed(yaml.safe_dump(config))


def test_a_key_that_we_do_not_know_is_noticed():
    args = arguments(parsed(CONFIGS[0].read_text()))
    args["models"][0]["context_token"] = 4096
    with pytest.raises(ConfigurationError, match="context_tokens"):
        read_settings(args)


@pytest.mark.parametrize(
    "section", [AppSettings, ModelSettings, *SECTIONS], ids=lambda s: s.__name__
)
def test_the_readme_tells_every_key(section: type[BaseModel]):
    told = set(re.findall(r"`([a-z0-9_]+)", (ROOT / "configs" / "README.md").read_text()))
    assert set(section.model_fields) <= told
