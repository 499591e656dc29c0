"""The step by step form of the gated delta rule as the reference.

`transformers` computes whole prompts in chunks, in float32, and that form is the least exact one:
on the tiny models its log-probabilities are up to 2e-3 from those in float64, while those of its
own step by step form, and ours, stay near them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest

# Where the norm of a head that has seen next to nothing would enlarge what is rounded off.
EPS = 1e-3


@contextmanager
def step_by_step(*modules: ModuleType) -> Iterator[None]:
    """Models of these modules of `transformers` compute prompts token by token."""
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            step = module.torch_recurrent_gated_delta_rule
            patch.setattr(module, "torch_chunk_gated_delta_rule", step)
        yield
