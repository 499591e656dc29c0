"""Sparse attention: an indexer chooses the tokens that each row attends to."""

from dataclasses import dataclass

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.step import Step
from runtime.distributed.ranks import Split
from runtime.kernels.activations import Activations
from runtime.kernels.attention import write_cache
from runtime.kernels.token_choice import Budget, choose_tokens, sees_few
from runtime.kv.cache_kinds import CacheKind
from runtime.kv.cache_layout import LayerCache
from runtime.worker.model import AttentionPlan

# As in the authors' code and in llama.cpp; files do not state it.
_EPS = 1e-6
_MAX_HEADS, _MAX_DIM = 1024, 256
_MAX_TOP_K, _MAX_BLOCK = 1 << 20, 1 << 12


@dataclass(frozen=True, slots=True)
class IndexerSizes:
    """heads of queries of `dim` elements, for one key of this size; a row attends to the tokens of
    `budget`."""

    heads: int
    dim: int
    budget: Budget

    @classmethod
    def read(cls, metadata: Metadata, *, rotated: int, in_blocks: bool = False) -> "IndexerSizes":
        """Raises ModelFileError for missing or impossible sizes. rotated: rotated elements of a
        query. in_blocks: whether the file states the blocks of a budget."""
        prefix = "attention.indexer."
        dim = metadata.require_size(prefix + "key_length", at_most=_MAX_DIM)
        if dim < rotated:
            raise metadata.error(prefix + "key_length", f"is {dim}; {rotated} elements are rotated")
        heads = metadata.require_size(prefix + "head_count", at_most=_MAX_HEADS)
        budget = Budget(metadata.require_size(prefix + "top_k", at_most=_MAX_TOP_K))
        if in_blocks:
            block = metadata.require_size(prefix + "block_size", at_most=_MAX_BLOCK)
            local = metadata.require(prefix + "local_blocks", int)
            budget = Budget(budget.most, block, local)
            if not 0 <= local <= budget.most or budget.tokens > _MAX_TOP_K:
                raise metadata.error(
                    prefix + "local_blocks",
                    f"is {local}; {budget.most:,} blocks of {block:,} tokens are chosen",
                )
        return cls(heads, dim, budget)

    def cache(self, kind: CacheKind) -> LayerCache:
        """The cache of the indexer's keys, which has no values."""
        return LayerCache(kind, 1, self.dim, 0, values_in_keys=True)


class Indexer:
    """Chooses the tokens with the highest sums of relu(query . key), weighted by head (DeepSeek-AI,
    "DeepSeek-V3.2", section 2.1).

    Factors that all scores of a row have in common do not change the choice and are left out, as is
    the Hadamard transform that the authors apply to both queries and keys. Every rank has the whole
    indexer and makes the same choice.
    """

    def __init__(
        self, w: TensorScope, sizes: IndexerSizes, *, hidden: int, query_rank: int
    ) -> None:
        self._sizes = sizes
        width = sizes.heads * sizes.dim
        self._queries = w.linear("attn_q_b", shape=(width, query_rank))
        self._keys = w.linear("attn_k", shape=(sizes.dim, hidden))
        w.need_biases("k_norm")
        self._norm = w.layer_norm("k_norm", _EPS, size=sizes.dim)
        self._weights = w.linear("proj", shape=(sizes.heads, hidden))
        self.row_elements = 4 * (2 * width + 3 * sizes.dim + sizes.heads) + sizes.budget.tokens
        self.matrix_elements = max(width * query_rank, sizes.dim * hidden)

    def __call__(self, x: Activations, compressed: Activations, step: Step) -> AttentionPlan | None:
        """x [tokens, hidden], compressed [tokens, query_rank], the step of the layer -> the plan of
        its attention, which is also kept for later layers; None if rows attend to all tokens."""
        own, sizes = step.beside, self._sizes
        assert own is not None and own.rotation is not None, "an indexer has keys of its own"
        keys = own.rotation(self._norm(self._keys(x)).unsqueeze(1))
        write_cache(keys, None, own.pages, own.plan)
        step.choice.plan = None
        if not sees_few(own.plan, own.pages, sizes.budget.tokens):
            queries = self._queries(compressed).unflatten(1, (sizes.heads, sizes.dim))
            step.choice.plan = choose_tokens(
                own.rotation(queries),
                self._weights(x),
                own.pages,
                own.plan,
                step.plan,
                sizes.budget,
            )
        return step.choice.plan


class HeadIndexer:
    """Chooses blocks of tokens for each key/value head, by the products of a query of its own and
    one key of each token (`MiniMaxM3VLIndexer` of `transformers`).

    heads: the key/value heads of this rank, which chooses for these alone.
    """

    def __init__(
        self, w: TensorScope, sizes: IndexerSizes, *, hidden: int, eps: float, heads: Split
    ) -> None:
        self._sizes, dim = sizes, sizes.dim
        outs = heads.times(dim)
        self._queries = w.linear("q_proj", shape=(sizes.heads * dim, hidden), outs=outs)
        self._keys = w.linear("k_proj", shape=(dim, hidden))
        self._query_norm, self._key_norm = (
            w.rms_norm(name, eps, size=dim) for name in ("q_norm", "k_norm")
        )
        self.row_elements = 4 * (3 * outs.count + 3 * dim) + heads.count * sizes.budget.tokens
        self.matrix_elements = hidden * outs.count

    def __call__(self, x: Activations, step: Step) -> AttentionPlan | None:
        """x [tokens, hidden], the step of the layer -> the plan of its attention, as of
        `choose_tokens` without weights; None if rows attend to all tokens."""
        own, sizes = step.beside, self._sizes
        assert own is not None and own.rotation is not None, "an indexer has keys of its own"
        keys = own.rotation(self._key_norm(self._keys(x)).unsqueeze(1))
        write_cache(keys, None, own.pages, own.plan)
        if sees_few(own.plan, own.pages, sizes.budget.tokens):
            return None
        queries = self._query_norm(self._queries(x).unflatten(1, (-1, sizes.dim)))
        return choose_tokens(
            own.rotation(queries), None, own.pages, own.plan, step.plan, sizes.budget
        )


def has_indexer(w: TensorScope) -> bool:
    """Whether the file has any tensor of an `Indexer`."""
    return any(w.has(name) for name in ("attn_q_b", "attn_k", "k_norm", "proj"))


def has_head_indexer(w: TensorScope) -> bool:
    """Whether the file has any tensor of a `HeadIndexer`."""
    return any(w.has(name) for name in ("q_proj", "k_proj", "q_norm", "k_norm"))


def shared_choice(step: Step) -> AttentionPlan | None:
    """The plan that the last indexer before this layer has made."""
    plan = step.choice.plan
    return None if plan is None else plan.to(step.pages.keys.device)
