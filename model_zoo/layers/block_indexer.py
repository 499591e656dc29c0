"""Sparse attention: an indexer chooses the blocks of tokens that each row attends to."""

from dataclasses import dataclass

import torch
from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.indexer import IndexerSizes
from model_zoo.layers.rope import Rotary
from model_zoo.layers.step import Step
from model_zoo.layers.text_sizes import TextSizes
from runtime.kernels.activations import Activations
from runtime.kernels.attention import write_cache
from runtime.kernels.block_choice import choose_blocks
from runtime.kernels.token_choice import sees_few
from runtime.worker.model import AttentionPlan

_RATIOS = "attention.compress_ratios"
_MAX_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """index: heads and size of the queries, and the number of tokens in all chosen blocks. block:
    tokens of a block."""

    index: IndexerSizes
    block: int

    @classmethod
    def read(cls, metadata: Metadata, layer: int, *, rotated: int) -> "BlockSizes | None":
        """None for layers that attend to all tokens; raises ModelFileError for impossible sizes.
        rotated: as of `IndexerSizes.read`."""
        stated = metadata.require_array(_RATIOS, int)
        if layer >= len(stated) or not 0 <= stated[layer] <= _MAX_BLOCK:
            raise metadata.error(_RATIOS, f"states no number from 0 to {_MAX_BLOCK} for {layer:,}")
        if stated[layer] == 0:
            return None
        index = IndexerSizes.read(metadata, rotated=rotated)
        if index.budget.most % stated[layer]:
            raise metadata.error(_RATIOS, f"does not divide {index.budget.most:,} tokens")
        return cls(index, stated[layer])


class BlockIndexer:
    """Chooses the blocks with the highest sums of relu(query . key) over the heads. The key of a
    block is the normed mean of its tokens' keys, rotated by the position of the first one.

    Every rank has the whole indexer and makes the same choice.
    """

    def __init__(self, w: TensorScope, text: TextSizes, sizes: BlockSizes, rotary: Rotary) -> None:
        self._sizes, self._rotary, index = sizes, rotary, sizes.index
        width = index.heads * index.dim
        self._queries = w.linear("q_proj", shape=(width, text.hidden))
        self._keys = w.linear("k_proj", shape=(index.dim, text.hidden))
        self._q_norm = w.rms_norm("q_norm", text.eps, size=index.dim)
        self._k_norm = w.rms_norm("k_norm", text.eps, size=index.dim)
        self.row_elements = 4 * (width + index.dim) + 2 * (index.budget.most + sizes.block)
        self.matrix_elements = width * text.hidden

    def __call__(self, x: Activations, step: Step) -> AttentionPlan | None:
        """x [tokens, hidden], the step of the layer -> the plan of its attention; None if rows
        attend to all tokens."""
        own, index, block = step.beside, self._sizes.index, self._sizes.block
        assert own is not None and step.rotation is not None, "an indexer has keys of its own"
        write_cache(self._keys(x).unsqueeze(1), None, own.pages, own.plan)
        if sees_few(own.plan, own.pages, index.budget.most + block - 1):
            return None
        queries = self._q_norm(self._queries(x).unflatten(1, (index.heads, index.dim)))
        return choose_blocks(
            step.rotation(queries),
            own.pages,
            own.plan,
            step.plan,
            block_keys=self._block_keys,
            size=block,
            most=index.budget.most // block,
            kv_heads=step.pages.keys.shape[2],
        )

    def _block_keys(self, means: Tensor) -> Tensor:
        """means [blocks, rows, dim] -> the keys of the blocks, likewise."""
        positions = torch.arange(len(means), device=means.device) * self._sizes.block
        return self._rotary(positions)(self._k_norm(means))
