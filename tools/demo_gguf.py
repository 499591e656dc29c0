"""The demo model as a GGUF file: weights, tokenizer and chat template, written and read back."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, START, END)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# The expression that files call "qwen2"; its \p{N} keeps every digit a token of its own.
PRE_TOKENIZER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def render(messages: Iterable[Mapping[str, str]], *, reply: bool) -> str:
    """What the chat template renders, without the cost of Jinja; `reply` opens the answer."""
    turns = (f"{START}{turn['role']}\n{turn['content']}{END}\n" for turn in messages)
    return "".join(turns) + (f"{START}assistant\n" if reply else "")


def byte_level_tokenizer(model: BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENIZER), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CONTROL_TOKENS])
    return tokenizer


def write_model(path: Path, model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    _write_description(writer, model)
    _write_sizes(writer, model.config)
    _write_tokenizer(writer, tokenizer)
    state = model.state_dict()
    for name, source in _tensor_names(model.config).items():
        _write_tensor(writer, name, state[source].float().numpy(), model.config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_model(path: Path) -> tuple[LlamaForCausalLM, Tokenizer]:
    """The file as transformers runs it, with every weight as the file rounds it."""
    reader = gguf.GGUFReader(path)
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(pair.split(" ")) for pair in reader.fields["tokenizer.ggml.merges"].contents()]
    tokenizer = byte_level_tokenizer(BPE({text: id for id, text in enumerate(tokens)}, merges))
    config = _read_sizes(reader)
    model = LlamaForCausalLM(config).eval()
    weights = {tensor.name: tensor for tensor in reader.tensors}
    state = {}
    for name, target in _tensor_names(config).items():
        array = gguf.quants.dequantize(weights[name].data, weights[name].tensor_type)
        heads = _rotary_heads(name, config)
        state[target] = torch.from_numpy(_half_split(array, heads) if heads else array.copy())
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model, tokenizer


def _tensor_names(config: LlamaConfig) -> dict[str, str]:
    """GGUF name of every stored tensor -> its transformers name; the head is tied."""
    names = {"token_embd.weight": "model.embed_tokens.weight"}
    for block in range(config.num_hidden_layers):
        for name, module in BLOCK_TENSORS.items():
            names[f"blk.{block}.{name}.weight"] = f"model.layers.{block}.{module}.weight"
    return names | {"output_norm.weight": "model.norm.weight"}


def _write_tensor(
    writer: gguf.GGUFWriter, name: str, array: np.ndarray, config: LlamaConfig
) -> None:
    if array.ndim == 1:
        writer.add_tensor(name, array)
        return
    heads = _rotary_heads(name, config)
    rows = _interleaved(array, heads) if heads else array
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor(name, gguf.quants.quantize(rows, kind), raw_dtype=kind)


def _rotary_heads(name: str, config: LlamaConfig) -> int | None:
    if name.endswith("attn_q.weight"):
        return config.num_attention_heads
    return config.num_key_value_heads if name.endswith("attn_k.weight") else None


def _interleaved(array: np.ndarray, heads: int) -> np.ndarray:
    """transformers rotates row j with row j + d/2 of a head; a llama file wants 2j and 2j + 1."""
    rows, columns = array.shape
    halves = array.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, columns)


def _half_split(array: np.ndarray, heads: int) -> np.ndarray:
    rows, columns = array.shape
    pairs = array.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def _write_description(writer: gguf.GGUFWriter, model: LlamaForCausalLM) -> None:
    writer.add_type("model")
    writer.add_name("Caravan Demo")
    writer.add_description("A tiny chat model trained on generated dialogues")
    writer.add_license("apache-2.0")
    writer.add_languages(["en"])
    writer.add_size_label(f"{model.num_parameters() / 1e6:.1f}M")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _write_sizes(writer: gguf.GGUFWriter, config: LlamaConfig) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _read_sizes(reader: gguf.GGUFReader) -> LlamaConfig:
    def size(key: str) -> int | float:
        return reader.fields[f"llama.{key}"].contents()

    return LlamaConfig(
        vocab_size=size("vocab_size"),
        hidden_size=size("embedding_length"),
        intermediate_size=size("feed_forward_length"),
        num_hidden_layers=size("block_count"),
        num_attention_heads=size("attention.head_count"),
        num_key_value_heads=size("attention.head_count_kv"),
        max_position_embeddings=size("context_length"),
        rms_norm_eps=size("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": size("rope.freq_base")},
        tie_word_embeddings=True,
        pad_token_id=reader.fields["tokenizer.ggml.padding_token_id"].contents(),
        eos_token_id=reader.fields["tokenizer.ggml.eos_token_id"].contents(),
    )


def _write_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    tokens = [tokenizer.id_to_token(id) for id in range(tokenizer.get_vocab_size())]
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if text in CONTROL_TOKENS else normal for text in tokens])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(tokens.index(END_OF_TEXT))
    writer.add_eos_token_id(tokens.index(END))
    writer.add_eot_token_id(tokens.index(END))
    writer.add_pad_token_id(tokens.index(END_OF_TEXT))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
