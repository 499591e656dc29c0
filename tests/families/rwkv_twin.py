"""RWKV 7, which `transformers` does not have, as its authors compute it, in float64. The names are
those of the checkpoints of flash-linear-attention."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

HEADS_EPS = 64e-5


class RWKV7Config(PreTrainedConfig):
    model_type = "rwkv7"


def linear(ins: int, outs: int) -> nn.Linear:
    return nn.Linear(ins, outs, bias=False)


def before(x: Tensor) -> Tensor:
    """x [tokens, hidden] -> the row before each."""
    return F.pad(x, (0, 0, 1, -1))


class Factored(nn.Module):
    def __init__(self, hidden: int, rank: int, curve: nn.Module, *, bias: bool) -> None:
        super().__init__()
        self.lora = nn.Sequential(linear(hidden, rank), curve, nn.Linear(rank, hidden, bias=bias))

    def forward(self, x: Tensor) -> Tensor:
        return self.lora(x)


class TimeMix(nn.Module):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        hidden, self._size = config.hidden_size, config.head_dim
        self._heads = hidden // self._size
        for name in "rwkvag":
            self.register_parameter(f"x_{name}", nn.Parameter(torch.full((1, 1, hidden), 0.5)))
        self.k_k, self.k_a = (nn.Parameter(torch.ones(hidden)) for _ in range(2))
        self.r_k = nn.Parameter(torch.zeros(self._heads, self._size))
        for name in "rkvo":
            self.add_module(f"{name}_proj", linear(hidden, hidden))
        self.w_lora = Factored(hidden, config.decay_low_rank_dim, nn.Tanh(), bias=True)
        self.a_lora = Factored(hidden, config.a_low_rank_dim, nn.Identity(), bias=True)
        self.g_lora = Factored(hidden, config.gate_low_rank_dim, nn.Sigmoid(), bias=False)
        if index:
            self.v_lora = Factored(hidden, config.v_low_rank_dim, nn.Identity(), bias=True)
        self.g_norm = nn.GroupNorm(self._heads, hidden, eps=HEADS_EPS)

    def forward(self, x: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        change = before(x) - x
        r, w, k, v, a, g = (x + change * getattr(self, f"x_{name}")[0] for name in "rwkvag")
        values = self.v_proj(v)
        if first is not None:
            values = values + (first - values) * self.v_lora(v).sigmoid()
        first = values if first is None else first
        r, k = self.r_proj(r), self.k_proj(k)
        w = (-math.exp(-0.5) * self.w_lora(w).sigmoid()).exp()
        a, g = self.a_lora(a).sigmoid(), self.g_lora(g)
        shape = (self._heads, self._size)
        kk = F.normalize((k * self.k_k).unflatten(1, shape), dim=2)
        k = k * (1 + (a - 1) * self.k_a)
        r, w, k, v, a = (each.unflatten(1, shape) for each in (r, w, k, values, a))
        state, rows = x.new_zeros(self._heads, self._size, self._size), []
        for n in range(len(x)):  # [values, keys]
            removed = (state @ -kk[n, :, :, None]) @ (kk[n] * a[n])[:, None]
            state = state * w[n, :, None] + removed + v[n, :, :, None] @ k[n, :, None]
            rows.append(state @ r[n, :, :, None])
        seen = self.g_norm(torch.stack(rows).flatten(1))
        own = (r * k * self.r_k).sum(dim=2, keepdim=True) * v
        return self.o_proj((seen + own.flatten(1)) * g), first


class ChannelMix(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.x_k = nn.Parameter(torch.full((config.hidden_size,), 0.5))
        self.key = linear(config.hidden_size, config.intermediate_size)
        self.value = linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.value(self.key(x + (before(x) - x) * self.x_k).relu().square())


class Layer(nn.Module):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.norm_eps
        if not index:
            self.pre_norm = nn.LayerNorm(hidden, eps)
        self.attn_norm, self.ffn_norm = (nn.LayerNorm(hidden, eps) for _ in range(2))
        self.attn, self.ffn = TimeMix(config, index), ChannelMix(config)

    def forward(self, x: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        x = x if first is not None else self.pre_norm(x)
        mixed, first = self.attn(self.attn_norm(x), first)
        x = x + mixed
        return x + self.ffn(self.ffn_norm(x)), first


class RWKV7ForCausalLM(PreTrainedModel):
    config_class = RWKV7Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        layers = [Layer(config, index) for index in range(config.num_hidden_layers)]
        self.model, hidden = nn.Module(), config.hidden_size
        self.model.embeddings = nn.Embedding(config.vocab_size, hidden)
        self.model.layers = nn.ModuleList(layers)
        self.model.norm = nn.LayerNorm(hidden, config.norm_eps)
        self.lm_head = linear(hidden, config.vocab_size)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        pass

    def forward(self, input_ids: Tensor, **others: Any) -> CausalLMOutput:
        """input_ids [1, tokens]; computed in float64."""
        self.double()
        x, first = self.model.embeddings(input_ids[0]), None
        for layer in self.model.layers:
            x, first = layer(x, first)
        return CausalLMOutput(logits=self.lm_head(self.model.norm(x))[None])


class RWKV7Maker:
    from_config = RWKV7ForCausalLM._from_config
