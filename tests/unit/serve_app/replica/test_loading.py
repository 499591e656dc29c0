"""Loading the demo model: log lines and errors."""

import json
import time
from dataclasses import replace

import pytest
import torch

from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.tiled_copy import TilingOptions
from runtime.errors import ConfigurationError, DoesNotFitError, ModelFileError
from runtime.kernels import native
from runtime.vision import encoder as vision
from serve_app.replica import loading
from serve_app.replica.device_setup import tiling_options
from serve_app.replica.loading import load_replica
from serve_app.replica.model_check import check_model
from tests.checkout import DEMO_MODEL
from tests.unit.serve_app.loaded_replicas import settings


def test_a_start_logs_progress_the_device_and_the_model(capsys):
    replica = load_replica(settings())
    replica.close()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    (device,) = [line for line in lines if line["event"] == "device"]
    (model,) = [line for line in lines if line["event"] == "model"]
    progress = [line["percent"] for line in lines if line["event"] == "loading"]
    assert device["kind"] == "cpu"
    assert device["threads"] >= 1
    assert device["kernels"] == native.kernel_level()
    assert (model["name"], model["architecture"]) == ("demo", "gemma3")
    assert model["quantization"] == replica.describe().quantization
    assert model["weight_bytes"] > 0 and model["cache_bytes"] > 0 and model["headroom_bytes"] > 0
    assert progress == sorted(progress) and progress[-1] == 100


def test_a_deterministic_model_is_loaded_as_such_and_encodes_images_one_by_one(monkeypatch):
    loaded, encoders = [], []
    load, encoder = loading.load, loading.LocalEncoder
    monkeypatch.setattr(loading, "load", lambda *a, **k: loaded.append(load(*a, **k)) or loaded[-1])
    monkeypatch.setattr(
        loading, "LocalEncoder", lambda *a, **k: encoders.append(encoder(*a, **k)) or encoders[-1]
    )
    monkeypatch.setitem(vision._BATCH_IMAGES, "cpu", 4)
    for deterministic, batch in ((True, 1), (False, 4)):
        chosen = settings(deterministic=deterministic)
        load_replica(chosen).close()
        assert loaded[-1].decoder._token_embd.weight.deterministic is deterministic
        assert encoders[-1].batch_images == batch


@pytest.mark.parametrize("repack", ["auto", "off"])
def test_weights_are_copied_in_tiles_unless_that_is_off(tmp_path, monkeypatch, repack):
    def small_models_too(repack: str) -> TilingOptions | None:
        options = tiling_options(repack)
        return options and replace(options, directory=tmp_path / "tiles", least_bytes=1)

    monkeypatch.setattr(loading, "tiling_options", small_models_too)
    chosen = settings(repack=repack)
    check_model(chosen)
    assert not (tmp_path / "tiles").exists()
    load_replica(chosen).close()
    wanted = repack == "auto" and native.has_integer_products()
    assert len(list(tmp_path.glob("tiles/*.tiles"))) == wanted


def test_the_last_line_of_a_start_has_the_loading_and_warm_up_times(capsys):
    started = time.monotonic()
    replica = load_replica(settings())
    took = time.monotonic() - started
    replica.close()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    optional = {"loading", "compiling kernels", "kernels compiled"}
    assert [line["event"] for line in lines if line["event"] not in optional] == [
        "device",
        "versions",
        "model",
        "vision",
        "ready",
    ]
    assert lines[-1]["model"] == "demo"
    load_s, warm_up_s = lines[-1]["load_s"], lines[-1]["warm_up_s"]
    assert load_s > 0 and warm_up_s > 0 and load_s + warm_up_s <= took + 0.001


def logged(capsys) -> list[str]:
    return [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()]


def test_compiling_the_kernels_is_logged_before_and_after(monkeypatch, capsys):
    before: list[str] = []

    def library() -> object:
        before.extend(logged(capsys))
        return object()

    monkeypatch.setattr(native, "needs_compiling", lambda: True)
    monkeypatch.setattr(native, "library", library)
    monkeypatch.setattr(native, "kernel_level", lambda: "x86-64-v3")
    monkeypatch.setattr("serve_app.replica.loading.explain_bus_errors", lambda: None)
    fitting = settings(repack="off")
    load_replica(fitting).close()
    assert before == ["compiling kernels"]
    after = logged(capsys)
    assert after[:2] == ["kernels compiled", "device"]
    monkeypatch.setattr(native, "needs_compiling", lambda: False)
    load_replica(fitting).close()
    assert "kernels" not in " ".join(logged(capsys))


def test_a_file_whose_weights_are_not_finite_fails_at_start(tmp_path):
    """The warm-up step computes with all weights."""
    broken = GGUFFile.open(DEMO_MODEL).tensors["output_norm.weight"]
    data = bytearray(DEMO_MODEL.read_bytes())
    data[broken.begin : broken.begin + broken.nbytes] = b"\xff" * broken.nbytes
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=r"Model demo: The model cannot compute"):
        load_replica(settings(path))


def test_the_card_has_the_reserved_memory():
    replica = load_replica(settings())
    card = replica.describe()
    replica.close()
    assert card.context_tokens == 64
    assert card.reserved_bytes > card.file_bytes
    assert card.device_bytes == 0


def test_a_memory_error_names_the_model():
    with pytest.raises(DoesNotFitError, match=r"Model demo: .* 1,000,000"):
        load_replica(settings(memory_bytes=1_000_000))


def test_fp8_keys_and_values_are_refused_on_a_cpu_before_the_weights_are_read() -> None:
    for tried in (check_model, load_replica):
        with pytest.raises(ConfigurationError, match=r"Model demo: `kv_dtype` is fp8.*q8_0"):
            tried(settings(kv_dtype="fp8"))
    check_model(settings(kv_dtype="fp8", device="cuda"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_missing_device_is_refused():
    with pytest.raises(ConfigurationError, match=r"Model demo: `device` is cuda"):
        load_replica(settings(device="cuda"))
