"""The outcome of an attack."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """`tried`: what the attack did; `bystander`: the measurements of another client, or the
    server's reaction; `held`: whether they are within the limits."""

    name: str
    tried: str
    bystander: str
    held: bool
