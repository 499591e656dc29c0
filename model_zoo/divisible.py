"""Which architectures several ranks or several devices can compute together."""

from model_zoo.gguf.metadata import Metadata
from runtime.errors import UnsupportedModelError
from runtime.ranks import Ranks

# Those whose large matrices all belong to layers that divide them. In Qwen 3 Next and 3.5 every
# rank computes the recurrent layers whole.
DIVISIBLE = frozenset(
    {
        "bert",
        "gemma2",
        "gemma3",
        "gemma4",
        "gpt-oss",
        "gptoss",
        "llama",
        "llama4",
        "mistral3",
        "mllama",
        "nomic-bert",
        "phi3",
        "qwen2",
        "qwen25vl",
        "qwen2vl",
        "qwen3",
        "qwen35",
        "qwen35moe",
        "qwen3moe",
        "qwen3next",
        "qwen3vl",
        "qwen3vlmoe",
    }
)


def refuse_indivisible(metadata: Metadata, ranks: Ranks) -> None:
    """UnsupportedModelError where there is more than one rank for what cannot be divided."""
    if ranks.size > 1 and metadata.architecture not in DIVISIBLE:
        raise UnsupportedModelError(
            f"{metadata.path}: models of architecture {metadata.architecture} cannot be divided "
            f"among {ranks.size} ranks (`parallel.tensor`); those that can: "
            f"{', '.join(sorted(DIVISIBLE))}."
        )


def refuse_unstageable(metadata: Metadata) -> None:
    """UnsupportedModelError for layers that cannot be on several devices."""
    if metadata.architecture not in DIVISIBLE:
        raise UnsupportedModelError(
            f"{metadata.path}: the layers of architecture {metadata.architecture} cannot be on "
            "several devices (`tensor_split`, `num_gpu`); those that can: "
            f"{', '.join(sorted(DIVISIBLE))}."
        )
