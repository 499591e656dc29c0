"""The model families: one line for each folder in `model_zoo/models`."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class Ranking:
    """How the rerankers of a family compute a score.

    pooling: the state that it is computed from unless the file states another: of the first token
    ("cls"), of the last one ("last"), or the mean of all ("mean").
    last: name of the last matrix of the head, by which files are recognised that state no pooling.
    curve: after the matrix `cls` before it, if the file has it: "tanh" or "gelu".
    eps: of the norm `cls.norm`, if the file states none.
    """

    pooling: str
    last: str = "cls.output"
    curve: str = "tanh"
    eps: float = 1e-5


@dataclass(frozen=True, slots=True)
class Family:
    """A folder in `model_zoo/models`, and the names by which model files refer to it.

    architectures: values of `general.architecture` that its `text.py` runs.
    projectors: what its `multimodal.py` runs: types of projector files, and architectures of files
    that contain their vision model.
    vision_of: architectures of the text models that its vision model works with.
    pre_tokenizer: the row of `tokenizers/pretokenizers.py` for files that state `default`, which
    converters write for unknown vocabularies.
    space_prefix: a value of `tokenizers/prefix_space.py`, for SentencePiece files without the key.
    scored_tokens: old files give user-defined tokens the type of ordinary ones; their scores
    identify them.
    unscored_tokens: SentencePiece files may state no scores; tokens are in the order of merges.
    encoders: as `architectures`, of models that only embed.
    tensor_parallel: whether ranks can divide its text model (`parallel.tensor`); layers of every
    text model can be placed on several devices.
    ranking: None if it has no rerankers.
    """

    folder: str
    architectures: tuple[str, ...] = ()
    projectors: tuple[str, ...] = ()
    vision_of: tuple[str, ...] = ()
    pre_tokenizer: str = "default"
    space_prefix: str = "words"
    scored_tokens: bool = False
    unscored_tokens: bool = False
    encoders: tuple[str, ...] = ()
    tensor_parallel: bool = True
    ranking: Ranking | None = None

    @property
    def text(self) -> str:
        """Module with `build_decoder`; imported when a file needs it."""
        return f"model_zoo.models.{self.folder}.text"

    @property
    def multimodal(self) -> str:
        """Module with `build_multimodal`; imported when a file needs it."""
        return f"model_zoo.models.{self.folder}.multimodal"


_DEEPSEEKOCR, _OCR_PROJECTORS = ("deepseek2-ocr", "deepseekocr"), ("deepseekocr", "deepseekocr2")
_GEMMA4 = ("gemma4", "gemma4v", "gemma4uv")
_INTERNVL = ("gpt-oss", "internlm2", "llama", "phi3", "qwen2", "qwen3", "qwen3moe")
_LLAVA = ("granite", "llama", "phi2", "phi3", "qwen2", "qwen3")
_MINICPMV = ("llama", "minicpm", "qwen2", "qwen3")
_MODERN_BERT = Ranking("mean", curve="gelu")  # llama.cpp's converter does not state what is pooled
_MUSE = ("muse-glimmer",)
_PIXTRAL, _OF_PIXTRAL = ("mistral3", "pixtral"), ("mistral3", "mistral4", "llama")
_QWEN25VL = ("qwen25vl", "qwen2vl")
_QWEN3VL = ("qwen3vl", "qwen3vlmoe")
_QWEN35 = ("qwen35", "qwen35moe")
_QWEN3VL_VISION = (*_QWEN3VL, *_QWEN35)

_GEMMA: Mapping[str, Any] = {"space_prefix": "never", "scored_tokens": True}

FAMILIES: tuple[Family, ...] = (
    Family("afmoe", ("afmoe",), pre_tokenizer="afmoe"),
    Family("apertus", ("apertus",), pre_tokenizer="tekken"),
    Family("arcee", ("arcee",), pre_tokenizer="llama-bpe"),
    Family("bert", encoders=("bert",), ranking=Ranking("cls")),
    Family("bailingmoe", ("bailingmoe",), pre_tokenizer="bailingmoe"),
    Family("bailingmoe2", ("bailingmoe2",), pre_tokenizer="bailingmoe2"),
    Family("bitnet", ("bitnet",), pre_tokenizer="llama-bpe", tensor_parallel=False),
    Family("bloom", ("bloom",), pre_tokenizer="bloom"),
    Family("command_r", ("command-r", "cohere2"), pre_tokenizer="command-r"),
    Family("command_r", ("cohere2moe",), pre_tokenizer="cohere2moe"),
    Family("dbrx", ("dbrx",), pre_tokenizer="dbrx"),
    Family("deci", ("deci",), pre_tokenizer="llama-bpe"),
    Family("deepseek", ("deepseek",), pre_tokenizer="deepseek-llm"),
    Family("deepseek2", ("deepseek2",), pre_tokenizer="deepseek-llm"),
    Family("deepseek2", ("deepseek32",), pre_tokenizer="deepseek-v3"),
    Family("deepseek2", ("glm-dsa", "glm4moelite"), pre_tokenizer="glm4"),
    Family("deepseek2", ("mistral4",), pre_tokenizer="tekken"),
    Family("deepseekocr", _DEEPSEEKOCR, _OCR_PROJECTORS, _DEEPSEEKOCR, "deepseek-v3"),
    Family("dots1", ("dots1",), pre_tokenizer="qwen2"),
    Family("dots_ocr", (), ("dots_ocr",), ("qwen2",)),
    Family("ernie4_5", ("ernie4_5", "ernie4_5-moe")),
    Family("exaone", ("exaone",), pre_tokenizer="exaone"),
    Family("eurobert", encoders=("eurobert",), pre_tokenizer="llama-bpe"),
    Family("exaone4", ("exaone4",), pre_tokenizer="exaone4"),
    Family("falcon", ("falcon",), pre_tokenizer="falcon"),
    Family("exaone_moe", ("exaone-moe",), pre_tokenizer="exaone-moe"),
    Family("falcon_h1", ("falcon-h1",), pre_tokenizer="falcon-h1"),
    Family("gemma", ("gemma",), **_GEMMA),
    Family("gemma2", ("gemma2",), **_GEMMA),
    Family(
        "gemma3", ("gemma3",), ("gemma3",), ("gemma3",), encoders=("gemma-embedding",), **_GEMMA
    ),
    Family("gemma3n", ("gemma3n",), tensor_parallel=False, **_GEMMA),
    Family("gemma4", ("gemma4",), _GEMMA4, ("gemma4",), space_prefix="never"),
    Family("glm4", ("glm4", "glmocr", "chatglm"), pre_tokenizer="glm4"),
    Family("glm4moe", ("glm4moe",), pre_tokenizer="glm4"),
    Family("glm4v", (), ("glm4v", "glmocr"), ("glm4", "glm4moe")),
    Family("gpt2", ("gpt2",), pre_tokenizer="gpt-2"),
    Family("gpt2", ("starcoder",), pre_tokenizer="starcoder"),
    Family("gptneox", ("gptneox",), pre_tokenizer="olmo"),
    Family("gptoss", ("gpt-oss", "gptoss"), pre_tokenizer="gpt-4o"),
    Family("granite", ("granite", "granitemoe")),
    Family("granite", ("granitehybrid", "granite_swa"), pre_tokenizer="dbrx"),
    Family("grovemoe", ("grovemoe",), pre_tokenizer="qwen2"),
    Family("hy_v3", ("hy_v3", "hy-v3"), pre_tokenizer="hunyuan-dense"),
    Family("hunyuan", ("hunyuan-dense",), pre_tokenizer="hunyuan-dense"),
    Family("hunyuan", ("hunyuan-moe",), pre_tokenizer="hunyuan"),
    Family("hunyuan", ("maincoder",), pre_tokenizer="qwen2"),
    Family("hunyuan", ("hunyuan_vl",), ("hunyuanvl",), ("hunyuan_vl",), "hunyuan-dense"),
    Family("idefics3", (), ("idefics3",), ("llama",)),
    Family("internvl", (), ("internvl",), _INTERNVL),
    Family("kimivl", (), ("kimivl", "kimik25"), ("deepseek2",)),
    Family("laguna", ("laguna",), pre_tokenizer="laguna"),
    Family("lfm2", ("lfm2", "lfm2moe"), ("lfm2",), ("lfm2",), "lfm2"),
    Family(
        "llama",
        ("llama", "internlm2", "baichuan"),
        encoders=("llama-embed",),
        pre_tokenizer="llama-bpe",
    ),
    Family("llama", ("refact",), pre_tokenizer="refact"),
    Family("llama", ("xverse",), unscored_tokens=True),
    Family("jais", ("jais",), pre_tokenizer="jais"),
    Family("jais2", ("jais2",), pre_tokenizer="jais-2"),
    Family(
        "jina_bert_v2",
        encoders=("jina-bert-v2",),
        tensor_parallel=False,
        ranking=Ranking("cls", last="cls"),
    ),
    Family("jamba", ("jamba",)),
    Family("jina_bert_v3", encoders=("jina-bert-v3",)),
    Family("kimi_linear", ("kimi-linear",), pre_tokenizer="kimi-k2"),
    Family("llama4", ("llama4",), ("llama4",), ("llama4",), "llama4"),
    Family("llava", (), ("mlp",), _LLAVA),
    Family("minicpm", ("minicpm", "minicpm3")),
    Family("minicpmv", (), ("resampler",), _MINICPMV),
    Family("minicpmv", (), ("minicpmv4_6",), ("qwen35",)),
    Family("mamba", ("mamba",), pre_tokenizer="olmo"),
    Family("mamba2", ("mamba2",)),
    Family("mellum", ("mellum",), pre_tokenizer="mellum2"),
    Family("mimo2", ("mimo2",), pre_tokenizer="qwen2"),
    Family("minimax_m2", ("minimax-m2",), pre_tokenizer="minimax-m2", tensor_parallel=False),
    Family("minimax_m3", ("minimax-m3",), ("minimax_m3",), ("minimax-m3",), "minimax-m2"),
    Family("mistral3", ("mistral3",), _PIXTRAL, _OF_PIXTRAL, "tekken"),
    Family("mistral3", (), ("lightonocr",), ("qwen3",)),
    Family("mllama", ("mllama",), ("mllama",), ("mllama",), "llama-bpe"),
    Family("mpt", ("mpt",), pre_tokenizer="mpt"),
    Family("muse_glimmer", _MUSE, _MUSE, _MUSE, "llama4"),
    Family("nemotron", ("nemotron",)),
    Family(
        "modern_bert",
        encoders=("modern-bert",),
        pre_tokenizer="modern-bert",
        ranking=_MODERN_BERT,
    ),
    Family(
        "nemotron_h",
        ("nemotron_h", "nemotron_h_moe", "nemotron_h_omni"),
        pre_tokenizer="pixtral",
    ),
    Family("nomic_bert", encoders=("nomic-bert", "nomic-bert-moe")),
    Family("olmo", ("olmo",), pre_tokenizer="olmo"),
    Family("olmo2", ("olmo2", "olmo3"), pre_tokenizer="dbrx", tensor_parallel=False),
    Family("olmoe", ("olmoe",), tensor_parallel=False),
    Family("paddleocr", ("paddleocr",), ("paddleocr",), ("paddleocr",)),
    Family("phi2", ("phi2",), pre_tokenizer="phi-2"),
    Family("phi3", ("phi3",), space_prefix="every piece"),
    Family("phimoe", ("phimoe",), space_prefix="every piece"),
    Family("plamo", ("plamo", "plamo2", "plamo3")),
    Family("plm", ("plm",), pre_tokenizer="qwen2"),
    Family("qwen2", ("qwen", "qwen2"), pre_tokenizer="qwen2"),
    Family("qwen2", ("pangu-embedded",)),
    Family("qwen2moe", ("qwen2moe",), pre_tokenizer="qwen2"),
    Family("qwen25vl", _QWEN25VL, ("qwen25vl", "qwen2.5vl_merger"), _QWEN25VL, "qwen2"),
    Family("qwen25vl", (), ("exaone4_5",), ("exaone4",)),
    Family("qwen3", ("qwen3",), pre_tokenizer="qwen2", ranking=Ranking("last")),
    Family("qwen3", ("openelm",)),
    Family("qwen3moe", ("qwen3moe",), pre_tokenizer="qwen2"),
    Family("qwen3next", ("qwen3next",), pre_tokenizer="qwen2"),
    Family("qwen3next", _QWEN35, pre_tokenizer="qwen35"),
    Family("qwen4exp", ("qwen4exp",), pre_tokenizer="qwen35"),
    Family(
        "qwen3vl",
        _QWEN3VL,
        (*_QWEN3VL_VISION, "qwen3vl_merger"),
        _QWEN3VL_VISION,
        "qwen2",
        ranking=Ranking("last"),
    ),
    Family("rwkv7", ("rwkv7",)),
    Family("seed_oss", ("seed_oss",), pre_tokenizer="seed-coder"),
    Family("smallthinker", ("smallthinker",), pre_tokenizer="qwen2"),
    Family("smollm3", ("smollm3",), pre_tokenizer="smaug-bpe"),
    Family("stablelm", ("stablelm", "orion")),
    Family("step3vl", (), ("step3vl",), ("qwen3", "step35")),
    Family("step35", ("step35",), pre_tokenizer="deepseek-v3"),
    Family("starcoder2", ("starcoder2",), pre_tokenizer="starcoder"),
    Family("starcoder2", ("codeshell",), pre_tokenizer="codeshell"),
)


# `general.architecture` -> the family with its text model.
TEXT_FAMILIES: Mapping[str, Family] = MappingProxyType(
    {name: family for family in FAMILIES for name in (*family.architectures, *family.encoders)}
)


def family_or_defaults(architecture: str) -> Family:
    """The family with the text model; for an unknown architecture, one with all defaults."""
    return TEXT_FAMILIES.get(architecture, Family(""))


def only_embeds(architecture: str) -> bool:
    """Whether models of the architecture are encoders, which do not generate."""
    return architecture in family_or_defaults(architecture).encoders


# The type of a projector file, or the architecture of a file with both models -> the family with
# its vision model.
VISION_FAMILIES: Mapping[str, Family] = MappingProxyType(
    {name: family for family in FAMILIES for name in family.projectors}
)
