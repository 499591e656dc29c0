"""Which replica answers: Serve's router picks; the replica's own metadata says where it listens."""

import time
from collections.abc import Mapping

from ray.serve.handle import DeploymentHandle

from serve_app.card import ModelCard
from serve_app.stream.wire import Address

CARD_LIFE_S = 10.0


class HandleDirectory:
    """The replicas behind one deployment handle per model."""

    def __init__(self, handles: Mapping[str, DeploymentHandle]) -> None:
        self._choosers = {
            name: handle.options(method_name="describe") for name, handle in handles.items()
        }
        self._cards: dict[str, tuple[float, ModelCard]] = {}  # with the time it was asked for

    async def choose(self, model: str) -> Address:
        # Without a reservation: the task does not travel through the handle.
        async with self._choosers[model].choose_replica(_reserve=False) as chosen:
            return Address(**chosen.replica_metadata)

    async def describe(self, model: str, *, verbose: bool) -> ModelCard:
        """A card changes only when a replica is started anew, so a recent one will do."""
        if verbose:
            return await self._choosers[model].remote(verbose=True)
        asked_at, card = self._cards.get(model, (0.0, None))
        if card is None or time.monotonic() - asked_at > CARD_LIFE_S:
            card = await self._choosers[model].remote()
            self._cards[model] = (time.monotonic(), card)
        return card
