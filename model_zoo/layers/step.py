"""What a step hands to one layer."""

from dataclasses import dataclass

from torch import Tensor

from model_zoo.layers.rope import Rotation
from runtime.worker.model import AttentionPlan, Batch, LayerPages


@dataclass(frozen=True, slots=True)
class Step:
    """One step as one layer sees it.

    `pages` and `plan`: where it writes and what it reads, perhaps another layer's. `rotation`: None
    in a layer without rotary embedding. `rows` [outputs] int64: in the last layer, the rows that
    it shall return; None where all. `layer_input` [tokens, width]: this layer's part of what the
    decoder computed beside the embedding, where it does.
    """

    batch: Batch
    pages: LayerPages
    plan: AttentionPlan
    rotation: Rotation | None
    rows: Tensor | None
    layer_input: Tensor | None = None

    @property
    def positions(self) -> Tensor:
        return self.batch.positions

    def kept(self, x: Tensor) -> Tensor:
        """x [tokens, ...] -> its rows that the layer shall return."""
        return x if self.rows is None else x.index_select(0, self.rows)
