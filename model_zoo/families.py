"""Which code runs which files, and which tables make files of which checkpoints: all by name."""

from collections.abc import Mapping
from types import MappingProxyType

from model_zoo.eyes.loading import EyeFamily

# `general.architecture` -> "module:function"; the module is imported when a file needs it.
ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "bert": "model_zoo.architectures.bert:build_decoder",
        "gemma2": "model_zoo.architectures.gemma2:build_decoder",
        "gemma3": "model_zoo.architectures.gemma3:build_decoder",
        "gemma3n": "model_zoo.architectures.gemma3n:build_decoder",
        "gemma4": "model_zoo.architectures.gemma4:build_decoder",
        "gpt-oss": "model_zoo.architectures.gptoss:build_decoder",
        "gptoss": "model_zoo.architectures.gptoss:build_decoder",
        "llama": "model_zoo.architectures.llama:build_decoder",
        "llama4": "model_zoo.architectures.llama4:build_decoder",
        "mllama": "model_zoo.architectures.mllama:build_decoder",
        "mistral3": "model_zoo.architectures.mistral3:build_decoder",
        "nomic-bert": "model_zoo.architectures.nomic_bert:build_decoder",
        "phi3": "model_zoo.architectures.phi3:build_decoder",
        "qwen2": "model_zoo.architectures.qwen2:build_decoder",
        "qwen25vl": "model_zoo.architectures.qwen25vl:build_decoder",
        "qwen2vl": "model_zoo.architectures.qwen25vl:build_decoder",
        "qwen3": "model_zoo.architectures.qwen3:build_decoder",
        "qwen35": "model_zoo.architectures.qwen3next:build_decoder",
        "qwen35moe": "model_zoo.architectures.qwen3next:build_decoder",
        "qwen3moe": "model_zoo.architectures.qwen3moe:build_decoder",
        "qwen3next": "model_zoo.architectures.qwen3next:build_decoder",
        "qwen3vl": "model_zoo.architectures.qwen3vl:build_decoder",
        "qwen3vlmoe": "model_zoo.architectures.qwen3vl:build_decoder",
    }
)

# Names in the `architectures` of a config.json -> "module:TABLE" that makes GGUF of it.
CONVERSIONS: Mapping[str, str] = MappingProxyType(
    {
        "BertForMaskedLM": "model_zoo.architectures.bert:CONVERSION",
        "BertModel": "model_zoo.architectures.bert:CONVERSION",
        "Gemma2ForCausalLM": "model_zoo.architectures.gemma2:CONVERSION",
        "Gemma3ForCausalLM": "model_zoo.architectures.gemma3:CONVERSION",
        "Gemma3ForConditionalGeneration": "model_zoo.architectures.gemma3:CONVERSION",
        "Gemma3nForCausalLM": "model_zoo.architectures.gemma3n:CONVERSION",
        "Gemma3nForConditionalGeneration": "model_zoo.architectures.gemma3n:CONVERSION",
        "Gemma4ForCausalLM": "model_zoo.architectures.gemma4:CONVERSION",
        "Gemma4ForConditionalGeneration": "model_zoo.architectures.gemma4:CONVERSION",
        "Gemma4UnifiedForCausalLM": "model_zoo.architectures.gemma4:UNIFIED",
        "Gemma4UnifiedForConditionalGeneration": "model_zoo.architectures.gemma4:UNIFIED",
        "GptOssForCausalLM": "model_zoo.architectures.gptoss:CONVERSION",
        "Llama4ForCausalLM": "model_zoo.architectures.llama4:CONVERSION",
        "Llama4ForConditionalGeneration": "model_zoo.architectures.llama4:CONVERSION",
        "LlamaForCausalLM": "model_zoo.architectures.llama:CONVERSION",
        "Ministral3ForCausalLM": "model_zoo.architectures.mistral3:CONVERSION",
        "Mistral3ForConditionalGeneration": "model_zoo.architectures.mistral3:CONVERSION",
        "MistralForCausalLM": "model_zoo.architectures.llama:CONVERSION",
        "MixtralForCausalLM": "model_zoo.architectures.llama:MIXTRAL",
        "MllamaForCausalLM": "model_zoo.architectures.mllama:CONVERSION",
        "MllamaForConditionalGeneration": "model_zoo.architectures.mllama:CONVERSION",
        "NomicBertModel": "model_zoo.architectures.nomic_bert:CONVERSION",
        "Phi3ForCausalLM": "model_zoo.architectures.phi3:CONVERSION",
        "Qwen2ForCausalLM": "model_zoo.architectures.qwen2:CONVERSION",
        "Qwen2_5_VLForConditionalGeneration": "model_zoo.architectures.qwen25vl:CONVERSION",
        "Qwen3ForCausalLM": "model_zoo.architectures.qwen3:CONVERSION",
        "Qwen3MoeForCausalLM": "model_zoo.architectures.qwen3moe:CONVERSION",
        "Qwen3NextForCausalLM": "model_zoo.architectures.qwen3next:CONVERSION",
        "Qwen3VLForConditionalGeneration": "model_zoo.architectures.qwen3vl:CONVERSION",
        "Qwen3VLMoeForConditionalGeneration": "model_zoo.architectures.qwen3vl:WITH_EXPERTS",
        "Qwen3_5ForCausalLM": "model_zoo.architectures.qwen3next:QWEN35",
        "Qwen3_5ForConditionalGeneration": "model_zoo.architectures.qwen3next:QWEN35",
        "Qwen3_5MoeForCausalLM": "model_zoo.architectures.qwen3next:QWEN35_MOE",
        "Qwen3_5MoeForConditionalGeneration": "model_zoo.architectures.qwen3next:QWEN35_MOE",
    }
)

# Of models put together from another family's text model: its `model_type` -> a name above.
TEXT_PARTS: Mapping[str, str] = MappingProxyType(
    {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "phi3": "Phi3ForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
    }
)
# The same names -> the table for the part that sees, where there is one.
VISION_CONVERSIONS: Mapping[str, str] = MappingProxyType(
    {
        "Gemma3ForConditionalGeneration": "model_zoo.towers.gemma3:VISION",
        "Gemma4ForConditionalGeneration": "model_zoo.towers.gemma4:VISION",
        "Idefics3ForConditionalGeneration": "model_zoo.towers.idefics3:VISION",
        "InternVLForConditionalGeneration": "model_zoo.towers.internvl:VISION",
        "Llama4ForConditionalGeneration": "model_zoo.towers.llama4:VISION",
        "LlavaForConditionalGeneration": "model_zoo.towers.llava:VISION",
        "LlavaNextForConditionalGeneration": "model_zoo.towers.llava_next:VISION",
        "Mistral3ForConditionalGeneration": "model_zoo.towers.mistral3:VISION",
        "MllamaForConditionalGeneration": "model_zoo.towers.mllama:VISION",
        "Qwen2_5_VLForConditionalGeneration": "model_zoo.towers.qwen25vl:VISION",
        "Qwen3VLForConditionalGeneration": "model_zoo.towers.qwen3vl:VISION",
        "Qwen3VLMoeForConditionalGeneration": "model_zoo.towers.qwen3vl:VISION_OF_EXPERTS",
        "SmolVLMForConditionalGeneration": "model_zoo.towers.idefics3:VISION",
    }
)

_GEMMA3 = EyeFamily(("gemma3",), "model_zoo.eyes.gemma3:build_eyes")
_GEMMA4 = EyeFamily(("gemma4",), "model_zoo.eyes.gemma4:build_eyes")
_IDEFICS3 = EyeFamily(("llama",), "model_zoo.eyes.idefics3:build_eyes")
_INTERNVL = EyeFamily(("qwen2", "qwen3", "qwen3moe", "llama"), "model_zoo.eyes.internvl:build_eyes")
_LLAMA4 = EyeFamily(("llama4",), "model_zoo.eyes.llama4:build_eyes")
_LLAVA = EyeFamily(("llama", "phi3", "qwen2", "qwen3"), "model_zoo.eyes.llava:build_eyes")
_MLLAMA = EyeFamily(("mllama",), "model_zoo.eyes.mllama:build_eyes")
_PIXTRAL = EyeFamily(("mistral3", "llama"), "model_zoo.eyes.mistral3:build_eyes")
_QWEN25 = EyeFamily(("qwen25vl", "qwen2vl"), "model_zoo.eyes.qwen25vl:build_eyes")
_QWEN3 = EyeFamily(("qwen3vl", "qwen3vlmoe"), "model_zoo.eyes.qwen3vl:build_eyes")
# The type that a projector states, or the architecture of a file with all in one.
EYES: Mapping[str, EyeFamily] = MappingProxyType(
    {
        "gemma3": _GEMMA3,
        "gemma4": _GEMMA4,
        "gemma4v": _GEMMA4,
        "idefics3": _IDEFICS3,
        "internvl": _INTERNVL,
        "llama4": _LLAMA4,
        "mistral3": _PIXTRAL,
        "mllama": _MLLAMA,
        "mlp": _LLAVA,
        "pixtral": _PIXTRAL,
        "qwen2.5vl_merger": _QWEN25,
        "qwen25vl": _QWEN25,
        "qwen3vl": _QWEN3,
        "qwen3vl_merger": _QWEN3,
        "qwen3vlmoe": _QWEN3,
    }
)
