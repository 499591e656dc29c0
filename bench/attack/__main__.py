"""`python -m bench.attack [URL]`: attacks a server on loopback, and prints a line for each attempt.

Without a URL, `caravan serve` runs twice with configurations of this program: without API keys, and
with API keys and management. With a URL, the server there is attacked in the ways that need neither
its files nor keys. The exit status is 1 if an attack had an effect beyond the limits ("NOT HELD").
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

from bench.attack import bodies, connections, host, models, pages, tenants
from bench.attack.outcome import Outcome
from bench.attack.target import Keys, Target, serving

Attack = Callable[[Target], Awaitable[Iterable[Outcome]]]


OPEN: tuple[Attack, ...] = (host.attack, pages.attack, connections.attack, bodies.attack)
KEYED: tuple[Attack, ...] = (tenants.attack, models.attack, host.attack)


def main(arguments: list[str]) -> int:
    runs: list[tuple[AbstractContextManager[Target], tuple[Attack, ...]]]
    if arguments:
        runs = [(nullcontext(Target(arguments[0].rstrip("/"))), OPEN)]
    else:
        runs = [(serving(None), OPEN), (serving(Keys()), KEYED)]
    outcomes: list[Outcome] = []
    for context, attacks in runs:
        with context as target:
            for attack in attacks:
                outcomes += asyncio.run(_run_attack(attack, target))
    failed = [outcome.name for outcome in outcomes if not outcome.held]
    print(f"attack: {len(outcomes) - len(failed)} of {len(outcomes)} held")
    for name in failed:
        print(f"attack: NOT HELD: {name}")
    return 1 if failed or not outcomes else 0


async def _run_attack(attack: Attack, target: Target) -> list[Outcome]:
    """Runs an attack and prints its outcomes. An attack that raises, because the server does not
    answer as expected, counts as not held."""
    try:
        outcomes = list(await attack(target))
    except Exception as error:
        name = attack.__module__.rpartition(".")[2]
        outcomes = [
            Outcome(name, "all attacks of this kind", f"{type(error).__name__}: {error}", False)
        ]
    for outcome in outcomes:
        verdict = "held" if outcome.held else "NOT HELD"
        print(f"{verdict}: {outcome.name}: {outcome.tried}: {outcome.bystander}", flush=True)
    return outcomes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
