"""Routing rules of families whose files state little about the choice of experts."""

from collections.abc import Callable

from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from runtime.kernels.routing import Routing, Scores

# logits float32 [tokens, experts] and the number of experts per row
# -> chosen int64 [tokens, used] and weights float32 [tokens, used]
Router = Callable[[Tensor, int], tuple[Tensor, Tensor]]

# Weights are probabilities over all experts; or over the chosen ones, which equals renormalising;
# or the sigmoids of logits, as in Llama 4.
SOFTMAX_OF_ALL = Routing(Scores.SOFTMAX)
SOFTMAX_OF_CHOSEN = Routing(Scores.SOFTMAX_OF_CHOSEN)
SIGMOID_OF_CHOSEN = Routing(Scores.SIGMOID)


def stated_softmax(metadata: Metadata) -> Routing:
    """`SOFTMAX_OF_CHOSEN` unless the file states that weights are not renormalised.

    Two keys state it; where they differ, `norm_top_k_prob` takes precedence.
    """
    renormalised = metadata.get("expert_weights_norm", bool, True)
    renormalised = metadata.get("norm_top_k_prob", bool, renormalised)
    return SOFTMAX_OF_CHOSEN if renormalised else SOFTMAX_OF_ALL
