"""Every file of configs/ is accepted by Serve and by this application."""

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
from serve_app.on_demand.pool_settings import OnDemandSettings
from tests.checkout import ROOT
from tests.serve_configs import arguments, deployments, on_demo, parsed
from tests.tiny_vision_model import write_tiny_vision_model

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


@pytest.mark.parametrize(
    "section", [AppSettings, ModelSettings, *SECTIONS], ids=lambda s: s.__name__
)
def test_the_readme_documents_every_key(section: type[BaseModel]):
    documented = set(re.findall(r"`([a-z0-9_]+)", (ROOT / "configs" / "README.md").read_text()))
    assert set(section.model_fields) <= documented


# By the text before a table of keys: its settings, and keys whose defaults are told in words.
TABLES = {
    "Keys of `args`:": (AppSettings, {"models"}),
    "Keys of each model": (
        ModelSettings,
        {"context_tokens", "max_image_pixels", "max_image_frames"},
    ),
    "Keys of an entry:": (ApiKey, {"concurrent_requests"}),
    "Keys of `on_demand`:": (OnDemandSettings, {"replicas", "autoscaling"}),
}


def written(default: object) -> str:
    """As the tables write a default."""
    match default:
        case None:
            return "null"
        case bool():
            return str(default).lower()
        case int() | float():
            for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
                if default and default % size == 0:
                    return f"{default // size} {unit}"
            return f"{default:g}"
        case tuple():
            return ", ".join(default) or "[]"
        case dict() | BaseModel():
            return "{}"
    return str(default)


@pytest.mark.parametrize("heading", TABLES)
def test_the_readme_states_the_defaults(heading: str):
    settings, in_words = TABLES[heading]
    _, _, after = (ROOT / "configs" / "README.md").read_text().partition(heading)
    table = re.split(r"\n\n(?!\|)", after.partition("\n\n")[2])[0]
    documented = {}
    for line in table.splitlines()[2:]:
        names, cell = line.strip("| ").split(" | ")[:2]
        keys = re.findall(r"`([a-z0-9_]+)`", names)
        each = cell.split(", ")
        documented |= dict(
            zip(keys, each if len(each) == len(keys) else [cell] * len(keys), strict=True)
        )
    expected = {
        name: "required"
        if field.is_required()
        else written(field.get_default(call_default_factory=True))
        for name, field in settings.model_fields.items()
    }
    assert {n: d for n, d in documented.items() if n not in in_words} == {
        n: d for n, d in expected.items() if n not in in_words
    }
