"""A text decoder put together from its layers; see runtime.worker.model.DecoderModel."""

from collections.abc import Sequence

import torch
from torch import Tensor

from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.norm import LayerNorm, RMSNorm
from model_zoo.layers.sizes import Sizes
from model_zoo.layers.stack import Layer, LayerInputs, LayerStack
from runtime.kernels.pointwise import softcap
from runtime.kernels.workspace import workspace_bytes
from runtime.kv.spec import LayerCache
from runtime.worker.model import Batch, KVCache


class Decoder:
    """Embedding, layers, norm and head; every row sees those before it. Where ranks divide the
    model, each of them has all states and all logits in the end.

    `embedding_scale` multiplies the embeddings of tokens. Logits are divided by `logit_divisor`,
    then bounded by `logit_softcap`.
    `output_norm`: RMSNorm of that name by default. `head_rows`: rows of the head, where it has
    fewer than the embedding. `image_elements`: how many elements layers that attend to images need
    beside, to store an image's rows. `layer_inputs`: from the embeddings and the batch to
    [tokens, layers, width], of which each layer sees its part. Logits are -inf for rows that no
    token of the file has, and for those that the head lacks.
    """

    def __init__(
        self,
        w: TensorScope,
        sizes: Sizes,
        layers: Sequence[Layer],
        *,
        embedding_scale: float | None = None,
        logit_divisor: float = 1.0,
        logit_softcap: float | None = None,
        output_norm: RMSNorm | LayerNorm | None = None,
        head_rows: int | None = None,
        image_elements: int = 0,
        layer_inputs: LayerInputs | None = None,
    ) -> None:
        self.causal = self.generates = True
        self.context_length = sizes.context_length
        self._token_embd = w.embedding("token_embd", shape=(None, sizes.hidden), divided=True)
        self._output_norm = output_norm or w.rms_norm("output_norm", sizes.eps, size=sizes.hidden)
        self.vocab_size = self._token_embd.rows
        shape = (head_rows or self.vocab_size or None, sizes.hidden)
        alt = None if head_rows else "token_embd"
        self._output = w.gathered_linear("output", alt=alt, shape=shape)
        self._known_tokens = sizes.known_tokens or self.vocab_size
        self._layers = LayerStack(
            layers, inputs=layer_inputs, ranks=w.ranks, layer_placement=w.layer_placement
        )
        self._embedding_scale, self._logit_softcap = embedding_scale, logit_softcap
        self._logit_divisor = logit_divisor
        self._image_elements = image_elements
        self.hidden_size, self._device = sizes.hidden, w.device
        self._held = w.held

    @property
    def cache_layers(self) -> Sequence[LayerCache]:
        return self._layers.caches

    @property
    def position_axes(self) -> int:
        return self._layers.position_axes

    @property
    def cache_devices(self) -> Sequence[torch.device] | None:
        return self._layers.cache_devices

    @property
    def weight_bytes(self) -> int:
        return sum(self._held.values())

    def weight_bytes_on(self, device: torch.device) -> int:
        return self._held.get(device, 0)

    def states(self, batch: Batch, cache: KVCache) -> Tensor:
        """float32 [outputs, hidden], normalised."""
        return self._output_norm(self._layers(self._embedded(batch), batch, cache).float())

    def logits(self, states: Tensor) -> Tensor:
        """float32 [rows, vocab_size] of states in float32: in bfloat16, logits between 16 and 32
        would have steps of 0.125, which makes ties and coarse log-probabilities."""
        logits = self._output(states)
        if self._logit_divisor != 1.0:
            logits = logits.div_(self._logit_divisor)
        if self._logit_softcap is not None:
            logits = softcap(logits, self._logit_softcap)
        missing = self.vocab_size - logits.shape[1]
        if missing:
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        if self._known_tokens < self.vocab_size:
            logits[:, self._known_tokens :] = -torch.inf
        return logits

    def activation_bytes(self, tokens: int, outputs: int) -> int:
        """All in float32, as kernels compute; the residual rows, then a layer's widest step."""
        row = 4 * self.hidden_size
        floats = tokens * (row + self._layers.row_elements) + self._image_elements
        floats += outputs * (row + 3 * self.vocab_size + self._output.row_elements)
        matrix = max(self._layers.matrix_elements, self.hidden_size * self.vocab_size)
        return 4 * floats + workspace_bytes(
            self._device, largest_matrix=matrix, caches=self._layers.caches
        )

    def _embedded(self, batch: Batch) -> Tensor:
        """[tokens, hidden]; rows of images are not scaled."""
        x = self._token_embd(batch.tokens)
        if self._embedding_scale is not None:
            x = x.mul_(self._embedding_scale)
        if batch.image_rows is not None:
            assert batch.image_features is not None
            features = batch.image_features[:, : self.hidden_size]
            x.index_copy_(0, batch.image_rows, features.to(x.dtype))
        return x
