"""The processes beside a replica's own that compute its model: actors in its placement group."""

import threading
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from runtime.distributed.control_channel import RankInfo, RankZero
from runtime.errors import ConfigurationError, EngineDeadError
from serve_app.config.settings import ModelSettings


class RankActors:
    """One actor for each rank but the first, which is this process, reached at `host`.

    When one ends before it should, the `lead` hears of it.
    """

    def __init__(self, settings: ModelSettings, host: str) -> None:
        group = ray.util.get_current_placement_group()
        if group is None:
            raise ConfigurationError("Ranks of one model need a placement group; this has none.")
        self.lead = RankZero(host, settings.parallel.tensor)
        self._actors = [_actor(group, rank_info) for rank_info in self.lead.rank_infos]
        calls = zip(self._actors, self.lead.rank_infos, strict=True)
        results = [actor.compute.remote(settings, rank_info) for actor, rank_info in calls]
        threading.Thread(target=self._watch, args=(results,), name="ranks", daemon=True).start()

    def close(self) -> None:
        self.lead.close()
        for actor in self._actors:
            with suppress(RayError):
                ray.kill(actor)

    def _watch(self, results: list[ray.ObjectRef]) -> None:
        """Until the first one ends, which none does while the lead lives."""
        (first,), _ = ray.wait(results, num_returns=1)
        try:
            ray.get(first)
        except RayError as error:
            told = str(error).strip().splitlines()
            self.lead.fail(EngineDeadError(f"A rank has ended: {told[-1] if told else error}"))


def _actor(group: PlacementGroup, rank_info: RankInfo) -> Any:
    """With all resources of its bundle; bundle 0 is the replica's."""
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
    """A process that computes one part of one model, and ends."""

    def compute(self, settings: ModelSettings, rank_info: RankInfo) -> None:
        from serve_app.replica.loading import compute_part_of

        try:
            compute_part_of(settings, rank_info)
        finally:
            ray.actor.exit_actor()
