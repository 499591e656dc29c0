"""`vision` in the configuration: where images are encoded, and which models share encoders."""

import pytest

from runtime.errors import ConfigurationError
from serve_app.config.settings import VisionSettings, read_settings
from tests.serve_configs import deployments
from tests.tiny_vision_model import write_tiny_vision_model

MODEL = {"name": "demo", "source": "models/demo.gguf"}


def vision_of(**section) -> VisionSettings:
    (model,) = read_settings({"models": [{**MODEL, "vision": section}]}).models
    return model.vision


@pytest.mark.parametrize(
    ("section", "pooled"),
    [
        ({}, False),
        ({"placement": "auto"}, False),
        ({"placement": "local"}, False),
        ({"placement": "pool"}, True),
        ({"replicas": 1}, True),
        ({"autoscaling": {"max_replicas": 2}}, True),
        ({"placement": "auto", "num_gpus": 0.5}, True),
    ],
)
def test_any_key_of_the_encoders_enables_the_pool(section, pooled) -> None:
    assert vision_of(**section).pooled is pooled


@pytest.mark.parametrize(
    ("section", "device"),
    [
        ({"placement": "pool"}, "cpu"),
        ({"num_gpus": 0.5}, "cuda"),
        ({"num_gpus": 0}, "cpu"),
        ({"device": "cuda"}, "cuda"),
        ({"device": "cpu", "num_gpus": 1}, "cpu"),
    ],
)
def test_the_device_of_an_encoder_follows_its_resources(section, device) -> None:
    assert vision_of(**section).computing_device == device


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"placment": "pool"}, r"vision\.placment .*did you mean placement\?"),
        ({"placement": "remote"}, r"vision\.placement .*must be auto, local or pool"),
        (
            {"placement": "local", "replicas": 2},
            "placement is local, but replicas configures a pool",
        ),
        ({"replicas": 2, "autoscaling": {}}, "replicas and autoscaling exclude each other"),
        ({"autoscaling": {"min": 1}}, r"vision\.autoscaling\.min .*did you mean min_replicas\?"),
        ({"timeout_s": 0}, r"vision\.timeout_s"),
        ({"batch_images": 0}, r"vision\.batch_images"),
    ],
)
def test_an_error_names_the_key(section, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        vision_of(**section)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    projector = write_tiny_vision_model(path, flavour="llama.cpp")
    return {"source": str(path), "projector": str(projector), "context_tokens": 64}


def test_only_models_with_equal_vision_files_share_encoders(files) -> None:
    pool = {"replicas": 2, "num_cpus": 0.5}
    longer = {"placement": "pool", "timeout_s": 30}
    models = [
        {"name": "one", **files, "vision": pool},
        {"name": "two", **files, "context_tokens": 96, "vision": {**pool, **longer}},
        {"name": "apart", **files, "vision": {"replicas": 1}},
        {"name": "local", **files},
    ]
    made = deployments({"models": models})
    encoders = {name: made[name] for name in made if name.startswith("VisionEncoder")}
    assert sorted(encoders) == ["VisionEncoder:apart", "VisionEncoder:one"]
    shared = encoders["VisionEncoder:one"]
    assert shared.num_replicas == 2 and shared.init_args[1] == [64, 96]
    assert shared.ray_actor_options["num_cpus"] == 0.5
    bound = {name: made[name].init_args[1] for name in ("one", "two", "apart", "local")}
    assert bound["one"] is bound["two"] is not bound["apart"] and bound["local"] is None


@pytest.mark.parametrize("change", [{"compute": "exact"}, {"deterministic": True}], ids=str)
def test_models_share_no_encoder_that_computes_otherwise_than_they_state(files, change) -> None:
    pool = {"replicas": 2}
    models = [
        {"name": "one", **files, "vision": pool},
        {"name": "two", **files, **change, "vision": pool},
        {"name": "three", **files, **change, "vision": pool},
    ]
    made = deployments({"models": models})
    bound = [made[name].init_args[1] for name in ("one", "two", "three")]
    assert bound[0] is not bound[1] is bound[2]
    settings = made["VisionEncoder:two"].init_args[0]
    assert {key: getattr(settings, key) for key in change} == change


def test_encoders_scale_independently_of_replicas(files) -> None:
    pool = {"autoscaling": {"min_replicas": 2, "max_replicas": 3}, "num_gpus": 0.25}
    made = deployments({"models": [{"name": "one", **files, "replicas": 4, "vision": pool}]})
    encoder = made["VisionEncoder:one"]
    assert encoder.ray_actor_options["num_gpus"] == 0.25
    scaling = encoder._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (2, 3)
    assert made["one"].num_replicas == 4


def test_schedulability_knows_the_resources_of_encoders(files) -> None:
    """So that it is told where they have no place, under whichever model an image comes."""
    pool = {"num_cpus": 0.5, "num_gpus": 2}
    models = [
        {"name": "one", **files, "vision": pool},
        {"name": "two", **files, "vision": pool},
        {"name": "local", **files},
    ]
    plan = deployments({"models": models})["Ingress"].init_args[3]
    assert plan.encoders["one"] == plan.encoders["two"] and "local" not in plan.encoders
    need = plan.needs[plan.encoders["two"]]
    assert need.deployment == "VisionEncoder:one"
    assert need.bundles == ({"CPU": 0.5, "GPU": 2},)
