"""Per-layer inputs of the small Gemma models: a second embedding with a part for every layer."""

from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.embedding import known_ids
from runtime.kernels.pointwise import add_, gelu_mul, scale_
from runtime.worker.model import Batch

WIDTH_KEY = "embedding_length_per_layer_input"


class TokenLayerInputs:
    """(norm(project(x) / sqrt(hidden)) + embedding * sqrt(width)) / sqrt(2), [tokens, layers,
    width].

    Tokens beyond the rows of the table use its first row. Image placeholders use the row of the
    token `place`.
    """

    def __init__(self, w: TensorScope, sizes: TextSizes, *, width: int, place: int = 0) -> None:
        self._width, self._hidden = width, sizes.hidden
        self._place = place
        self.kept_elements = sizes.layers * width
        self._table = w.embedding("per_layer_token_embd", shape=(None, self.kept_elements))
        shape = self.kept_elements, sizes.hidden
        self._project = w.linear("per_layer_model_proj", shape=shape)
        self._norm = w.rms_norm("per_layer_proj_norm", sizes.eps, size=width)
        self.row_elements = 6 * self.kept_elements
        self.matrix_elements = self.kept_elements * sizes.hidden

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x [tokens, hidden], the embeddings -> [tokens, layers, width]."""
        tokens = batch.tokens
        if batch.image_rows is not None:
            tokens = tokens.index_fill(0, batch.image_rows, self._place)
        known, parts = known_ids(tokens, self._table.rows), (-1, self._width)
        own = scale_(self._table(known), self._width**0.5)
        seen = scale_(self._project(x), self._hidden**-0.5).unflatten(1, parts)
        return scale_(add_(own, self._norm(seen).flatten(1)), 2**-0.5).unflatten(1, parts)


class LayerInputGate:
    """norm(project(gelu(gate(x)) * layer_input)), which is added to a layer's output."""

    def __init__(self, w: TensorScope, sizes: TextSizes, *, width: int) -> None:
        self._gate = w.linear("inp_gate", shape=(width, sizes.hidden))
        self._project = w.linear("proj", shape=(sizes.hidden, width))
        self._norm = w.rms_norm("post_norm", sizes.eps, size=sizes.hidden)
        self.row_elements = 6 * width + 4 * sizes.hidden
        self.matrix_elements = width * sizes.hidden

    def __call__(self, x: Tensor, layer_input: Tensor) -> Tensor:
        """x [tokens, hidden], layer_input [tokens, width] -> a new [tokens, hidden]."""
        return self._norm(self._project(gelu_mul(self._gate(x), layer_input)))


def layer_input_width(metadata: Metadata) -> int | None:
    """The width of a layer's part; None if the model has no per-layer inputs (key missing or 0)."""
    return metadata.get_size(WIDTH_KEY, 0) if metadata.get(WIDTH_KEY, int, 0) else None
