"""The pooling of an embedding model or reranker, from the files of its sentence transformer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model_zoo.convert.configuration import Configuration, optional_json
from model_zoo.convert.mapping import Key
from model_zoo.gguf.pooling_types import CLS, LAST, MEAN, RANK
from runtime.errors import UnsupportedModelError

# `pooling_type` by the flags of a pooling module; newer modules state a single mode by name.
_FLAG = "pooling_mode_"
_FLAGS = {"mean_tokens": MEAN, "cls_token": CLS, "lasttoken": LAST}
_NAMES = {"mean": MEAN, "cls": CLS, "lasttoken": LAST}
# Folders of further modules, which GGUF files cannot represent.
_OTHERS = ("*_Dense", "*_LayerNorm", "*_WeightedLayerPooling", "*_CNN", "*_LSTM")


def pooling_type(config: Configuration) -> int | None:
    """One of `gguf/pooling_types.py`; None if no module states it.

    UnsupportedModelError for other modes, and for further modules.
    """
    if any(name.endswith("ForSequenceClassification") for name in config.architectures):
        return RANK
    folder = config.path.parent
    for path in (path for pattern in _OTHERS for path in sorted(folder.glob(pattern))):
        raise UnsupportedModelError(f"{path}: is a further module, which files cannot represent.")
    for path in sorted(folder.glob("*_Pooling/config.json")):
        return _mode(path, optional_json(path))
    return None


POOLING = Key("pooling_type", pooling_type)


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
