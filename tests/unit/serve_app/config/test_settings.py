"""The configuration: accepted values, and error messages."""

import pytest
import yaml

from runtime.errors import ConfigurationError
from serve_app.config.settings import canonical_name, read_settings, source_path
from tests.checkout import DEMO_MODEL, ROOT
from tests.serve_configs import deployments

MODEL = {"name": "demo", "source": "models/demo.gguf"}
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def with_model(**change):
    return {"models": [{**MODEL, **change}]}


def test_the_quickstart_configuration_is_valid():
    (application,) = yaml.safe_load(QUICKSTART.read_text())["applications"]
    assert application["import_path"] == "serve_app.app:build"
    assert [model.name for model in read_settings(application["args"]).models] == ["demo"]


def test_a_name_and_a_source_suffice():
    (model,) = read_settings(with_model()).models
    assert (model.device, model.replicas, model.context_tokens) == ("auto", None, None)


@pytest.mark.parametrize(
    "change",
    [
        {"source": "hf://org/repo:Q4_K_M@v1"},
        {"source": "ollama://llama3:8b"},
        {"projector": "mmproj.gguf"},
        {"projector": "hf://org/repo/mmproj-F16.gguf"},
    ],
)
def test_a_source_is_a_path_or_a_registry(change):
    (model,) = read_settings(with_model(**change)).models
    assert model.is_a_path != ("source" in change)


def test_symbolic_links_are_not_resolved(tmp_path, monkeypatch):
    (tmp_path / "link-00001-of-00002.gguf").symlink_to("elsewhere")
    monkeypatch.chdir(tmp_path)
    assert source_path("link-00001-of-00002.gguf") == tmp_path / "link-00001-of-00002.gguf"


def test_images_are_fetched_only_from_allowed_hosts():
    assert read_settings(with_model()).image_urls is None
    urls = {"allowed_hosts": ["a.test", "*.b.test:8443", "[2606:4700::1111]:80", "1.1.1.1"]}
    settings = read_settings({**with_model(), "image_urls": urls})
    assert settings.image_urls is not None and not settings.image_urls.allow_private


@pytest.mark.parametrize(
    ("given", "most"),
    [
        ({}, 8),
        ({"tokens": 3}, 3),
        ({"ngram": False, "tokens": 3}, 0),
        ({"ngram": False, "draft": "models/demo.gguf"}, 8),
    ],
)
def test_tokens_are_proposed_unless_it_is_turned_off(given, most):
    (model,) = read_settings(with_model(speculation=given)).models
    assert model.speculation.proposed_tokens == most


@pytest.mark.parametrize(
    "given", [{"tokens": 0}, {"tokens": 65}, {"draft": ""}, {"draft": "ftp://a/b"}]
)
def test_proposals_have_limits(given):
    with pytest.raises(ConfigurationError, match="speculation"):
        read_settings(with_model(speculation=given))


def test_responses_are_stored_unless_the_store_is_null():
    stored = read_settings({**with_model(), "responses": {"replicas": 2}}).responses
    assert stored is not None and stored.tenant_bytes < stored.max_bytes
    assert read_settings({**with_model(), "responses": None}).responses is None
    assert "Responses:store" in deployments(with_model(source=str(DEMO_MODEL)))
    without = {**with_model(source=str(DEMO_MODEL)), "responses": None}
    assert "Responses:store" not in deployments(without)


def test_only_local_origins_and_names_are_allowed_by_default():
    settings = read_settings(with_model())
    assert (settings.allowed_origins, settings.allowed_hosts) == ((), None)
    origins = ("*", "https://a.test", "http://*.a.test:*", "http://[::1]:80", "app://*")
    hosts = ("*", "a.test", "*.a.test", "my_service")
    settings = read_settings({**with_model(), "allowed_origins": origins, "allowed_hosts": hosts})
    assert (settings.allowed_origins, settings.allowed_hosts) == (origins, hosts)


@pytest.mark.parametrize(
    "origin",
    ["a.test", "https://a.test/", "https://a.test/x", "https://*a.test", "http://*:80", "null", ""],
)
def test_invalid_origins_are_refused(origin):
    with pytest.raises(
        ConfigurationError, match=r"args\.allowed_origins: .* is not an origin such as"
    ):
        read_settings({**with_model(), "allowed_origins": [origin]})


@pytest.mark.parametrize("host", ["a.test:80", "https://a.test", "*a.test", "a.test/", ""])
def test_invalid_host_names_are_refused(host):
    with pytest.raises(
        ConfigurationError, match=r"args\.allowed_hosts: .* is not a host name such as"
    ):
        read_settings({**with_model(), "allowed_hosts": [host]})


def test_defaults_become_options():
    (model,) = read_settings(with_model(defaults={"temperature": 0.1, "stop": ["x"]})).models
    assert (model.options.temperature, model.options.stop) == (0.1, ("x",))


@pytest.mark.parametrize(
    ("args", "messages"),
    [
        ({"modles": [MODEL]}, ["args.modles is not a known key; did you mean models?"]),
        ({}, ["args.models: at least one model or `on_demand` is required"]),
        ({"models": []}, ["args.models"]),
        (
            with_model(contxt_tokens=5),
            ["args.models[0].contxt_tokens (model demo)", "did you mean context_tokens?"],
        ),
        ({"models": [{"name": "demo"}]}, ["args.models[0].source (model demo) is missing"]),
        (
            with_model(context_tokens="many"),
            ['args.models[0].context_tokens (model demo) must be an integer, not "many"'],
        ),
        (with_model(context_tokens=1), ["context_tokens (model demo) must be at least 2, not 1"]),
        (with_model(device="tpu"), ["device (model demo) must be auto, cpu or cuda, not "]),
        (with_model(source="s3://a/b.gguf"), ["args.models[0].source", "s3:// is not known"]),
        (with_model(source="hf://a"), ["args.models[0].source", "hf://org/repo"]),
        (with_model(source="ollama://a b"), ["args.models[0].source", "'a b'"]),
        (with_model(projector="ollama://x"), ["args.models[0].projector", "path of a file"]),
        (with_model(projector="hf://org/repo"), ["args.models[0].projector", "path of a file"]),
        (with_model(autoscaling={"min": 1}), ["autoscaling.min ", "did you mean min_replicas?"]),
        (with_model(autoscaling={"min_replicas": 3}), ["min_replicas is larger"]),
        (with_model(autoscaling={}, replicas=2), ["replicas and autoscaling exclude each other"]),
        (
            with_model(defaults={"temprature": 1}),
            ['option "temprature" is not known; did you mean temperature?'],
        ),
        ({"models": ["demo"]}, ["args.models[0] must be an object"]),
        ({"models": {}}, ["args.models must be a list"]),
        ({"on_demand": True}, ["args.on_demand must be an object"]),
        (with_model(defaults={"top_p": 2}), ['option "top_p" is 2']),
        (
            with_model(name="no spaces"),
            ["args.models[0].name (model no spaces) must be a name such as qwen3", "letters"],
        ),
        (with_model(source=""), ["source (model demo) must be a non-empty string"]),
        (with_model(min_replicas=1), ["min_replicas (model demo)", "it belongs to `autoscaling`"]),
        ({"model": [MODEL]}, ["args.model is not a known key; did you mean models?"]),
        ({"models": [MODEL], "start_timeout_s": 0}, ["start_timeout_s must be above 0, not 0"]),
        ({"models": [MODEL], "context_tokens": 9}, ["context_tokens", "it belongs to `models`"]),
        (with_model(entirely_else=1), ["entirely_else (model demo) is not a known key"]),
        (
            {"models": [MODEL], "image_urls": {"allowed_hosts": ["https://a.test/"]}},
            ["args.image_urls.allowed_hosts[0] must be a host such as", 'not "https://a.test/"'],
        ),
        (
            {"on_demand": {"pull_hosts": ["a/b"], "hf_token_for": ["a b"]}},
            ["pull_hosts[0] must be a host such as", "hf_token_for[0] must be a repository such"],
        ),
        ([], ["args must be an object, not []"]),
        ("x", ['args must be an object, not "x"']),
        ({"models": [MODEL, {**MODEL, "name": "Demo:latest"}]}, ['"Demo:latest"']),
        (
            {"models": [{**MODEL, "name": "x:latest"}, {**MODEL, "name": "x_latest"}]},
            ['"x_latest"', "differ only in spelling"],
        ),
        ({"models": [MODEL], "api_keys": ["a"]}, ["api_keys_file", "CARAVAN_API_KEYS", "key new"]),
        ({"models": [MODEL], "image_urls": {}}, ["args.image_urls.allowed_hosts is missing"]),
        (
            {"models": [MODEL], "image_urls": {"allowed_host": ["a.test"]}},
            ["args.image_urls.allowed_host ", "did you mean allowed_hosts?"],
        ),
        (with_model(trace=True), ["args.models[0] (model demo)", "trace needs trace_folder"]),
        (with_model(trace_folder="traces"), ["(model demo)", "absolute path"]),
        (
            {"models": [MODEL], "max_image_bytes": 2**26},
            ["args.max_image_bytes must be at most 33,554,432"],
        ),
        (
            {"models": [MODEL], "failover": {"retries": 1}},
            ["args.failover.retries ", "did you mean max_retries?"],
        ),
        ({"models": [MODEL], "failover": {"silence_s": 1}}, ["args.failover.silence_s", "3"]),
        (
            {"models": [MODEL], "responses": {"max_byte": 1}},
            ["args.responses.max_byte ", "did you mean max_bytes?"],
        ),
        (
            {"models": [MODEL], "responses": {"max_bytes": 2**20}},
            ["tenant_bytes is larger than max_bytes"],
        ),
        (with_model(source="mod\udce8le.gguf"), ["source (model demo) is not UTF-8"]),
        (
            with_model(max_image_pixels=0),
            ["max_image_pixels (model demo) must be at least 1, not 0"],
        ),
    ],
)
def test_an_error_names_the_key(args, messages):
    with pytest.raises(ConfigurationError) as caught:
        read_settings(args)
    assert "\n" not in str(caught.value)
    for message in messages:
        assert message in str(caught.value)


def test_all_errors_are_reported_at_once():
    with pytest.raises(ConfigurationError, match=r"source.*; .*colour"):
        read_settings({"colour": 1, "models": [{"name": "demo"}]})


def test_names_that_differ_in_case_or_the_latest_tag_are_equal():
    assert canonical_name("Demo:latest") == canonical_name("demo") != canonical_name("demo:2b")


def test_every_value_of_yaml_can_be_shown():
    for text, told in (("{2026-01-01: a}", "datetime.date(2026"), ("&a [*a]", "[...]")):
        with pytest.raises(ConfigurationError) as refused:
            read_settings({**with_model(), "responses": {"replicas": yaml.safe_load(text)}})
        assert "replicas must be an integer, not " in str(refused.value)
        assert told in str(refused.value)


def test_a_list_with_an_invalid_item_is_not_called_empty():
    with pytest.raises(ConfigurationError) as refused:
        read_settings({**with_model(), "image_urls": {"allowed_hosts": ["https://a.test"]}})
    assert "a host such as" in str(refused.value)
    assert "at least 1" not in str(refused.value)
