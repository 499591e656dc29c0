"""Models larger than a device: settings, reserved resources, placement of layers."""

from dataclasses import replace

import pytest
import torch

from model_zoo.gguf.reader import GGUFFile
from model_zoo.registry import load
from runtime.distributed.layer_placement import LayerPlacement
from runtime.errors import ConfigurationError
from runtime.kv.cache_types import CacheType
from serve_app.config.settings import ModelSettings, read_settings
from serve_app.replica.device_map import DeviceMapOptions, device_map_options
from tests.checkout import DEMO_MODEL
from tests.families.gemma_families import SHARED_PAGES
from tests.families.text_families import TEXT_MODELS
from tests.serve_configs import deployments
from tests.tiny_models import TinyLlama, write_tiny_llama

GPUS = [torch.device("cuda", number) for number in range(3)]
HOST = torch.device("cpu")
LAYERS = 5


def settings(**change) -> ModelSettings:
    model = {"name": "demo", "source": str(DEMO_MODEL), **change}
    return read_settings({"models": [model]}).models[0]


def bundles(**change):
    """Reserved resources: of the replica's actor, of each bundle, and the placement strategy."""
    deployment = deployments({"models": [{"name": "demo", "source": str(DEMO_MODEL), **change}]})[
        "demo"
    ]
    config = deployment._replica_config
    own = {k: v for k, v in config.ray_actor_options.items() if k in ("num_cpus", "num_gpus")}
    return own, config.placement_group_bundles, config.placement_group_strategy


def test_a_tensor_parallel_replica_reserves_a_bundle_for_each_rank() -> None:
    own, reserved, strategy = bundles(
        parallel={"tensor": 2}, device="cuda", num_gpus=1, num_cpus=0.5
    )
    assert own == {"num_cpus": 0.5, "num_gpus": 1.0}
    assert reserved == [{"CPU": 0.5, "GPU": 1.0}] * 2 and strategy == "PACK"
    *_, strategy = bundles(parallel={"tensor": 2, "placement": "strict_spread"}, device="cpu")
    assert strategy == "STRICT_SPREAD"
    assert bundles(device="cpu")[1] is None


@pytest.mark.parametrize("placement", ["pack", "spread", "strict_pack", "strict_spread"])
def test_schedulability_knows_strict_placements_of_ranks(placement: str) -> None:
    parallel = {"tensor": 2, "placement": placement}
    model = {"name": "demo", "source": str(DEMO_MODEL), "device": "cpu", "parallel": parallel}
    need = deployments({"models": [model]})["Ingress"].init_args[3].needs["demo"]
    assert len(need.bundles) == 2
    assert (need.together, need.apart) == (placement == "strict_pack", placement == "strict_spread")


def test_layers_on_several_gpus_reserve_these_gpus() -> None:
    assert bundles(device="cuda", tensor_split=[1, 1, 2])[0]["num_gpus"] == 3
    assert bundles(device="cuda", tensor_split=[1, 1], num_gpus=4)[0]["num_gpus"] == 4
    assert bundles(device="cuda", num_gpu=0)[0]["num_gpus"] == 0


@pytest.mark.parametrize(
    "change, message",
    [
        ({"parallel": {"tensor": 2}, "tensor_split": [1, 1]}, "exclude each other"),
        ({"parallel": {"tensor": 2}, "num_gpu": 3}, "exclude each other"),
        ({"device": "cpu", "num_gpu": 3}, "num_gpu is for GPUs"),
        ({"tensor_split": [0, 0]}, "a number above 0"),
        ({"tensor_split": [1, -1]}, "must be at least 0, not -1"),
        ({"parallel": {"tensor": 0}}, r"parallel\.tensor"),
        ({"parallel": {"tensors": 2}}, "did you mean tensor"),
    ],
)
def test_contradicting_settings_are_refused(change, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        settings(**change)


def test_more_ranks_than_heads_are_refused_when_the_application_is_built() -> None:
    with pytest.raises(Exception, match=r"Model demo: .*attn_q.*among 64 ranks.*parallel\.tensor"):
        bundles(parallel={"tensor": 64}, device="cpu")


def test_a_host_without_gpus_computes_all_layers() -> None:
    assert device_map_options(settings(tensor_split=[1, 1]), 512, HOST) is None
    assert device_map_options(settings(num_gpu=0), 512, HOST) is None
    options = device_map_options(settings(num_gpu=2, main_gpu=1), 512, GPUS[1])
    assert options is not None and (options.num_gpu, options.main_gpu) == (2, 1)


@pytest.fixture(scope="module")
def outline(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_llama(path, config=TinyLlama(layers=LAYERS, feed_forward=1024))
    file = GGUFFile.open(path)
    decoder = load(path, device=torch.device("meta"), dtype=torch.float32).decoder
    return [file], decoder


def placed(
    outline, free: list[int], *, count: int = 2, cache_tokens: int = 64, **change
) -> LayerPlacement | None:
    stated = {"tensor_split": None, "num_gpu": None, "main_gpu": 0, **change}
    sizes = {"cache_tokens": cache_tokens, "step_tokens": 8, "sequences": 2}
    options = DeviceMapOptions(**stated, **sizes, kv_dtype=CacheType.BFLOAT16)
    return options.place(GPUS[:count], free, *outline)


def test_a_model_that_fits_one_gpu_is_placed_there(outline) -> None:
    assert placed(outline, [1 << 40, 1 << 40]) is None
    assert placed(outline, [1 << 40, 1 << 40], main_gpu=1) is None


def test_states_of_recurrent_layers_take_memory_for_each_sequence_not_for_each_token(
    tmp_path,
) -> None:
    TEXT_MODELS["lfm2"].write(tmp_path / "tiny.gguf")
    file = GGUFFile.open(tmp_path / "tiny.gguf")
    decoder = load(tmp_path / "tiny.gguf", device=torch.device("meta"), dtype=torch.float32).decoder
    states = [cache for cache in decoder.cache_layers if cache.kind.by_sequence]
    others = [cache for cache in decoder.cache_layers if not cache.kind.by_sequence]
    assert states and others
    tokens = 1 << 20
    cached = sum(tokens * c.kv_heads * (c.key_dim + c.value_dim) * 2 for c in others)
    needed = decoder.activation_bytes(8, 2) + file.size_bytes + cached + (1 << 20)
    assert placed(([file], decoder), [int(needed / 0.9)], count=1, cache_tokens=tokens) is None
    less = placed(([file], decoder), [int(cached * 0.5 / 0.9)], count=1, cache_tokens=tokens)
    assert less is not None and HOST in less.layers


@pytest.mark.parametrize("family", SHARED_PAGES)
def test_layers_are_on_the_device_of_the_layer_whose_pages_they_use(tmp_path, family: str) -> None:
    row, path = TEXT_MODELS[family], tmp_path / "tiny.gguf"
    row.write(path, row.divided or "plain", **SHARED_PAGES[family])
    file, device = GGUFFile.open(path), torch.device("meta")
    decoder = load(path, device=device, dtype=torch.float32).decoder
    sources = decoder.source_layers
    assert sources == (0, 1, 2, 3, 4, 3, 4, 3)
    working, found = decoder.activation_bytes(8, 2), set()
    for number in (None, *range(len(sources) + 1)):
        for split in (None, (1, 1), (1, 3), (3, 1), (1, 9), (9, 1)):
            for room in (0.2, 0.6, 0.9):
                free = [int((working + file.size_bytes * room) / 0.9)] * 2
                stated = {"tensor_split": split, "num_gpu": number}
                placed_layers = placed(([file], decoder), free, **stated)
                found.add(placed_layers)
                if placed_layers is not None:
                    each = placed_layers.layers
                    assert each == tuple(each[source] for source in sources)
                    assert number is None or len(each) - each.count(HOST) <= number
    assert len(found) > 10


def test_a_model_larger_than_a_gpu_is_divided_by_free_memory(outline) -> None:
    (file,), decoder = outline
    working = decoder.activation_bytes(8, 2)
    half = int((working + file.size_bytes * 0.62) / 0.9)
    layer_placement = placed(outline, [half, half])
    assert layer_placement is not None and set(layer_placement.layers) == set(GPUS[:2])
    assert layer_placement.main == GPUS[0] and len(layer_placement.layers) == LAYERS
    less = [int((working + file.size_bytes * 0.4) / 0.9)] * 2
    for main, other in ((0, 1), (1, 0)):  # the main one also has what is in no layer
        found = placed(outline, less, main_gpu=main)
        assert found is not None
        assert (found.layers.count(GPUS[main]), found.layers.count(GPUS[other])) == (1, 2)
    nothing = placed(outline, [working, working])
    assert nothing == LayerPlacement((HOST,) * LAYERS, GPUS[0])


def test_configured_proportions_ignore_free_memory(outline) -> None:
    layer_placement = placed(outline, [0, 0], tensor_split=(1, 1))
    assert (
        layer_placement is not None and layer_placement.layers.count(GPUS[0]) == (LAYERS + 1) // 2
    )
    layer_placement = placed(outline, [1 << 40, 1 << 40], num_gpu=1)
    assert layer_placement == LayerPlacement((HOST,) * (LAYERS - 1) + (GPUS[0],), GPUS[0])
    with pytest.raises(ConfigurationError, match="has 3 entries; this replica has 2 GPUs"):
        placed(outline, [1, 1], tensor_split=(1, 1, 1))


@pytest.mark.parametrize(("num_gpu", "compiled"), [(LAYERS, 0), (2, 1)])
def test_cpu_kernels_are_compiled_if_the_host_computes_layers(
    outline, monkeypatch, num_gpu: int, compiled: int
) -> None:
    calls: list[None] = []
    monkeypatch.setattr("serve_app.replica.device_map.prepare_kernels", lambda: calls.append(None))
    monkeypatch.setattr("serve_app.replica.device_map.available_bytes", lambda device: 1 << 40)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    stated = {"tensor_split": (1.0, 1.0), "num_gpu": num_gpu, "main_gpu": 0}
    sizes = {"cache_tokens": 64, "step_tokens": 8, "sequences": 2}
    options = DeviceMapOptions(**stated, **sizes, kv_dtype=CacheType.BFLOAT16)
    assert options(*outline) is not None
    assert len(calls) == compiled


def test_fp8_keys_and_values_are_refused_where_the_host_computes_layers(
    outline, monkeypatch
) -> None:
    monkeypatch.setattr("serve_app.replica.device_map.available_bytes", lambda device: 1 << 40)
    monkeypatch.setattr(
        "serve_app.replica.device_setup.has_kernels", lambda device: device.type == "cuda"
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    sizes = {"cache_tokens": 64, "step_tokens": 8, "sequences": 2, "kv_dtype": CacheType.FP8}
    options = DeviceMapOptions(tensor_split=(1.0, 1.0), num_gpu=None, main_gpu=0, **sizes)
    assert options(*outline) is not None
    with pytest.raises(ConfigurationError, match=r"`kv_dtype` is fp8, but .* on cpu"):
        replace(options, num_gpu=2)(*outline)
