"""PLaMo 1 to 3, which `transformers` does not have, as their authors compute them, in
float64."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

HEAD_EPS = 1e-6


class Plamo1Config(PreTrainedConfig):
    model_type = "plamo"


class Plamo2Config(PreTrainedConfig):
    model_type = "plamo2"


class Plamo3Config(PreTrainedConfig):
    model_type = "plamo3"


def rms(x: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


class Norm(nn.Module):
    """The stored weight is the factor less `offset`."""

    def __init__(self, size: int, eps: float, offset: float) -> None:
        super().__init__()
        self._eps, self._offset = eps, offset
        self.weight = nn.Parameter(torch.full((size,), 1.0 - offset))

    def forward(self, x: Tensor) -> Tensor:
        return rms(x, self._eps) * (self.weight + self._offset)


def rotated(x: Tensor, base: float) -> Tensor:
    """x [heads, tokens, size]."""
    size = x.shape[2]
    frequencies = base ** -(torch.arange(0, size, 2) / size)
    angles = torch.arange(x.shape[1])[:, None] * torch.cat([frequencies, frequencies])
    first, second = x.chunk(2, dim=2)
    return x * angles.cos() + torch.cat([-second, first], dim=2) * angles.sin()


def attended(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """[heads, tokens, size] each -> [tokens, heads * size]; window: the tokens that are seen."""
    places = torch.arange(q.shape[1])
    ago = places[:, None] - places
    hidden = (ago < 0) | (ago >= (window or len(places)))
    scores = (q @ k.mT * q.shape[2] ** -0.5).masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


def linear(ins: int, outs: int) -> nn.Linear:
    return nn.Linear(ins, outs, bias=False)


class ParallelLayer(nn.Module):
    """A layer of PLaMo 1: query head h uses the keys and values h % their number."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        hidden, heads = config.hidden_size, config.num_attention_heads
        size, self._shared = hidden // heads, config.n_shared_head
        self._size, keys = size, heads // self._shared * size
        self.norm = Norm(hidden, config.rms_norm_eps, 0.0)
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        for name, outs in (("q", hidden), ("k", keys), ("v", keys), ("o", hidden)):
            self.self_attn.add_module(f"{name}_proj", linear(hidden, outs))
        inner = config.intermediate_size
        for name, ins, outs in (("gate", hidden, inner), ("up", hidden, inner)):
            self.mlp.add_module(f"{name}_proj", linear(ins, outs))
        self.mlp.down_proj = linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        normed, parts, mlp = self.norm(x), self.self_attn, self.mlp
        q, k, v = (
            project(normed).unflatten(1, (-1, self._size)).transpose(0, 1)
            for project in (parts.q_proj, parts.k_proj, parts.v_proj)
        )
        k, v = (t.repeat(self._shared, 1, 1) for t in (rotated(k, 1e4), v))
        seen = parts.o_proj(attended(rotated(q, 1e4), k, v, None))
        return x + seen + mlp.down_proj(F.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed))


class Attention(nn.Module):
    """window: None for all tokens. own_weights: each head has a norm of its own."""

    def __init__(
        self, config: Any, size: int, *, base: float, window: int | None, own_weights: bool
    ) -> None:
        super().__init__()
        self._sizes = config.num_attention_heads, *2 * [config.num_key_value_heads]
        self._size, self._base, self._window = size, base, window
        self._shared = self._sizes[0] // self._sizes[1]
        self.qkv_proj = linear(config.hidden_size, sum(self._sizes) * size)
        self.o_proj = linear(self._sizes[0] * size, config.hidden_size)
        self._own_weights = own_weights
        if own_weights:
            self.q_weight, self.k_weight = (
                nn.Parameter(torch.ones(heads, size)) for heads in self._sizes[:2]
            )
        else:
            self.q_norm, self.k_norm = (Norm(size, config.rms_norm_eps, 1.0) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.transpose(0, 1)
            for part in self.qkv_proj(x).unflatten(1, (-1, self._size)).split(self._sizes, dim=1)
        )
        if self._own_weights:
            q = rms(q, HEAD_EPS) * self.q_weight[:, None]
            k = rms(k, HEAD_EPS) * self.k_weight[:, None]
        else:
            q, k = self.q_norm(q), self.k_norm(k)
        k, v = (t.repeat_interleave(self._shared, dim=0) for t in (rotated(k, self._base), v))
        return self.o_proj(attended(rotated(q, self._base), k, v, self._window))


class Mamba(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self._eps, hidden = config.rms_norm_eps, config.hidden_size
        heads, size, state = (
            config.mamba_num_heads,
            config.hidden_size_per_head,
            config.mamba_d_state,
        )
        inner, rank = heads * size, max(64, hidden // 16)
        self._heads, self._parts = heads, (state, state, rank)
        self.in_proj = linear(hidden, 2 * inner)
        self.conv1d = nn.Conv1d(inner, inner, config.mamba_d_conv, groups=inner, bias=False)
        self.bcdt_proj = linear(inner, sum(self._parts))
        self.dt_proj = linear(rank, heads)
        self.dt_bias, self.D = nn.Parameter(torch.zeros(heads)), nn.Parameter(torch.ones(heads))
        self.A_log = nn.Parameter(torch.arange(1, heads + 1).float().log())
        self.B_norm_weight, self.C_norm_weight, self.dt_norm_weight = (
            nn.Parameter(torch.ones(size)) for size in self._parts
        )
        self.out_proj = linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        z, x = self.in_proj(x).unflatten(1, (self._heads, -1)).chunk(2, dim=2)
        padded = F.pad(x.flatten(1).mT, (self.conv1d.kernel_size[0] - 1, 0))
        x = F.silu(self.conv1d(padded[None])[0].mT)
        keys, queries, steps = self.bcdt_proj(x).split(self._parts, dim=1)
        keys = rms(keys, self._eps) * self.B_norm_weight
        queries = rms(queries, self._eps) * self.C_norm_weight
        steps = self.dt_proj(rms(steps, self._eps) * self.dt_norm_weight)
        steps, values = F.softplus(steps + self.dt_bias), x.unflatten(1, (self._heads, -1))
        state, rows = values.new_zeros(*values.shape[1:], keys.shape[1]), []
        for value, step, key, query in zip(values, steps, keys, queries, strict=True):
            kept = (-self.A_log.exp() * step).exp()[:, None, None]
            state = kept * state + (step[:, None] * value)[:, :, None] * key
            rows.append(state @ query + self.D[:, None] * value)
        return self.out_proj((torch.stack(rows) * F.silu(z)).flatten(1))


class NormedLayer(nn.Module):
    """A layer of PLaMo 2 or 3."""

    def __init__(self, config: Any, mixer: nn.Module) -> None:
        super().__init__()
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        self.mixer, self.mlp = mixer, nn.Module()
        self.mlp.gate_up_proj, self.mlp.down_proj = linear(hidden, 2 * inner), linear(inner, hidden)
        self.pre_mixer_norm, self.pre_mlp_norm = (Norm(hidden, eps, 1.0) for _ in range(2))
        self.post_mixer_norm = Norm(hidden, eps, 1 / 5)
        self.post_mlp_norm = Norm(hidden, eps, 1 / 5**1.5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.post_mixer_norm(self.mixer(self.pre_mixer_norm(x)))
        gate, up = self.mlp.gate_up_proj(self.pre_mlp_norm(x)).chunk(2, dim=1)
        return x + self.post_mlp_norm(self.mlp.down_proj(F.silu(gate) * up))


def hybrid_layer(config: Any, index: int) -> NormedLayer:
    """A layer of PLaMo 2."""
    step, layers = config.mamba_step, config.num_hidden_layers
    attends = index == layers - 1 if layers <= step // 2 else index % step == step // 2
    if not attends:
        return NormedLayer(config, Mamba(config))
    window = None if index in config.full_attention_idx else config.attention_window_size + 1
    size = config.hidden_size_per_head
    return NormedLayer(config, Attention(config, size, base=1e4, window=window, own_weights=True))


def windowed_layer(config: Any, index: int) -> NormedLayer:
    """A layer of PLaMo 3."""
    far = (index + 1) % config.sliding_window_pattern == 0
    base, window = (config.rope_theta, None) if far else (1e4, config.window_size)
    mixer = Attention(config, config.head_dim, base=base, window=window, own_weights=False)
    return NormedLayer(config, mixer)


class _Plamo(PreTrainedModel):
    """The layers of the models, by the names of the checkpoints."""

    config_class = PreTrainedConfig
    _layer: Any = None
    _norm_offset = 1.0

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        layers = [type(self)._layer(config, index) for index in range(config.num_hidden_layers)]
        self.model, hidden = nn.Module(), config.hidden_size
        self.model.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.model.layers = nn.Module()
        self.model.layers.layers = nn.ModuleList(layers)
        self.model.norm = Norm(hidden, config.rms_norm_eps, self._norm_offset)
        if not config.tie_word_embeddings:
            self.lm_head = linear(hidden, config.vocab_size)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        pass

    def forward(self, input_ids: Tensor, **others: Any) -> CausalLMOutput:
        """input_ids [1, tokens]; computed in float64."""
        self.double()
        x = self.model.embed_tokens(input_ids[0])
        for layer in self.model.layers.layers:
            x = layer(x)
        tied = self.config.tie_word_embeddings
        head = self.model.embed_tokens if tied else self.lm_head
        return CausalLMOutput(logits=F.linear(self.model.norm(x), head.weight)[None])


class PlamoForCausalLM(_Plamo):
    config_class, _layer, _norm_offset = Plamo1Config, ParallelLayer, 0.0


class Plamo2ForCausalLM(_Plamo):
    config_class, _layer = Plamo2Config, staticmethod(hybrid_layer)


class Plamo3ForCausalLM(_Plamo):
    config_class, _layer = Plamo3Config, staticmethod(windowed_layer)


class PlamoMaker:
    from_config = PlamoForCausalLM._from_config


class Plamo2Maker:
    from_config = Plamo2ForCausalLM._from_config


class Plamo3Maker:
    from_config = Plamo3ForCausalLM._from_config
