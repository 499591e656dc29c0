"""OpenELM and PLM, which `transformers` does not have, as their authors compute them, made of the
parts of families that it has."""

from copy import copy
from typing import Any

from torch import Tensor, nn
from transformers import DeepseekV3ForCausalLM, Qwen3ForCausalLM
from transformers.activations import ACT2FN
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


class Ungated(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self._curve = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self._curve(self.up_proj(x)))


class PLM(DeepseekV3ForCausalLM):
    """Feed-forwards without gates."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = Ungated(config)


class OpenELMMaker:
    from_config = OpenELM._from_config


class PLMMaker:
    from_config = PLM._from_config
