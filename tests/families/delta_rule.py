"""The reference uses the step-by-step form of the gated delta rule.

`transformers` computes whole prompts in chunks, in float32, which is the least exact form: on the
tiny models its log-probabilities differ by up to 2e-3 from those in float64, while those of its
step-by-step form, and ours, stay close to them."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest

# Where the norm of a head that has seen next to nothing would enlarge what is rounded off.
EPS = 1e-3

# Names of the chunked form and of the other one.
_FORMS = (
    ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
    ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
)


@contextmanager
def step_by_step(*modules: ModuleType) -> Iterator[None]:
    """Models of these modules of `transformers` compute prompts token by token."""
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            for chunks, step in _FORMS:
                if hasattr(module, chunks):
                    patch.setattr(module, chunks, getattr(module, step))
        yield
