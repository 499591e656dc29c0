"""Models whose scores fall with distance, as their authors compute them: Baichuan 13B and Refact,
which are Llama otherwise, and Jais. `transformers` has none of them."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

# With the number of layers by which readers identify it.
BAICHUAN_13B = {"num_hidden_layers": 40, "hidden_size": 32, "intermediate_size": 32}


def fallen(queries: Tensor, keys: Tensor, values: Tensor, *, scale: float) -> Tensor:
    """queries [1, heads, tokens, size], keys and values [1, key heads, tokens, size] -> [1, tokens,
    heads * size]."""
    heads, count = queries.shape[1:3]
    keys, values = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (keys, values))
    falls = build_alibi_tensor(torch.ones(1, count), heads, torch.float32)  # of the key's place
    later = torch.ones(count, count, dtype=torch.bool).triu(1)
    scores = (queries @ keys.mT * scale + falls).masked_fill(later, -torch.inf)
    return (scores.softmax(-1) @ values).transpose(1, 2).flatten(2)


class FallingAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self._size = config.head_dim
        heads = config.num_attention_heads, *2 * [config.num_key_value_heads]
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(config.hidden_size, count * self._size, bias=False) for count in heads
        )
        self.o_proj = nn.Linear(heads[0] * self._size, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, **others: Any) -> tuple[Tensor, None]:
        queries, keys, values = (
            project(hidden_states).unflatten(2, (-1, self._size)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(fallen(queries, keys, values, scale=self._size**-0.5)), None


class FallingLlama(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn = FallingAttention(config)


class JaisAttention(nn.Module):
    """Names of modules are those of the checkpoints."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self._size = config.head_dim
        self.c_attn = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.c_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = (
            part.unflatten(2, (-1, self._size)).transpose(1, 2)
            for part in self.c_attn(x).chunk(3, dim=2)
        )
        return self.c_proj(fallen(queries, keys, values, scale=1 / self._size))


class JaisFeedForward(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.c_fc, self.c_fc2 = (
            nn.Linear(config.hidden_size, config.intermediate_size) for _ in range(2)
        )
        self.c_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.c_fc(x) * nn.functional.silu(self.c_fc2(x)))


class JaisLayer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = (
            nn.LayerNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2)
        )
        self.attn, self.mlp = JaisAttention(config), JaisFeedForward(config)

    def forward(self, x: Tensor, **others: Any) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class ScaledEmbedding(nn.Embedding):
    scale = 1.0

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.scale


class ScaledHead(nn.Linear):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Jais(LlamaForCausalLM):
    """The scale of the head is stated as it is or as two factors."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        layers = [JaisLayer(config) for _ in range(config.num_hidden_layers)]
        self.model.layers = nn.ModuleList(layers)
        self.model.norm = nn.LayerNorm(config.hidden_size, config.rms_norm_eps)
        self.model.embed_tokens = ScaledEmbedding(config.vocab_size, config.hidden_size)
        self.lm_head = ScaledHead(config.hidden_size, config.vocab_size, bias=False)
        if hasattr(config, "width_scale"):
            scales = config.embeddings_scale, config.width_scale
        else:
            scale = config.mup_output_alpha * config.mup_width_scale
            scales = config.mup_embeddings_scale, scale
        self.model.embed_tokens.scale, self.lm_head.scale = scales


class BaichuanMaker:
    @staticmethod
    def from_config(config: Any, **options: Any) -> Any:
        large = config.num_hidden_layers == BAICHUAN_13B["num_hidden_layers"]
        return (FallingLlama if large else LlamaForCausalLM)._from_config(config, **options)


class JaisMaker:
    from_config = Jais._from_config


class RefactMaker:
    from_config = FallingLlama._from_config
