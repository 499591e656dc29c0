"""Start refuses what cannot work, with one message that names it."""

import socket
from pathlib import Path

import pytest
import yaml
from ray.serve.exceptions import RayServeException

from serve_app.app import build
from serve_app.check import main

DEMO = Path(__file__).parents[3] / "models" / "demo.gguf"


def damaged(folder: Path, how: str) -> Path:
    """A copy of the demo model that is wrong in one way."""
    data = DEMO.read_bytes()
    changes = {
        "cut": lambda: data[: len(data) // 2],
        "magic": lambda: b"GGML" + data[4:],
        "architecture": lambda: data.replace(
            b"\x05\x00\x00\x00\x00\x00\x00\x00llama", b"\x05\x00\x00\x00\x00\x00\x00\x00lxama", 1
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
    ("architecture", ["architecture.gguf", "lxama"]),
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


def test_a_missing_file_is_named():
    with pytest.raises(RayServeException, match=r"Model demo: .*nowhere\.gguf"):
        build(args("models/nowhere.gguf"))


def test_an_unknown_key_is_named_with_the_nearest():
    with pytest.raises(RayServeException, match=r"contxt_tokens .* did you mean context_tokens"):
        build(args(DEMO, contxt_tokens=5))


def test_a_context_beyond_the_models_is_refused():
    with pytest.raises(RayServeException, match=r"Model demo: `context_tokens` is 1,000,000"):
        build(args(DEMO, context_tokens=1_000_000))


def test_a_sound_configuration_builds():
    assert build(args(DEMO)) is not None


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
        build(args(DEMO, **change))


def config(folder: Path, arguments: dict, port: int = 0) -> str:
    path = folder / "config.yaml"
    application = {"name": "a", "import_path": "serve_app.app:build", "args": arguments}
    http = {"host": "127.0.0.1", "port": port}
    path.write_text(yaml.safe_dump({"http_options": http, "applications": [application]}))
    return str(path)


def test_a_port_that_is_taken_is_named(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert main([config(tmp_path, args(DEMO), port)]) == 1
    assert f"port {port} of 127.0.0.1" in capsys.readouterr().err
    assert main([config(tmp_path, args(DEMO), port)]) == 0


def test_the_check_says_nothing_about_a_sound_configuration(tmp_path, capsys):
    assert main([config(tmp_path, args(DEMO))]) == 0
    assert capsys.readouterr().err == ""


def test_the_check_tells_one_line_and_fails(tmp_path, capsys):
    assert main([config(tmp_path, args("nowhere.gguf"))]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "config.yaml: Model demo:" in line and "nowhere.gguf" in line


@pytest.mark.parametrize("text", ["{", "[]", "applications: 5"])
def test_the_check_wants_a_serve_config(tmp_path, capsys, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert main([str(path)]) == 1
    assert str(path) in capsys.readouterr().err
