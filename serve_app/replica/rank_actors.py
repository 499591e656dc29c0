"""The ranks of a tensor-parallel replica: actors in its placement group."""

import threading
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from runtime.distributed.control_channel import RankInfo, RankZero
from runtime.errors import ConfigurationError, EngineDeadError
from runtime.garbage_collection import lasting_imports
from serve_app.config.settings import ModelSettings
from serve_app.logs import structure_records


class RankActors:
    """One actor for each rank except rank 0, which is this process, listening at `host`.

    `rank_zero` fails as soon as an actor ends.
    """

    def __init__(self, settings: ModelSettings, host: str) -> None:
        group = ray.util.get_current_placement_group()
        if group is None:
            raise ConfigurationError(
                "`parallel.tensor` above 1 needs a placement group, and this replica has none."
            )
        self.rank_zero = RankZero(host, settings.parallel.tensor)
        self._actors = [_actor(group, rank_info) for rank_info in self.rank_zero.rank_infos]
        calls = zip(self._actors, self.rank_zero.rank_infos, strict=True)
        results = [actor.compute.remote(settings, rank_info) for actor, rank_info in calls]
        threading.Thread(target=self._watch, args=(results,), name="ranks", daemon=True).start()

    def close(self) -> None:
        self.rank_zero.close()
        for actor in self._actors:
            with suppress(RayError):
                ray.kill(actor)

    def _watch(self, results: list[ray.ObjectRef]) -> None:
        """Waits until an actor ends, which is a failure while rank 0 works."""
        (first,), _ = ray.wait(results, num_returns=1)
        try:
            ray.get(first)
        except RayError as error:
            lines = str(error).strip().splitlines()
            reason = lines[-1] if lines else error
            self.rank_zero.fail(EngineDeadError(f"A rank has ended: {reason}"))


def _actor(group: PlacementGroup, rank_info: RankInfo) -> Any:
    """An actor with all resources of its bundle; bundle 0 is the replica's own."""
    bundle = group.bundle_specs[rank_info.rank]
    strategy = PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=rank_info.rank
    )
    return (
        ray.remote(_Rank)
        .options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=strategy,
        )
        .remote()
    )


class _Rank:
    """A process that computes one rank's part of a model and then exits."""

    def compute(self, settings: ModelSettings, rank_info: RankInfo) -> None:
        with lasting_imports():
            from serve_app.replica.loading import run_rank

        structure_records()
        try:
            run_rank(settings, rank_info)
        finally:
            ray.actor.exit_actor()
