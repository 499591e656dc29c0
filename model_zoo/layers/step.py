"""The inputs of a layer in one step."""

from dataclasses import dataclass, field

from torch import Tensor

from model_zoo.layers.rope import Rotation
from runtime.kernels.pointwise import take_rows
from runtime.worker.model import AttentionPlan, Batch, LayerPages


@dataclass(slots=True, eq=False)
class TokenChoice:
    """The plan by which rows attend to chosen tokens (`choose_tokens`), from the layer that makes
    it to those after it; None while rows attend to all tokens that they see."""

    plan: AttentionPlan | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """The inputs of one layer in one step.

    pages, plan: the cache that it writes and reads, possibly another layer's. rotation: None in a
    layer without rotary embedding. rows [outputs] int64: in the last layer, the rows to return;
    None for all. layer_input [tokens, width]: this layer's part of `LayerInputs`, if the model has
    them. beside: the step of the layer's second mixer, which has a cache of its own. choice: shared
    by the layers of one step.
    """

    batch: Batch
    pages: LayerPages
    plan: AttentionPlan
    rotation: Rotation | None
    rows: Tensor | None
    layer_input: Tensor | None = None
    beside: "Step | None" = None
    choice: TokenChoice = field(default_factory=TokenChoice)

    @property
    def positions(self) -> Tensor:
        return self.batch.positions

    def kept(self, x: Tensor) -> Tensor:
        """x [tokens, n] -> only the rows to return."""
        return x if self.rows is None else take_rows(x, self.rows)
