"""Files whose matrices are divided by factors, which they state beside them as those of llama.cpp
in NVFP4 do."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.gguf_files import matrices, rewrite

_LINEARS = re.compile(
    r"(blk\.\d+\.)?(attn_(q|k|v|output|qkv|gate|q_a|q_b|kv_a_mqa)"
    r"|ffn_(gate|up|down|gate_up)(_shexp|_exps)?|ssm_(in|out|alpha|beta)|output|token_embd)\.weight"
)


def factored(source: Path, target: Path, powers: Sequence[int] = range(-6, 4)) -> Path:
    """A file that means the same to the bit, because factors are powers of two, of these `powers`.

    About a fifth of its matrices keep their numbers and state no factor, and some state the range
    of their inputs, which is not used.
    """
    random, changed = np.random.default_rng(0), {}
    numbers = matrices(source)
    scaled = {name for name in numbers if name.endswith("ffn_down_exps.scale")}  # by Gemma 4
    for name, weights in numbers.items():
        stem = name.removesuffix("weight")
        if not _LINEARS.fullmatch(name) or f"{stem}scale" in scaled or random.random() < 0.2:
            continue
        count = len(weights) if weights.ndim == 3 else 1
        factors = 2.0 ** random.choice(powers, count).astype(np.float32)
        changed[name] = weights / factors.reshape(-1, *[1] * (weights.ndim - 1))
        changed[f"{stem}scale"] = factors
        if random.random() < 0.5:
            changed[f"{stem}input_scale"] = np.full(count, 0.25, np.float32)
    assert len(changed) > 8
    return rewrite(source, target, tensors=changed)
