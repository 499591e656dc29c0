"""Checks before the start: each error is one message that names the cause."""

import os
import socket
from pathlib import Path

import pytest
import yaml
from ray.serve.exceptions import RayServeException
from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from runtime.errors import CaravanError, ConfigurationError
from serve_app.app import build
from serve_app.check import (
    FILE_KEYS,
    IMPORT_PATH,
    SECTION_KEYS,
    HttpOptions,
    check,
    check_port,
    checked_environment,
    http_options,
)
from serve_app.config.settings import ModelSettings
from serve_app.replica import loading
from serve_app.replica.model_check import CHECKED_VARIABLE, check_model, model_digest
from tests.checkout import DEMO_MODEL
from tests.unit.model_zoo.gguf.test_split import split_like_a_converter


def damaged(folder: Path, how: str) -> Path:
    """A copy of the demo model with one defect."""
    data = DEMO_MODEL.read_bytes()
    changes = {
        "cut": lambda: data[: len(data) // 2],
        "magic": lambda: b"GGML" + data[4:],
        "architecture": lambda: data.replace(
            b"\x06\x00\x00\x00\x00\x00\x00\x00gemma3", b"\x06\x00\x00\x00\x00\x00\x00\x00gexma3", 1
        ),
        "tensor": lambda: data.replace(b"blk.0.attn_q.weight", b"blk.0.attn_z.weight", 1),
    }
    path = folder / f"{how}.gguf"
    path.write_bytes(changes[how]())
    return path


def args(source: Path | str, **model) -> dict:
    return {"models": [{"name": "demo", "source": str(source), **model}]}


BROKEN = [
    ("cut", ["cut.gguf"]),
    ("magic", ["magic.gguf"]),
    ("architecture", ["architecture.gguf", "gexma3"]),
    ("tensor", ["tensor.gguf", "blk.0.attn_"]),
]


@pytest.mark.parametrize(("how", "names"), BROKEN)
def test_a_broken_file_is_named_before_anything_starts(tmp_path, how, names):
    with pytest.raises(RayServeException) as caught:
        build(args(damaged(tmp_path, how)))
    message = str(caught.value)
    assert "\n" not in message
    for name in ["Model demo", *names]:
        assert name in message


def test_a_missing_part_of_a_split_model_is_named(tmp_path):
    """The demo model is split as by llama.cpp, and one part is removed."""
    first = split_like_a_converter(DEMO_MODEL, tmp_path, tensors_each=20)
    others = sorted(set(tmp_path.glob("*.gguf")) - {first})
    assert len(others) >= 2 and build(args(first)) is not None
    others[0].unlink()
    with pytest.raises(RayServeException) as caught:
        build(args(first))
    message = str(caught.value)
    assert message.startswith("Model demo: ") and "\n" not in message
    assert others[0].name in message and "there is no such file" in message


def test_the_error_for_a_later_part_names_the_first_one(tmp_path):
    first = split_like_a_converter(DEMO_MODEL, tmp_path, tensors_each=20)
    second = sorted(tmp_path.glob("*.gguf"))[1]
    with pytest.raises(
        RayServeException, match=rf"Model demo: .*give its first part, {first.name}"
    ):
        build(args(second))


def test_a_missing_file_is_named():
    with pytest.raises(RayServeException, match=r"Model demo: .*nowhere\.gguf"):
        build(args("models/nowhere.gguf"))


def test_an_unknown_key_is_named_with_the_nearest():
    with pytest.raises(RayServeException, match=r"contxt_tokens .* did you mean context_tokens"):
        build(args(DEMO_MODEL, contxt_tokens=5))


def test_a_context_beyond_the_models_is_refused():
    with pytest.raises(RayServeException, match=r"Model demo: `context_tokens` is 1,000,000"):
        build(args(DEMO_MODEL, context_tokens=1_000_000))


def test_a_valid_configuration_builds():
    assert build(args(DEMO_MODEL)) is not None


def test_what_the_command_has_checked_is_not_checked_again(tmp_path, monkeypatch):
    """Unless the settings or the file have changed since."""
    model, config = tmp_path / "demo.gguf", tmp_path / "config.yaml"
    model.write_bytes(DEMO_MODEL.read_bytes())
    application = {"import_path": IMPORT_PATH, "args": args(model)}
    config.write_text(yaml.safe_dump({"applications": [application]}))
    monkeypatch.setenv(CHECKED_VARIABLE, checked_environment(config)[CHECKED_VARIABLE])

    def check_files(*given):
        raise ConfigurationError("checked")

    monkeypatch.setattr(loading, "check_files", check_files)
    assert build(args(model)) is not None
    with pytest.raises(RayServeException, match="checked"):
        build(args(model, context_tokens=256))
    os.utime(model, ns=(1, 1))
    with pytest.raises(RayServeException, match="checked"):
        build(args(model))


@pytest.mark.parametrize("split", [False, True])
def test_models_without_files_and_split_ones_are_checked_again(tmp_path, monkeypatch, split):
    monkeypatch.setenv("CARAVAN_MODELS", str(tmp_path / "store"))
    config, source = tmp_path / "config.yaml", "ollama://absent"
    if split:
        source = split_like_a_converter(DEMO_MODEL, tmp_path, tensors_each=20)
    application = {"import_path": IMPORT_PATH, "args": args(source)}
    config.write_text(yaml.safe_dump({"applications": [application]}))
    assert checked_environment(config) == {CHECKED_VARIABLE: ""}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step_tokens": 8}, r"`step_tokens` \(8\) must be at least"),
        ({"cache_tokens": 100, "context_tokens": 512}, r"`cache_tokens` is 100"),
        ({"defaults": {"num_ctx": 2000}, "context_tokens": 512}, r"`defaults.num_ctx` is 2,000"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(change, message):
    with pytest.raises(RayServeException, match=f"Model demo: {message}"):
        build(args(DEMO_MODEL, **change))


def config(folder: Path, arguments: dict) -> Path:
    path = folder / "config.yaml"
    application = {"name": "a", "import_path": "serve_app.app:build", "args": arguments}
    http = {"host": "127.0.0.1", "port": 0}
    path.write_text(yaml.safe_dump({"http_options": http, "applications": [application]}))
    return path


@pytest.mark.parametrize(
    ("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)]
)
def test_a_port_in_use_is_named(host, family):
    try:
        server = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    with server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"port {port} of {host}.* in use"):
            check_port(HttpOptions(host=host, port=port))
    check_port(HttpOptions(host=host, port=port))


def test_a_port_may_be_a_text_as_for_serve():
    assert http_options({"http_options": {"port": "8080"}}).port == 8080


def test_an_address_of_another_machine_is_named_as_such():
    http = HttpOptions(host="192.0.2.1", port=0)  # reserved for documents
    with pytest.raises(ConfigurationError, match=r"port 0 of 192\.0\.2\.1 .* an address of"):
        check_port(http)


def test_serves_defaults_are_those_of_its_schema(tmp_path):
    assert HttpOptions() == HttpOptions.model_validate(HTTPOptionsSchema().model_dump())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "proxy_locaton: HeadOnly",
            "proxy_locaton is not a known key; did you mean proxy_location?",
        ),
        ("http_options: {prt: 1}", "http_options.prt is not a known key; did you mean port?"),
        ("applications: [{rote_prefix: /}]", r"applications\[0\].rote_prefix .* route_prefix\?"),
        ("models: []", "models belongs below `args` of an application"),
        ("qqq: 1", "the keys here are proxy_location, "),
        ("applications: []", "no application has `import_path: serve_app.app:build`"),
        ("applications: [{import_path: other:app}]", "no application has"),
        ("http_options: {}", "`applications` is missing"),
        ("http_options: x", "`http_options` must be an object"),
        ("http_options: {port: x}", "`http_options.port` must be an integer"),
        ("http_options: {port: 65536}", "`http_options.port` must be at least 0 and at most 65535"),
        ("http_options: {host: 5}", "`http_options.host` must be a string"),
        (
            "applications: [{import_path: 'serve_app.app:build', args: x}]",
            "`args` of an application must be an object",
        ),
        ("", "it has no keys"),
        ("a: [b", "line 1, column 6: expected"),
    ],
)
def test_mistakes_in_serves_part_of_the_file_are_named_in_one_line(tmp_path, text, message):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message) as caught:
        check(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_missing_or_no_text_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"none.yaml cannot be read: No such file"):
        check(tmp_path / "none.yaml")
    (tmp_path / "x.yaml").write_bytes(b"\xff")
    with pytest.raises(ConfigurationError, match=r"x.yaml is not UTF-8 text"):
        check(tmp_path / "x.yaml")


def test_the_known_keys_are_those_of_serves_schema():
    assert list(ServeDeploySchema.model_fields) == FILE_KEYS
    assert list(HTTPOptionsSchema.model_fields) == SECTION_KEYS["http_options"]
    assert list(ServeApplicationSchema.model_fields) == SECTION_KEYS["applications"]


def test_the_check_refuses_a_working_directory_that_ray_cannot_name(tmp_path, monkeypatch):
    folder = tmp_path / os.fsdecode(b"d\xe8r")
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigurationError, match=r"directory '.*d\\udce8r' is not UTF-8, so Ray"):
        check(config(tmp_path, args(DEMO_MODEL)))


def test_files_of_any_name_have_a_digest(tmp_path, monkeypatch):
    """As in a store below a home directory that is not UTF-8."""
    folder = tmp_path / os.fsdecode(b"d\xe8r")
    folder.mkdir()
    (folder / "demo.gguf").symlink_to(DEMO_MODEL)
    monkeypatch.chdir(folder)
    settings = ModelSettings(name="demo", source="demo.gguf")
    digest = model_digest(settings)
    assert digest is not None
    monkeypatch.setenv(CHECKED_VARIABLE, digest)
    monkeypatch.setattr(loading, "check_files", pytest.fail)
    assert check_model(settings) is None


def test_the_check_notes_nothing_for_a_valid_configuration(tmp_path):
    assert check(config(tmp_path, args(DEMO_MODEL))) == []


def test_the_check_notes_that_all_addresses_are_open_without_a_host(tmp_path):
    path = config(tmp_path, args(DEMO_MODEL))
    stated = yaml.safe_load(path.read_text())
    for http in ({"port": 0}, {}):
        path.write_text(yaml.safe_dump(stated | {"http_options": http}))
        (note,) = check(path)
        assert "listens on all addresses" in note


def test_the_check_refuses_a_missing_file_in_one_line(tmp_path):
    with pytest.raises(CaravanError, match=r"\AModel demo:.*nowhere\.gguf.*\Z"):
        check(config(tmp_path, args("nowhere.gguf")))


def test_the_check_reports_models_that_are_not_pulled(tmp_path, monkeypatch):
    monkeypatch.setenv("CARAVAN_MODELS", str(tmp_path / "models"))
    (note,) = check(config(tmp_path, args("hf://org/repo:Q4_K_M")))
    assert "Model demo: hf://org/repo:Q4_K_M is not in the store" in note
    assert not (tmp_path / "models").exists()


def test_the_check_refuses_an_invalid_source(tmp_path):
    with pytest.raises(
        CaravanError, match=r"args\.models\[0\]\.source \(model demo\): hf://org is"
    ):
        check(config(tmp_path, args("hf://org")))


@pytest.mark.parametrize("text", ["{", "[]", "applications: 5"])
def test_the_check_requires_a_serve_config(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError):
        check(path)
