"""`build(args) -> Application`: the import path in every Serve config file."""

from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.exceptions import RayServeException

from runtime.errors import CaravanError
from serve_app.autoscaling import autoscaling_config
from serve_app.deployments import Ingress, ModelDeployment
from serve_app.loading import check_model
from serve_app.logs import get_logger
from serve_app.settings import (
    AppSettings,
    ModelSettings,
    deployment_name,
    read_settings,
)

# Streams live long and mostly wait, so the ingress takes as many as its sockets allow; requests
# that exceed what a model can work on are told so by its engine.
INGRESS_ONGOING_REQUESTS = 10_000
# Calls for control only: tokens do not travel through the handle.
CONTROL_ONGOING_REQUESTS = 1_000

log = get_logger()


def build(args: dict[str, Any]) -> Application:
    """The application that these settings describe; settings and files are checked first.

    Serve shows a RayServeException as its message alone, anything else as a traceback.
    """
    try:
        settings = read_settings(args)
        notes = [check_model(model) for model in settings.models]
    except CaravanError as error:
        raise RayServeException(str(error)) from error
    for note in filter(None, notes):
        log.info("note", text=note)
    return application(settings)


def application(settings: AppSettings) -> Application:
    models = {model.name: _model(model) for model in settings.models}
    ingress = serve.deployment(
        Ingress,
        name="Ingress",
        num_replicas=settings.ingress_replicas,
        max_ongoing_requests=INGRESS_ONGOING_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_wait_loop_s=0.1,
    )
    return ingress.bind(settings, models)


def _model(settings: ModelSettings) -> Application:
    deployment = serve.deployment(
        ModelDeployment,
        name=deployment_name(settings.name),
        max_ongoing_requests=CONTROL_ONGOING_REQUESTS,
        ray_actor_options=_resources(settings),
        health_check_period_s=2,
        graceful_shutdown_timeout_s=30,
        graceful_shutdown_wait_loop_s=0.1,
        **_scale(settings),
    )
    return deployment.bind(settings)


def _scale(settings: ModelSettings) -> dict[str, Any]:
    if settings.autoscaling is not None:
        return {"autoscaling_config": autoscaling_config(settings.autoscaling)}
    return {"num_replicas": settings.replicas or 1}


def _resources(settings: ModelSettings) -> dict[str, Any]:
    """What Ray reserves: a GPU for a model that wants one, one CPU unless told otherwise.

    `auto` takes a GPU where the cluster has any.
    """
    wants_gpu = settings.device == "cuda" or (settings.device == "auto" and _cluster_has_gpus())
    gpus = settings.num_gpus if settings.num_gpus is not None else float(wants_gpu)
    cpus = settings.num_cpus if settings.num_cpus is not None else 1.0
    return {"num_cpus": cpus, "num_gpus": gpus}


def _cluster_has_gpus() -> bool:
    return ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0
