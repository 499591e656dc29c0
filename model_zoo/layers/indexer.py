"""Sparse attention: an indexer chooses the tokens that each row attends to."""

from dataclasses import dataclass

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.step import Step
from runtime.kernels.activations import Activations
from runtime.kernels.attention import write_cache
from runtime.kernels.token_choice import choose_tokens, sees_few
from runtime.kv.spec import CacheKind, LayerCache
from runtime.worker.model import AttentionPlan

# As in the authors' code and in llama.cpp; files do not state it.
_EPS = 1e-6
_MAX_HEADS, _MAX_DIM = 1024, 256
_MAX_TOP_K = 1 << 20


@dataclass(frozen=True, slots=True)
class IndexerSizes:
    """heads of queries of `dim` elements, for one key of this size; a row attends to `top_k`
    tokens."""

    heads: int
    dim: int
    top_k: int

    @classmethod
    def read(cls, metadata: Metadata, *, rotated: int) -> "IndexerSizes":
        """Raises ModelFileError for missing or impossible sizes. rotated: rotated elements of a
        query."""
        prefix = "attention.indexer."
        dim = metadata.require_size(prefix + "key_length", at_most=_MAX_DIM)
        if dim < rotated:
            raise metadata.error(prefix + "key_length", f"is {dim}; {rotated} elements are rotated")
        return cls(
            metadata.require_size(prefix + "head_count", at_most=_MAX_HEADS),
            dim,
            metadata.require_size(prefix + "top_k", at_most=_MAX_TOP_K),
        )

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
        self.row_elements = 4 * (2 * width + 3 * sizes.dim + sizes.heads) + sizes.top_k
        self.matrix_elements = max(width * query_rank, sizes.dim * hidden)

    def __call__(self, x: Activations, compressed: Activations, step: Step) -> AttentionPlan | None:
        """x [tokens, hidden], compressed [tokens, query_rank], the step of the layer -> the plan of
        its attention, which is also kept for later layers; None if rows attend to all tokens."""
        own, sizes = step.beside, self._sizes
        assert own is not None and own.rotation is not None, "an indexer has keys of its own"
        keys = own.rotation(self._norm(self._keys(x)).unsqueeze(1))
        write_cache(keys, None, own.pages, own.plan)
        step.choice.plan = None
        if not sees_few(own.plan, own.pages, sizes.top_k):
            queries = self._queries(compressed).unflatten(1, (sizes.heads, sizes.dim))
            step.choice.plan = choose_tokens(
                own.rotation(queries), self._weights(x), own.pages, own.plan, step.plan, sizes.top_k
            )
        return step.choice.plan


def has_indexer(w: TensorScope) -> bool:
    """Whether the file has any tensor of this indexer."""
    return any(w.has(name) for name in ("attn_q_b", "attn_k", "k_norm", "proj"))


def shared_choice(step: Step) -> AttentionPlan | None:
    """The plan that the last indexer before this layer has made."""
    plan = step.choice.plan
    return None if plan is None else plan.to(step.pages.keys.device)
