"""The section `on_demand`, and who may manage its models."""

import pytest

from runtime.errors import ConfigurationError
from serve_app.config.keep_alive import FOREVER
from serve_app.config.settings import read_settings

MODEL = {"name": "demo", "source": "models/demo.gguf"}


def on_demand(**change):
    section = read_settings({"on_demand": change}).on_demand
    assert section is not None
    return section


def test_an_application_may_have_models_on_demand_alone():
    settings = read_settings({"on_demand": {}})
    assert settings.models == () and settings.on_demand is not None
    assert settings.on_demand.keep_alive_s == 300
    assert settings.on_demand.model.max_sequences < 16


def test_engine_settings_apply_to_each_model():
    section = on_demand(model={"context_tokens": 256, "defaults": {"top_k": 3}})
    assert (section.model.context_tokens, section.model.options.top_k) == (256, 3)


@pytest.mark.parametrize(("stated", "seconds"), [("90s", 90), (20, 20), (-1, FOREVER), ("0", 0)])
def test_keep_alive_is_written_as_in_requests(stated, seconds):
    assert on_demand(keep_alive=stated).keep_alive_s == seconds


@pytest.mark.parametrize(
    ("args", "keyed", "managed"),
    [
        ({"models": [MODEL]}, False, False),
        ({"models": [MODEL]}, True, False),
        ({"on_demand": {}}, False, False),
        ({"on_demand": {}}, True, True),
        ({"on_demand": {}, "manage_models": True}, False, True),
        ({"on_demand": {}, "manage_models": False}, True, False),
    ],
)
def test_models_are_managed_with_keys_unless_configured_otherwise(args, keyed, managed):
    assert read_settings(args).models_are_managed(keyed=keyed) == managed


@pytest.mark.parametrize(
    ("args", "reported"),
    [
        ({"models": [MODEL], "manage_models": True}, "args.manage_models: there is no `on_demand`"),
        ({"on_demand": {"keep_alive": "5"}}, 'args.on_demand.keep_alive: invalid keep_alive "5"'),
        ({"on_demand": {"replicas": 1, "autoscaling": {}}}, "args.on_demand: replicas and"),
        ({"on_demand": {"max_model": 1}}, "args.on_demand.max_model .* did you mean max_models?"),
        (
            {"on_demand": {"model": {"context": 1}}},
            r"args.on_demand.model.context .* did you mean context_tokens\?",
        ),
        ({"on_demand": {"model": {"defaults": {"x": 1}}}}, 'option "x" is not known'),
        ({"on_demand": {"pull_hosts": ["https://x"]}}, r"args.on_demand.pull_hosts\[0\]"),
        ({"on_demand": {"hf_token_for": ["org"]}}, r"args.on_demand.hf_token_for\[0\]"),
    ],
)
def test_a_mistake_is_reported_with_its_key(args, reported):
    with pytest.raises(ConfigurationError, match=reported):
        read_settings(args)
