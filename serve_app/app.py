"""`build(args) -> Application`: the import path in every Serve config file."""

import os
import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.exceptions import RayServeException

from runtime.errors import CaravanError
from serve_app.api.ingress_deployment import Ingress
from serve_app.api.keys import ApiKey, read_keys
from serve_app.autoscaling.serve_policy import autoscaling_config
from serve_app.config.on_demand_settings import OnDemandSettings
from serve_app.config.sections import ResponseStoreSettings
from serve_app.config.settings import (
    AppSettings,
    ModelSettings,
    VisionSettings,
    deployment_name,
    read_settings,
)
from serve_app.deployments.model_deployments import (
    ModelDeployment,
    OnDemandDeployment,
    VisionEncoder,
)
from serve_app.gateway.model_registry import ON_DEMAND
from serve_app.gateway.schedulability import BuildFacts, ReplicaResources
from serve_app.logs import get_logger
from serve_app.messages.listing import ListedModel
from serve_app.replica.file_headers import listed_model
from serve_app.replica.model_check import check_model
from serve_app.responses.response_store_deployment import ResponseStoreDeployment
from serve_app.routing.listing_router import router_config

# Streams are long and mostly idle. Engines refuse requests that exceed their capacity.
INGRESS_ONGOING_REQUESTS = 10_000
# No other process can take over client connections, so a replaced ingress finishes its answers.
INGRESS_DRAIN_S = 3600
# Only control calls go through handles; tokens do not.
CONTROL_ONGOING_REQUESTS = 1_000
_LIFECYCLE: dict[str, Any] = {
    "health_check_period_s": 2,
    "graceful_shutdown_timeout_s": 30,
    "graceful_shutdown_wait_loop_s": 0.1,
}

# The colon cannot occur in a model's deployment name.
ON_DEMAND_DEPLOYMENT = "OnDemand:models"
RESPONSES_DEPLOYMENT = "Responses:store"

# The settings of processes whose number and resources are configured.
_Scaled = ModelSettings | VisionSettings | OnDemandSettings

log = get_logger()


def build(args: dict[str, Any]) -> Application:
    """The application for the `args` of a Serve config file; checks settings and model files first.

    Errors are RayServeExceptions, of which Serve shows the message without a traceback.
    """
    started = time.monotonic()
    try:
        settings = read_settings(args)
        keys = read_keys(settings.api_keys_file, os.environ)
        notes = [check_model(model) for model in settings.models]
    except CaravanError as error:
        raise RayServeException(str(error)) from error
    for note in filter(None, notes):
        log.info("note", text=note)
    names, seconds = [model.name for model in settings.models], time.monotonic() - started
    key_names = None if keys is None else [key.name for key in keys]
    log.info("configured", models=names, keys=key_names, check_s=round(seconds, 3))
    return application(settings, keys)


def application(settings: AppSettings, keys: tuple[ApiKey, ...] | None) -> Application:
    encoders = _encoders(settings)
    timeout_s = settings.start_timeout_s
    models = {
        model.name: _model(model, encoders.get(_vision_key(model)), timeout_s)
        for model in settings.models
    }
    ingress = serve.deployment(
        Ingress,
        name="Ingress",
        num_replicas=settings.ingress_replicas,
        max_ongoing_requests=INGRESS_ONGOING_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        max_surge_percent=100,  # starts the new ingress before stopping the old one
        graceful_shutdown_timeout_s=INGRESS_DRAIN_S,
        graceful_shutdown_wait_loop_s=0.1,
    )
    on_demand = _on_demand(settings.on_demand, timeout_s)
    responses = _responses(settings.responses)
    return ingress.bind(settings, models, on_demand, _build_facts(settings), keys, responses)


def _responses(settings: ResponseStoreSettings | None) -> Application | None:
    if settings is None:
        return None
    deployment = serve.deployment(
        ResponseStoreDeployment,
        name=RESPONSES_DEPLOYMENT,
        num_replicas=settings.replicas,
        max_ongoing_requests=CONTROL_ONGOING_REQUESTS,
        request_router_config=router_config(RESPONSES_DEPLOYMENT),
        ray_actor_options={"num_cpus": 0},
        max_surge_percent=100,  # a new process copies the responses of one that still runs
        **_LIFECYCLE,
    )
    return deployment.bind(settings, RESPONSES_DEPLOYMENT)


def _on_demand(settings: OnDemandSettings | None, start_timeout_s: float) -> Application | None:
    if settings is None:
        return None
    deployment = serve.deployment(
        OnDemandDeployment,
        name=ON_DEMAND_DEPLOYMENT,
        max_ongoing_requests=CONTROL_ONGOING_REQUESTS,
        request_router_config=router_config(ON_DEMAND_DEPLOYMENT),
        ray_actor_options=_on_demand_resources(settings),
        **_LIFECYCLE,
        **_scale(settings, start_timeout_s),
    )
    return deployment.bind(settings)


def _build_facts(settings: AppSettings) -> BuildFacts:
    needs = {model.name: _need(model) for model in settings.models}
    if settings.on_demand is not None:
        bundle = _bundle(_on_demand_resources(settings.on_demand))
        needs[ON_DEMAND] = ReplicaResources("`on_demand`", ON_DEMAND_DEPLOYMENT, (bundle,))
    encoders = {}
    for model in settings.models:
        if model.vision.pooled:
            need = _encoder_need(_encoder_models(settings)[_vision_key(model)][0])
            needs[need.what], encoders[model.name] = need, need.what
    return BuildFacts(needs, _listed(settings.models), encoders)


def _listed(models: Sequence[ModelSettings]) -> dict[str, ListedModel]:
    """The entries of models in lists, of those whose files are on this machine."""
    listed = {model.name: listed_model(model, os.environ) for model in models}
    return {name: model for name, model in listed.items() if model is not None}


def _need(settings: ModelSettings) -> ReplicaResources:
    bundles = _bundles(settings).get("placement_group_bundles") or [_bundle(_resources(settings))]
    together, apart = (settings.parallel.placement == f"strict_{how}" for how in ("pack", "spread"))
    what, name = f"model '{settings.name}'", deployment_name(settings.name)
    return ReplicaResources(what, name, tuple(bundles), together, apart, model=settings.name)


def _encoder_need(settings: ModelSettings) -> ReplicaResources:
    bundle = _bundle(_encoder_resources(settings.vision))
    what = f"the vision encoder of model '{settings.name}'"
    return ReplicaResources(what, _encoder_name(settings), (bundle,))


def _bundle(options: Mapping[str, Any]) -> dict[str, float]:
    """Resources of an actor by Ray's names."""
    return {"CPU": options["num_cpus"], "GPU": options["num_gpus"]}


def _encoders(settings: AppSettings) -> dict[Hashable, Application]:
    timeout_s = settings.start_timeout_s
    return {
        vision: _encoder(models, timeout_s) for vision, models in _encoder_models(settings).items()
    }


def _encoder_models(settings: AppSettings) -> dict[Hashable, list[ModelSettings]]:
    """The models of each encoder, which is loaded from the settings of the first. Models with equal
    vision files, whose images are computed in the same way, share one."""
    models: dict[Hashable, list[ModelSettings]] = {}
    for model in settings.models:
        if model.vision.pooled:
            models.setdefault(_vision_key(model), []).append(model)
    return models


def _vision_key(model: ModelSettings) -> Hashable:
    how = model.compute, model.deterministic
    return model.source, model.projector, model.vision.encoder, *how


def _encoder_name(settings: ModelSettings) -> str:
    """The colon cannot occur in the deployment name of a model."""
    return f"VisionEncoder:{deployment_name(settings.name)}"


def _encoder(models: Sequence[ModelSettings], start_timeout_s: float) -> Application:
    settings, contexts = models[0], [model.context_tokens for model in models]
    name = _encoder_name(settings)
    deployment = serve.deployment(
        VisionEncoder,
        name=name,
        max_ongoing_requests=CONTROL_ONGOING_REQUESTS,
        request_router_config=router_config(name),
        ray_actor_options=_encoder_resources(settings.vision),
        **_LIFECYCLE,
        **_scale(settings.vision, start_timeout_s),
    )
    return deployment.bind(settings, contexts)


def _model(
    settings: ModelSettings, encoders: Application | None, start_timeout_s: float
) -> Application:
    name = deployment_name(settings.name)
    deployment = serve.deployment(
        ModelDeployment,
        name=name,
        max_ongoing_requests=CONTROL_ONGOING_REQUESTS,
        request_router_config=router_config(name),
        ray_actor_options=_resources(settings),
        **_bundles(settings),
        **_LIFECYCLE,
        **_scale(settings, start_timeout_s),
    )
    return deployment.bind(settings, encoders)


def _bundles(settings: ModelSettings) -> dict[str, Any]:
    """A tensor-parallel replica reserves a bundle for each rank in one placement group."""
    parallel, resources = settings.parallel, _resources(settings)
    if parallel.tensor == 1:
        return {}
    bundle = {name: count for name, count in _bundle(resources).items() if count}
    return {
        "placement_group_bundles": [bundle] * parallel.tensor,
        "placement_group_strategy": parallel.placement.upper(),
    }


def _scale(settings: _Scaled, start_timeout_s: float) -> dict[str, Any]:
    if settings.autoscaling is not None:
        config = autoscaling_config(settings.autoscaling, start_timeout_s=start_timeout_s)
        return {"autoscaling_config": config}
    return {"num_replicas": settings.replicas or 1}


def _resources(settings: ModelSettings) -> dict[str, Any]:
    """The resources that Ray reserves for a replica: by default one CPU, and a GPU per device used.

    `device: auto` uses a GPU if the cluster has any.
    """
    gpus = _uses_gpu(settings.computing_device) and len(settings.tensor_split or (1,))
    return _reserved(settings, gpus=gpus)


def _on_demand_resources(settings: OnDemandSettings) -> dict[str, Any]:
    return _reserved(settings, gpus=_uses_gpu(settings.model.device))


def _encoder_resources(settings: VisionSettings) -> dict[str, Any]:
    return _reserved(settings, gpus=settings.device == "cuda")


def _reserved(settings: _Scaled, *, gpus: int) -> dict[str, Any]:
    """`gpus`: the number if the settings state none."""
    return {
        "num_cpus": 1.0 if settings.num_cpus is None else settings.num_cpus,
        "num_gpus": float(gpus) if settings.num_gpus is None else settings.num_gpus,
    }


def _uses_gpu(device: str) -> bool:
    return device == "cuda" or (device == "auto" and _cluster_has_gpus())


def _cluster_has_gpus() -> bool:
    return ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0
