"""Our policy with other numbers, and without each of its parts: what they are worth."""

from dataclasses import replace

from bench.simulation.contestants import Make, Ours
from bench.simulation.measure import MANY_INGRESSES, OURS
from bench.simulation.scenarios import Scenario, everything, long_answers, newcomers
from serve_app.routing.policy import Rules

SECONDS = 40
NEVER = 1e9
STAYING = "who waits is never moved"

Contestants = dict[str, tuple[Scenario, Make]]


def variants() -> list[tuple[Scenario, Contestants]]:
    tried = [(each, _contestants(each)) for each in (everything(32, SECONDS), long_answers(16, 40))]
    late = newcomers(200).with_ingresses(MANY_INGRESSES)
    return [*tried, (late, {OURS: (late, _ours()), STAYING: (late, _ours(moves=False))})]


def _contestants(scenario: Scenario) -> Contestants:
    many = scenario.with_ingresses(MANY_INGRESSES)
    rules = {
        "`loyalty` 1: the fastest for this request alone": Rules(loyalty=1),
        "`loyalty` 2": Rules(loyalty=2),
        "`loyalty` 4": Rules(loyalty=4),
        "`loyalty` 8": Rules(loyalty=8),
        "holders are never left": Rules(loyalty=NEVER, patience_s=NEVER),
        "`patience_s` 0": Rules(patience_s=0),
        "`patience_s` 1": Rules(patience_s=1),
        "`samples` 1": Rules(samples=1),
        "`samples` 2": Rules(samples=2),
        "`samples` 8": Rules(samples=8),
        "`holders` 1": Rules(holders=1),
        "`running_tokens` 0": Rules(running_tokens=0),
        "`running_tokens` 128": Rules(running_tokens=128),
        "`settle_s` 0": Rules(settle_s=0, settle_token_s=0),
        "`settle_s` 1": Rules(settle_s=1),
    }
    found: Contestants = {f"{OURS}": (many, _ours())}
    found |= {name: (many, _ours(each)) for name, each in rules.items()}
    late = replace(many, place=replace(many.place, report_every_s=2.0))
    found["reports every 2 s"] = late, _ours()
    found["ingresses know of their own tasks only"] = many, _ours(telling=False)
    found[STAYING] = many, _ours(moves=False)
    return found


def _ours(rules: Rules | None = None, *, telling: bool = True, moves: bool = True) -> Make:
    return lambda _: Ours(MANY_INGRESSES, rules=rules, telling=telling, moves=moves)
