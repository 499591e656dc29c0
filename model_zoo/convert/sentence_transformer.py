"""Pooling and further modules of an embedding model or reranker, from the files of its sentence
transformer."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from model_zoo.convert.configuration import Configuration, optional_json
from model_zoo.convert.mapping import LLAMA_CPP, OLLAMA, Key, Rule
from model_zoo.gguf.pooling_types import CLS, LAST, MEAN, RANK
from runtime.errors import UnsupportedModelError

# `pooling_type` by the flags of a pooling module; newer modules state a single mode by name.
_FLAG = "pooling_mode_"
_FLAGS = {"mean_tokens": MEAN, "cls_token": CLS, "lasttoken": LAST}
_NAMES = {"mean": MEAN, "cls": CLS, "lasttoken": LAST}
# Folders of further modules, which GGUF files cannot represent.
_OTHERS = ("*_LayerNorm", "*_WeightedLayerPooling", "*_CNN", "*_LSTM")
_IDENTITY = "torch.nn.modules.linear.Identity"
# Modules with matrices after pooling, and their tensors in files of architectures that have them.
_DENSE = ("2_Dense", "3_Dense")
_DENSE_TENSORS = {LLAMA_CPP: ("dense_2", "dense_3"), OLLAMA: ("dense.0", "dense.1")}


def pooling_type(config: Configuration) -> int | None:
    """One of `gguf/pooling_types.py`; None if no module states it.

    UnsupportedModelError for other modes, and for further modules except matrices.
    """
    if any(name.endswith("ForSequenceClassification") for name in config.architectures):
        return RANK
    folder = config.path.parent
    for path in (path for pattern in _OTHERS for path in sorted(folder.glob(pattern))):
        raise UnsupportedModelError(f"{path}: is a further module, which files cannot represent.")
    for path in sorted(folder.glob("*_Dense/config.json")):
        _refuse_activation(path, optional_json(path))
    for path in sorted(folder.glob("*_Pooling/config.json")):
        return _mode(path, optional_json(path))
    return None


def _features(module: str, which: str) -> Callable[[Configuration], int | None]:
    """A key's source: the number of inputs (`in`) or outputs (`out`) of a matrix after pooling."""

    def source(config: Configuration) -> int | None:
        settings = optional_json(config.path.parent / module / "config.json")
        return None if not settings else int(settings[f"{which}_features"])

    return source


POOLING = Key("pooling_type", pooling_type)
DENSE_KEYS = tuple(
    Key(f"{name}_feat_{which}", _features(module, which), flavours=(LLAMA_CPP,))
    for module, name in zip(_DENSE, _DENSE_TENSORS[LLAMA_CPP], strict=True)
    for which in ("in", "out")
)
DENSE_RULES = tuple(
    Rule(f"{module}.linear.weight", f"{name}.weight", optional=True, flavours=(flavour,))
    for flavour, names in _DENSE_TENSORS.items()
    for module, name in zip(_DENSE, names, strict=True)
)


def _refuse_activation(path: Path, settings: Mapping[str, Any]) -> None:
    activation = settings.get("activation_function")
    if activation != _IDENTITY:
        raise UnsupportedModelError(
            f"{path}: has the activation {str(activation)[:80]}; files cannot represent any."
        )


def _mode(path: Path, settings: Mapping[str, Any]) -> int:
    flags = [name for name, value in settings.items() if name.startswith(_FLAG) and value is True]
    modes = [_FLAGS.get(name.removeprefix(_FLAG)) for name in flags]
    named = settings.get("pooling_mode")
    if named is not None:
        flags, modes = [str(named)], [_NAMES.get(str(named))]
    if len(modes) != 1 or modes[0] is None:
        raise UnsupportedModelError(
            f"{path}: pools by {', '.join(flags)[:80] or 'nothing'}; model files support mean, "
            "cls and lasttoken."
        )
    return modes[0]
