"""What one attack did to a server."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """`tried`: the attack; `bystander`: what another client measured; `held`: within the limits."""

    name: str
    tried: str
    bystander: str
    held: bool
