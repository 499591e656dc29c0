"""Our policy with other parameters and without some of its parts."""

from dataclasses import replace

from bench.simulation.contestants import Make, Ours
from bench.simulation.measure import MANY_INGRESSES, OURS
from bench.simulation.scenarios import Scenario, everything, late_replicas, long_answers
from serve_app.routing.policy import PolicyRules

SECONDS = 40
NEVER = 1e9
STAYING = "queued requests are never moved"

Contestants = dict[str, tuple[Scenario, Make]]


def variants() -> list[tuple[Scenario, Contestants]]:
    """The last scenario is that of `moving_and_staying`."""
    tried = [(each, _contestants(each)) for each in (everything(32, SECONDS), long_answers(16, 40))]
    late, makes = moving_and_staying()
    return [*tried, (late, {name: (late, make) for name, make in makes.items()})]


def moving_and_staying() -> tuple[Scenario, dict[str, Make]]:
    """A scenario in which it matters that queued requests move, and both policies."""
    late = late_replicas(200).with_ingresses(MANY_INGRESSES)
    return late, {OURS: _ours(), STAYING: _ours(moves=False)}


def _contestants(scenario: Scenario) -> Contestants:
    many = scenario.with_ingresses(MANY_INGRESSES)
    held = PolicyRules(recompute_weight=NEVER, patience_s=NEVER)
    rules = {
        **{f"`recompute_weight` {n}": PolicyRules(recompute_weight=n) for n in (1, 2, 4, 8)},
        "a holder of the prefix is always chosen": held,
        "`patience_s` 0": PolicyRules(patience_s=0),
        "`patience_s` 1": PolicyRules(patience_s=1),
        "`samples` 1": PolicyRules(samples=1),
        "`samples` 2": PolicyRules(samples=2),
        "`samples` 8": PolicyRules(samples=8),
        "`holders` 1": PolicyRules(holders=1),
        "`running_tokens` 0": PolicyRules(running_tokens=0),
        "`running_tokens` 128": PolicyRules(running_tokens=128),
        "`report_lag_s` 0": PolicyRules(report_lag_s=0, report_lag_token_s=0),
        "`report_lag_s` 1": PolicyRules(report_lag_s=1),
    }
    found: Contestants = {f"{OURS}": (many, _ours())}
    found |= {name: (many, _ours(each)) for name, each in rules.items()}
    late = replace(many, cluster=replace(many.cluster, report_every_s=2.0))
    found["reports every 2 s"] = late, _ours()
    found["ingresses know only their own requests"] = many, _ours(share_prompts=False)
    found[STAYING] = many, _ours(moves=False)
    return found


def _ours(
    rules: PolicyRules | None = None, *, share_prompts: bool = True, moves: bool = True
) -> Make:
    return lambda _: Ours(MANY_INGRESSES, rules=rules, share_prompts=share_prompts, moves=moves)
