"""Models larger than a device: what the settings say, what Ray reserves, where layers go."""

import pytest
import torch

from model_zoo.gguf.reader import GGUFFile
from model_zoo.registry import load
from runtime.distributed.layer_placement import LayerPlacement
from runtime.errors import ConfigurationError
from serve_app.config.settings import ModelSettings, read_settings
from serve_app.replica.device_map import DeviceMapOptions, placing_of
from tests.serve_configs import DEMO, deployments
from tests.tiny_models import TinyLlama, write_tiny_llama

GPUS = [torch.device("cuda", number) for number in range(3)]
HOST = torch.device("cpu")
LAYERS = 5


def settings(**change) -> ModelSettings:
    model = {"name": "demo", "source": str(DEMO), **change}
    return read_settings({"models": [model]}).models[0]


def bundles(**change):
    """What Ray is asked for: a replica's own resources, its places, and how they may lie."""
    made = deployments({"models": [{"name": "demo", "source": str(DEMO), **change}]})["demo"]
    config = made._replica_config
    own = {k: v for k, v in config.ray_actor_options.items() if k in ("num_cpus", "num_gpus")}
    return own, config.placement_group_bundles, config.placement_group_strategy


def test_a_replica_of_several_ranks_reserves_a_place_for_each() -> None:
    own, places, strategy = bundles(parallel={"tensor": 2}, device="cuda", num_gpus=1, num_cpus=0.5)
    assert own == {"num_cpus": 0.5, "num_gpus": 1.0}
    assert places == [{"CPU": 0.5, "GPU": 1.0}] * 2 and strategy == "PACK"
    *_, strategy = bundles(parallel={"tensor": 2, "placement": "strict_spread"}, device="cpu")
    assert strategy == "STRICT_SPREAD"
    assert bundles(device="cpu")[1] is None


@pytest.mark.parametrize("placement", ["pack", "spread", "strict_pack", "strict_spread"])
def test_what_ranks_need_is_known_as_strictly_as_it_is_asked_for(placement: str) -> None:
    parallel = {"tensor": 2, "placement": placement}
    model = {"name": "demo", "source": str(DEMO), "device": "cpu", "parallel": parallel}
    need = deployments({"models": [model]})["Ingress"].init_args[3].needs["demo"]
    assert len(need.bundles) == 2
    assert (need.together, need.apart) == (placement == "strict_pack", placement == "strict_spread")


def test_layers_on_several_gpus_reserve_these() -> None:
    assert bundles(device="cuda", tensor_split=[1, 1, 2])[0]["num_gpus"] == 3
    assert bundles(device="cuda", tensor_split=[1, 1], num_gpus=4)[0]["num_gpus"] == 4
    assert bundles(device="cuda", num_gpu=0)[0]["num_gpus"] == 0


@pytest.mark.parametrize(
    "change, told",
    [
        ({"parallel": {"tensor": 2}, "tensor_split": [1, 1]}, "exclude each other"),
        ({"parallel": {"tensor": 2}, "num_gpu": 3}, "exclude each other"),
        ({"device": "cpu", "num_gpu": 3}, "num_gpu is for GPUs"),
        ({"tensor_split": [0, 0]}, "a number above 0"),
        ({"tensor_split": [1, -1]}, "greater than or equal to 0"),
        ({"parallel": {"tensor": 0}}, r"parallel\.tensor"),
        ({"parallel": {"tensors": 2}}, "did you mean tensor"),
    ],
)
def test_what_contradicts_itself_is_refused(change, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        settings(**change)


def test_more_ranks_than_a_model_has_heads_are_refused_before_anything_starts() -> None:
    with pytest.raises(Exception, match=r"Model demo: .*attn_q.*among 64 ranks.*parallel\.tensor"):
        bundles(parallel={"tensor": 64}, device="cpu")


def test_a_host_without_gpus_has_all_layers() -> None:
    assert placing_of(settings(tensor_split=[1, 1]), 512, HOST) is None
    assert placing_of(settings(num_gpu=0), 512, HOST) is None
    placing = placing_of(settings(num_gpu=2, main_gpu=1), 512, GPUS[1])
    assert placing is not None and (placing.num_gpu, placing.main_gpu) == (2, 1)


@pytest.fixture(scope="module")
def outline(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_llama(path, config=TinyLlama(layers=LAYERS, feed_forward=1024))
    file = GGUFFile.open(path)
    decoder = load(path, device=torch.device("meta"), dtype=torch.float32).decoder
    return file, decoder


def placed(outline, free: list[int], *, count: int = 2, **change) -> LayerPlacement | None:
    said = {"tensor_split": None, "num_gpu": None, "main_gpu": 0, **change}
    placing = DeviceMapOptions(**said, tokens=64, rows=8, sequences=2, kv_dtype=torch.bfloat16)
    return placing.among(GPUS[:count], free, *outline)


def test_a_model_that_fits_one_gpu_is_there(outline) -> None:
    assert placed(outline, [1 << 40, 1 << 40]) is None
    assert placed(outline, [1 << 40, 1 << 40], main_gpu=1) is None


def test_a_model_that_fits_no_gpu_alone_is_divided_by_their_memory(outline) -> None:
    file, decoder = outline
    working = decoder.activation_bytes(8, 2)
    half = int((working + file.size_bytes * 0.62) / 0.9)
    layer_placement = placed(outline, [half, half])
    assert layer_placement is not None and set(layer_placement.layers) == set(GPUS[:2])
    assert layer_placement.main == GPUS[0] and len(layer_placement.layers) == LAYERS
    nothing = placed(outline, [working, working])
    assert nothing == LayerPlacement((HOST,) * LAYERS, GPUS[0])


def test_what_the_settings_say_of_layers_counts_whatever_is_free(outline) -> None:
    layer_placement = placed(outline, [0, 0], tensor_split=(1, 1))
    assert (
        layer_placement is not None and layer_placement.layers.count(GPUS[0]) == (LAYERS + 1) // 2
    )
    layer_placement = placed(outline, [1 << 40, 1 << 40], num_gpu=1)
    assert layer_placement == LayerPlacement((HOST,) * (LAYERS - 1) + (GPUS[0],), GPUS[0])
    with pytest.raises(ConfigurationError, match="names 3 devices; this replica has 2"):
        placed(outline, [1, 1], tensor_split=(1, 1, 1))


@pytest.mark.parametrize(("num_gpu", "compiled"), [(LAYERS, 0), (2, 1)])
def test_kernels_are_compiled_where_the_host_computes_layers(
    outline, monkeypatch, num_gpu: int, compiled: int
) -> None:
    calls: list[None] = []
    monkeypatch.setattr("serve_app.replica.device_map.prepare_kernels", lambda: calls.append(None))
    monkeypatch.setattr("serve_app.replica.device_map.available_bytes", lambda device: 1 << 40)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    said = {"tensor_split": (1.0, 1.0), "num_gpu": num_gpu, "main_gpu": 0}
    placing = DeviceMapOptions(**said, tokens=64, rows=8, sequences=2, kv_dtype=torch.bfloat16)
    assert placing(*outline) is not None
    assert len(calls) == compiled
