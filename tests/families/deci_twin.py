"""Llama-Nemotron and DeciLM, which `transformers` does not have, as their authors compute them:
Llama whose layers differ and may lack parts."""

from copy import copy
from typing import Any

from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm


class LinearAttention(nn.Module):
    """A matrix instead of attention."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.linear_attn = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, **others: Any) -> tuple[Tensor, None]:
        return self.linear_attn(x), None


class DeciLayer(nn.Module):
    """Names of modules are those of the checkpoints; `config` has what this layer has."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self._attends, self._feeds_forward = not config.skips_attention, not config.skips_ffn
        if self._attends:
            self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
            self.self_attn: nn.Module = (
                LinearAttention(config) if config.linear else LlamaAttention(config, index)
            )
        if self._feeds_forward:
            self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
            self.mlp = LlamaMLP(config)

    def forward(self, x: Tensor, **others: Any) -> Tensor:
        if self._attends:
            x = x + self.self_attn(self.input_layernorm(x), **others)[0]
        if self._feeds_forward:
            x = x + self.mlp(self.post_attention_layernorm(x))
        return x


def of_layer(config: LlamaConfig, index: int) -> Any:
    """The configuration of one layer; DeciLM states key heads alone."""
    own: Any = copy(config)
    own.skips_attention = own.skips_ffn = own.linear = False
    if not hasattr(config, "block_configs"):
        own.num_key_value_heads = config.num_key_value_heads_per_layer[index]
        return own
    attention, ffn = (config.block_configs[index][part] for part in ("attention", "ffn"))
    own.skips_attention, own.skips_ffn = attention["no_op"], ffn["no_op"]
    own.linear = attention["replace_with_linear"]
    if attention["n_heads_in_group"]:
        own.num_key_value_heads = config.num_attention_heads // attention["n_heads_in_group"]
    width = int(2 * (ffn["ffn_mult"] or 0) * config.hidden_size / 3)
    own.intermediate_size = width + -width % 256
    return own


class DeciLMForCausalLM(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        count = range(config.num_hidden_layers)
        self.model.layers = nn.ModuleList([DeciLayer(of_layer(config, i), i) for i in count])


class DeciMaker:
    from_config = DeciLMForCausalLM._from_config
