"""OpenELM, which `transformers` does not have, as its authors compute it, made of the parts of
a family that it has."""

from copy import copy
from typing import Any

from transformers import Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3MLP


class OpenELM(Qwen3ForCausalLM):
    """Layers with numbers of heads and widths of their own."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            own = copy(config)
            own.num_attention_heads = config.num_query_heads[index]
            own.num_key_value_heads = config.num_kv_heads[index]
            own.intermediate_size = config.widths[index]
            layer.self_attn, layer.mlp = Qwen3Attention(own, index), Qwen3MLP(own)


class OpenELMMaker:
    from_config = OpenELM._from_config
