"""Which replica answers: Serve's router picks; the replica's own metadata says where it listens."""

from collections.abc import Mapping

from ray.serve.handle import DeploymentHandle

from serve_app.card import ModelCard
from serve_app.stream.wire import Address


class HandleDirectory:
    """The replicas behind one deployment handle per model."""

    def __init__(self, handles: Mapping[str, DeploymentHandle]) -> None:
        self._choosers = {
            name: handle.options(method_name="describe") for name, handle in handles.items()
        }
        self._cards: dict[str, ModelCard] = {}

    async def choose(self, model: str) -> Address:
        # Without a reservation: the task does not travel through the handle.
        async with self._choosers[model].choose_replica(_reserve=False) as chosen:
            return Address(**chosen.replica_metadata)

    async def describe(self, model: str, *, verbose: bool) -> ModelCard:
        """What does not change is asked for once."""
        if verbose:
            return await self._choosers[model].remote(verbose=True)
        if model not in self._cards:
            self._cards[model] = await self._choosers[model].remote()
        return self._cards[model]
