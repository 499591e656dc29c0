"""API keys: their file, their environment variable, and that only hashes are passed on."""

import io
import json
import pickle

import pytest
import yaml
from ray.serve.exceptions import RayServeException

from runtime.errors import ConfigurationError
from serve_app.api.keys import ENVIRONMENT, ApiKey, key_hash, new_key, read_keys
from serve_app.app import build
from serve_app.check import check
from serve_app.gateway.allowed_models import AllowedModels
from tests.checkout import DEMO_MODEL
from tests.serve_configs import deployments
from tests.unit.serve_app.cli.cli_runs import run, said

MODEL = {"name": "demo", "source": str(DEMO_MODEL)}
KEY = "sk-caravan-a-test"
ENTRY = {"name": "alice", "sha256": key_hash(KEY)}


@pytest.fixture
def keys_file(tmp_path):
    """Writes entries into a file that only its owner may read; returns its path."""

    def written(content, mode: int = 0o600) -> str:
        path = tmp_path / "keys.yaml"
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        path.chmod(mode)
        return str(path)

    return written


def test_keys_have_names_hashes_and_limits(keys_file):
    limited = {"models": ["demo", "qwen3:*"], "requests_per_minute": 60, "manage": False}
    keys = read_keys(keys_file([ENTRY, {**ENTRY, "name": "b", "sha256": "0" * 64, **limited}]), {})
    assert keys is not None
    assert keys[0] == ApiKey(name="alice", sha256=key_hash(KEY))
    assert keys[1].models == ("demo", "qwen3:*")
    assert keys[1].limits(8).requests_per_minute == 60
    assert keys[1].limits(8).concurrent_requests == 8


def test_the_environment_has_the_same_entries():
    assert read_keys(None, {ENVIRONMENT: json.dumps([ENTRY])}) == (ApiKey.model_validate(ENTRY),)
    assert read_keys(None, {}) is None


def test_two_sources_of_keys_exclude_each_other(keys_file):
    with pytest.raises(ConfigurationError, match="are both set"):
        read_keys(keys_file([ENTRY]), {ENVIRONMENT: json.dumps([ENTRY])})


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o644, 0o620, 0o666])
def test_a_file_that_others_can_read_or_change_is_refused_with_the_remedy(keys_file, mode):
    path = keys_file([ENTRY], mode)
    with pytest.raises(ConfigurationError, match=f"run `chmod 600 {path}`"):
        read_keys(path, {})


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440])
def test_a_file_of_the_owner_and_a_mounted_secret_are_read(keys_file, mode):
    assert read_keys(keys_file([ENTRY], mode), {}) is not None


def test_a_missing_file_is_reported(tmp_path):
    with pytest.raises(ConfigurationError, match="nowhere cannot be read: No such file"):
        read_keys(str(tmp_path / "nowhere"), {})


@pytest.mark.parametrize(
    ("content", "reported"),
    [
        ("", "not a list of keys"),
        ("[]", "not a list of keys"),
        (KEY, "not a list of keys"),
        (f"alice: {KEY}", "not a list of keys"),
        (f"- [{KEY}", "neither YAML nor JSON"),
        (f"- {KEY}", "entry 1 must be an object"),
        ([{"name": "a", "key": KEY}], "entry 1, key is not known"),
        ([{**ENTRY, KEY: 1}], "entry 1, a field is not known; known are name, sha256"),
        ([{"name": "a"}], "entry 1, sha256 is missing"),
        ([{"name": "a", "sha256": KEY}], "entry 1, sha256: it must be the SHA-256 of the key"),
        (
            [{"name": KEY + " ", "sha256": "0" * 64}],
            "entry 1, name must be at most 64 letters, digits and ._@-",
        ),
        ([{**ENTRY, "requests_per_minute": 0}], "entry 1, requests_per_minute must be at least 1"),
        ([{**ENTRY, "models": []}], "entry 1, models must be a non-empty list"),
        ([{**ENTRY, "models": ["demo"], "manage": True}], "manage and models exclude each other"),
        ([ENTRY, {**ENTRY, "sha256": "0" * 64}], "two entries have the same name"),
        ([ENTRY, {**ENTRY, "name": "bob"}], "two entries have the same sha256"),
    ],
)
def test_an_invalid_file_is_reported_without_its_content(keys_file, content, reported):
    path = keys_file(content)
    with pytest.raises(ConfigurationError) as caught:
        read_keys(path, {})
    assert reported in str(caught.value) and "\n" not in str(caught.value)
    assert KEY not in str(caught.value)


def test_an_environment_without_keys_does_not_open_the_server():
    with pytest.raises(ConfigurationError, match="CARAVAN_API_KEYS is not a list"):
        read_keys(None, {ENVIRONMENT: ""})


@pytest.mark.parametrize(
    ("patterns", "name", "allowed"),
    [
        (None, "anything", True),
        (("demo",), "Demo:latest", True),
        (("Demo:latest",), "demo", True),
        (("demo",), "demo:2b", False),
        (("qwen3:*",), "qwen3:8b", True),
        (("qwen3:*",), "qwen3", False),
        (("hf.co/org/*", "demo"), "hf.co/org/repo:q4", True),
        (("*",), "hf.co/org/repo:q4", True),
    ],
)
def test_allowed_models_are_names_with_wildcards(patterns, name, allowed):
    assert (name in AllowedModels(patterns)) == allowed


def test_keys_are_long_and_never_the_same():
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith("sk-caravan-") and len(key) >= 54 for key in keys)


def test_an_application_is_built_with_hashes_alone(keys_file, capsys):
    path = keys_file([ENTRY])
    ingress = deployments({"models": [MODEL], "api_keys_file": path})["Ingress"]
    assert (ApiKey.model_validate(ENTRY),) in ingress.init_args
    settings = ingress.init_args[0]
    assert KEY.encode() not in pickle.dumps((settings, ingress.init_args[-1]))
    reported = capsys.readouterr().err
    assert '"keys": ["alice"]' in reported and KEY not in reported


def test_an_application_takes_keys_from_the_environment(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, json.dumps([ENTRY]))
    ingress = deployments({"models": [MODEL]})["Ingress"]
    assert (ApiKey.model_validate(ENTRY),) in ingress.init_args


def test_keys_among_the_arguments_are_refused_without_being_shown():
    with pytest.raises(RayServeException) as caught:
        build({"models": [MODEL], "api_keys": [KEY]})
    for remedy in ("`api_keys_file`", ENVIRONMENT, "caravan key new"):
        assert remedy in str(caught.value)
    assert KEY not in str(caught.value)


def test_the_check_reads_the_keys(keys_file, tmp_path):
    arguments = {"models": [MODEL], "api_keys_file": keys_file([ENTRY], 0o644)}
    application = {"name": "a", "import_path": "serve_app.app:build", "args": arguments}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"applications": [application]}))
    with pytest.raises(ConfigurationError, match="chmod 600"):
        check(config)


def test_a_new_key_is_printed_once_beside_its_entry(keys_file):
    made = run("key", "new", "alice")
    shown = made.stderr.split()[-1]
    assert shown not in made.stdout
    keys = read_keys(keys_file(made.stdout + run("key", "new", "bob").stdout), {})
    assert keys is not None and [key.name for key in keys] == ["alice", "bob"]
    assert keys[0].sha256 == key_hash(shown)


def test_a_new_key_as_json():
    reported = said("key", "new", "alice")
    assert reported["entry"] == {"name": "alice", "sha256": key_hash(reported["key"])}


def test_an_invalid_name_of_a_key_is_refused():
    assert "NAME" in run("key", "new", "a b", status=2).stderr
    assert yaml.safe_load(io.StringIO(run("key", "new", "a.b@c-d_1").stdout))
