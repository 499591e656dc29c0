"""`pooling_type` of model files: how an embedding model pools the states of a text.

CLS: the state of the first token; LAST: of the last one; RANK: a reranker, whose head computes a
score from a state that its family determines; NONE: not an embedding model.
"""

from collections.abc import Callable
from types import MappingProxyType

from model_zoo.families import TEXT_FAMILIES
from model_zoo.gguf.metadata import Metadata

NONE, MEAN, CLS, LAST, RANK = range(5)
NAMES = MappingProxyType({MEAN: "mean", CLS: "cls", LAST: "last", RANK: "rank"})
# Architectures whose rerankers are served.
_LAST = {name: family.ranking.last for name, family in TEXT_FAMILIES.items() if family.ranking}
RANKING = tuple(sorted(_LAST))


def pooling_type(metadata: Metadata, has: Callable[[str], bool]) -> int:
    """The pooling that the file states, else RANK for a reranker, else NONE.

    `has(name)`: whether the file has the tensor NAME.weight. llama.cpp's converter states no
    pooling of rerankers, which the last layer of their head identifies.
    """
    last = _LAST.get(metadata.architecture)
    ranks = last is not None and has(last)
    return metadata.get("pooling_type", int, RANK if ranks else NONE)


def keeps_token_vectors(metadata: Metadata, has: Callable[[str], bool]) -> bool:
    """Whether the model computes a vector for each token, as ColBERT does: it has a matrix for
    states (`dense_2`; Ollama's name is `dense.0`), but no pooling. `has`: as in `pooling_type`."""
    return (has("dense_2") or has("dense.0")) and pooling_type(metadata, has) == NONE
