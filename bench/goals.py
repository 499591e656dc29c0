"""The goals for the ratios to llama.cpp."""

# Block type -> prefill, decode of one sequence, decode of several.
_GOALS = {
    **dict.fromkeys(("Q4_0", "Q4_K", "Q4_K_M"), (1.3, 1.0, 1.2)),
    **dict.fromkeys(("Q5_K", "Q6_K"), (1.2, 1.0, 1.1)),
    "Q8_0": (1.8, 1.0, 1.5),
    **dict.fromkeys(("F16", "BF16"), (1.5, 1.0, 1.2)),
    **dict.fromkeys(("IQ4_XS", "MXFP4", "MoE Q4_K"), (1.0, 1.0, 1.0)),
}


def goal(model: str, task: str) -> float:
    """The least ratio to llama.cpp of a row."""
    prefill, one, several = _GOALS[model]
    if task.startswith("prefill"):
        return prefill
    return one if task.startswith("decode, 1 sequence") else several
