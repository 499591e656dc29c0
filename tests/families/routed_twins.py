"""GroveMoE and SmallThinker, which `transformers` does not have, as their authors compute them."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Qwen3MoeForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

# Of GroveMoE's smaller experts.
PER_GROUP, WIDTH, SCALE = 2, 128, 0.05


class Expert(nn.Module):
    """Names of the matrices are those of the checkpoints."""

    def __init__(self, hidden: int, width: int, curve: Any, suffix: str = "") -> None:
        super().__init__()
        self._curve, self._names = curve, [f"{name}{suffix}" for name in ("gate", "up", "down")]
        for name, (ins, outs) in zip(
            self._names, ((hidden, width), (hidden, width), (width, hidden)), strict=True
        ):
            self.add_module(name, nn.Linear(ins, outs, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (getattr(self, name) for name in self._names)
        return down(self._curve(gate(x)) * up(x))


def weighted(experts: nn.ModuleList, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """x [rows, hidden], chosen and weights [rows, used] -> [rows, hidden]."""
    of_all = torch.stack([expert(x) for expert in experts], dim=1)
    taken = of_all.take_along_dim(chosen.unsqueeze(2), dim=1)
    return (taken * weights.unsqueeze(2)).sum(dim=1)


class GroveBlock(nn.Module):
    """Two neighbouring experts share a smaller one."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, count = config.hidden_size, config.num_experts
        self._used = config.num_experts_per_tok
        self.gate = nn.Linear(hidden, count, bias=False)
        self.experts, self.chunk_experts = (
            nn.ModuleList([Expert(hidden, width, nn.SiLU(), "_proj") for _ in range(number)])
            for number, width in (
                (count, config.moe_intermediate_size),
                (count // PER_GROUP, WIDTH),
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        scores, chosen = self.gate(rows).softmax(-1).topk(self._used)
        weights = scores / scores.sum(-1, keepdim=True)
        own = weighted(self.experts, rows, chosen, weights)
        shared = weighted(self.chunk_experts, rows, chosen // PER_GROUP, weights)
        return (own + SCALE * shared).view_as(x)


class GroveMoeForCausalLM(Qwen3MoeForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = GroveBlock(config)


class SmallThinkerAttention(nn.Module):
    """window: None for all tokens. rotated: whether queries and keys are."""

    def __init__(self, config: Any, window: int | None, rotated: bool) -> None:
        super().__init__()
        self._window, self._rotated, self._size = window, rotated, config.head_dim
        self._shared = config.num_attention_heads // config.num_key_value_heads
        widths = (config.num_attention_heads, *2 * [config.num_key_value_heads])
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(config.hidden_size, heads * self._size, bias=False) for heads in widths
        )
        self.o_proj = nn.Linear(widths[0] * self._size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        queries, keys, values = (
            project(x).unflatten(2, (-1, self._size)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self._rotated:
            queries, keys = apply_rotary_pos_emb(queries, keys, *angles)
        keys, values = (t.repeat_interleave(self._shared, dim=1) for t in (keys, values))
        places = torch.arange(x.shape[1])
        ago = places[:, None] - places
        hidden = (ago < 0) | (ago >= (self._window or len(places)))
        scores = (queries @ keys.mT * self._size**-0.5).masked_fill(hidden, -torch.inf)
        return self.o_proj((scores.softmax(-1) @ values).transpose(1, 2).flatten(2))


class SmallThinkerExperts(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self._used = config.moe_num_active_primary_experts
        self._softmax = config.moe_primary_router_apply_softmax
        hidden, count = config.hidden_size, config.moe_num_primary_experts
        self.primary_router = nn.Linear(hidden, count, bias=False)
        width = config.moe_ffn_hidden_size
        self.experts = nn.ModuleList([Expert(hidden, width, nn.ReLU()) for _ in range(count)])

    def forward(self, before: Tensor, x: Tensor) -> Tensor:
        """before: the input of the router."""
        logits, chosen = self.primary_router(before.flatten(0, 1)).topk(self._used)
        weights = logits.softmax(-1) if self._softmax else logits.sigmoid()
        weights = weights / weights.sum(-1, keepdim=True)
        return weighted(self.experts, x.flatten(0, 1), chosen, weights).view_as(x)


class SmallThinkerLayer(nn.Module):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        window = config.sliding_window_size if config.sliding_window_layout[index] else None
        rotated = bool(config.rope_layout[index])
        self.self_attn = SmallThinkerAttention(config, window, rotated)
        self.block_sparse_moe = SmallThinkerExperts(config)
        self.input_layernorm, self.post_attention_layernorm = (
            LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2)
        )

    def forward(self, x: Tensor, *, position_embeddings: Any, **others: Any) -> Tensor:
        attended = x + self.self_attn(self.input_layernorm(x), position_embeddings)
        inputs = self.post_attention_layernorm(attended)
        return attended + self.block_sparse_moe(x, inputs)


class SmallThinkerForCausalLM(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        layers = [SmallThinkerLayer(config, index) for index in range(config.num_hidden_layers)]
        self.model.layers = nn.ModuleList(layers)


class GroveMoeMaker:
    from_config = GroveMoeForCausalLM._from_config


class SmallThinkerMaker:
    from_config = SmallThinkerForCausalLM._from_config
