"""Settings that depend on the processor."""

import json
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from model_zoo.gguf.tiled_copy import TilingOptions
from runtime.errors import ConfigurationError
from runtime.kernels import native
from runtime.quant.weight import Compute
from serve_app.replica import device_setup
from serve_app.replica.device_setup import (
    compute_type,
    computing_device,
    log_devices,
    processor_name,
    require_deterministic,
    tiling_options,
)
from tests.thread_counts import torch_threads


@pytest.mark.parametrize("supported", [True, False])
@pytest.mark.parametrize(
    "name, expected",
    [
        ("auto", Compute.AUTO),
        ("exact", Compute.EXACT),
        ("fine", Compute.FINE),
        ("fast", Compute.FAST),
    ],
)
def test_only_a_requested_rounding_that_the_processor_cannot_use_is_logged(
    name: str,
    expected: Compute,
    supported: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(native, "has_integer_products", lambda: supported)
    assert compute_type(name) is expected
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    warned = not supported and name in ("fine", "fast")
    assert [line["compute"] for line in lines] == ([name] if warned else [])


def test_a_gpu_without_a_compiler_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")

    class Driver:
        @property
        def active(self) -> None:
            raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr("triton.runtime.driver", Driver())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(device_setup, "has_kernels", lambda device: True)
    refused = pytest.raises(ConfigurationError, match=r"find C compiler.*gcc.*python3-dev")
    with torch_threads(1), refused:
        computing_device("cuda", None)
    monkeypatch.setattr(device_setup, "has_kernels", lambda device: False)  # torch computes
    with torch_threads(1):
        assert computing_device("auto", None) == torch.device("cuda", 0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_configured_threads_compute_also_layers_beside_a_gpu(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(device_setup, "has_kernels", lambda device: False)
    with torch_threads(1):
        assert computing_device(device, 3).type == device
        assert torch.get_num_threads() == 3


def test_copies_in_tiles_are_kept_in_the_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARAVAN_CACHE", "/cache")
    assert tiling_options("auto") == TilingOptions(Path("/cache/tiles"))
    assert tiling_options("off") is None


def test_the_log_states_the_processor_and_versions(capsys: pytest.CaptureFixture[str]) -> None:
    log_devices(torch.device("cpu"), kind="cpu")
    device, versions = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (device["event"], device["index"], device["kind"]) == ("device", 0, "cpu")
    assert device["name"] and 0 < device["free_bytes"] <= device["total_bytes"]
    assert device["kernels"] in (*device["instruction_sets"], "torch")
    assert versions["torch"] == torch.__version__
    assert versions["gguf"] == version("gguf")
    assert versions["llguidance"] == version("llguidance")
    assert "triton" not in versions


def test_the_log_states_gpus_in_order_and_reads_the_free_memory_of_the_main_one_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def facts(index: int) -> SimpleNamespace:
        return SimpleNamespace(name=f"GPU {index}", total_memory=80, major=7 + index, minor=5)

    def free(index: int) -> tuple[int, int]:
        assert index == 1, "reading it takes memory of that device"
        return 70, 80

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", facts)
    monkeypatch.setattr(torch.cuda, "mem_get_info", free)
    monkeypatch.setattr(device_setup, "has_kernels", lambda device: device.index == 1)
    log_devices(torch.device("cuda", 1), kind="auto")
    *devices, versions = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    found = [(d["index"], d["name"], d["compute_capability"], d["kernels"]) for d in devices]
    assert found == [(0, "GPU 0", "7.5", "torch"), (1, "GPU 1", "8.5", "triton")]
    assert [(d["main"], d.get("free_bytes")) for d in devices] == [(False, None), (True, 70)]
    assert "triton" in versions


@pytest.mark.parametrize(
    "kind, gpus, warned",
    [
        ("auto", "3", True),
        ("auto", "GPU-5f2c", True),
        ("cpu", "3", False),
        ("auto", "", False),
        ("auto", "NoDevFiles", False),
        ("auto", None, False),
    ],
)
def test_a_cpu_in_place_of_a_gpu_that_torch_cannot_use_is_a_warning_with_the_reason(
    kind: str,
    gpus: str | None,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old.\nUpdate it.")

    monkeypatch.setattr(torch.cuda, "init", init)
    if gpus is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    log_devices(torch.device("cpu"), kind=kind)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    warnings = [(line["gpus"], line["reason"]) for line in lines if line["level"] == "warning"]
    reason = "The NVIDIA driver on your system is too old."
    assert warnings == ([(gpus, reason)] if warned else [])


@pytest.mark.parametrize(
    "text, expected",
    [("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n", "Some CPU @ 2 GHz"), ("", "arm")],
)
def test_a_processor_without_a_name_is_named_by_its_architecture(
    text: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_setup, "machine", lambda: "arm")
    (tmp_path / "cpuinfo").write_text(text)
    assert processor_name(tmp_path / "cpuinfo") == expected


@pytest.mark.parametrize(
    "device, kernels, ranks, said",
    [
        ("cpu", False, 8, None),
        ("cuda:0", True, 2, None),
        ("cuda:0", True, 4, "`parallel.tensor` is 4"),
        ("cuda:1", False, 1, "which cuda:1 cannot compute"),
    ],
)
def test_what_cannot_be_deterministic_is_refused(
    device: str, kernels: bool, ranks: int, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_setup, "has_kernels", lambda device: kernels)
    if said is None:
        require_deterministic(torch.device(device), ranks)
        return
    with pytest.raises(ConfigurationError, match=said):
        require_deterministic(torch.device(device), ranks)
