"""Routes from logits to experts: the kernel and its twin against plain torch and each other."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runtime.kernels.routing import Routing, Scores, routing_twin
from tests.kernels.native_kernels import require_native_kernels

Router = Callable[[Routing, Tensor, int], tuple[Tensor, Tensor]]
both = pytest.mark.parametrize("routed", [Routing.__call__, routing_twin])

OF_ALL, OF_CHOSEN = Routing(Scores.SOFTMAX), Routing(Scores.SOFTMAX_OF_CHOSEN)
SIGMOIDS = Routing(Scores.SIGMOID)
RULES = {
    "softmax of all": OF_ALL,
    "softmax of chosen": OF_CHOSEN,
    "sigmoids": SIGMOIDS,
    "renormalised": Routing(Scores.SOFTMAX, renormalised=True, scale=2.5),
    "groups by best": Routing(Scores.SOFTMAX, groups=4, used_groups=2, scale=16.0),
    "groups by two": Routing(
        Scores.SIGMOID, groups=4, used_groups=3, group_pairs=True, renormalised=True, scale=2.5
    ),
    "softmax of near ones": Routing(Scores.SOFTMAX_OF_NEAR, near=0.3),
    "groups of one": Routing(Scores.SIGMOID, groups=128, used_groups=100, group_pairs=True),
}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def random_logits(tokens: int, experts: int) -> Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(6)) * 3


def divided(rule: Routing, experts: int) -> Routing:
    """With groups that divide the experts."""
    return rule if experts % rule.groups == 0 else replace(rule, groups=1, used_groups=1)


@every_rule
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("experts, used", [(1, 1), (7, 3), (128, 8), (128, 50), (300, 300)])
def test_routes_are_those_of_the_twin(rule: Routing, biased: bool, experts: int, used: int) -> None:
    rule, logits = divided(rule, experts), random_logits(40, experts)
    if biased and rule.scores < Scores.SOFTMAX_OF_CHOSEN:
        rule = replace(rule, bias=torch.linspace(-0.2, 0.2, experts))
    chosen, weights = rule(logits, used)
    expected, factors = routing_twin(rule, logits, used)
    assert chosen.dtype == torch.int64 and torch.equal(chosen, expected)
    torch.testing.assert_close(weights, factors, rtol=1e-5, atol=1e-7)


@every_rule
@pytest.mark.parametrize("experts, used", [(7, 3), (32, 4), (128, 8)])
def test_the_routes_of_a_row_do_not_depend_on_the_others(rule, experts: int, used: int) -> None:
    require_native_kernels()
    rule, logits = divided(rule, experts), random_logits(300, experts)
    chosen, weights = rule(logits, used)
    for rows in (0, 1, 2, 3, 5, 17, 64, 299):
        some = rule(logits[300 - rows :], used)
        assert torch.equal(some[0], chosen[300 - rows :])
        assert torch.equal(some[1], weights[300 - rows :])


@both
@pytest.mark.parametrize("rule", [OF_ALL, OF_CHOSEN, SIGMOIDS])
def test_of_equal_logits_the_first_experts_are_chosen(routed: Router, rule: Routing) -> None:
    logits = torch.zeros(5, 300)
    logits[:, 10] = -0.0
    logits[:, 200:203] = 1.0
    chosen, weights = routed(rule, logits, 5)
    assert chosen.tolist() == [[200, 201, 202, 0, 1]] * 5
    assert weights.shape == (5, 5) and weights.dtype == torch.float32


@both
def test_experts_near_a_chosen_one_share_its_weight(routed: Router) -> None:
    """3 and 2.97 are near each other, as are -1 and -1.01; of a negative logit, the distance is
    relative to the lower one."""
    rule = Routing(Scores.SOFTMAX_OF_NEAR, near=0.02)
    logits = torch.tensor([[2.97, 3.0, 2.0, -9.0], [-1.0, -1.01, -1.1, -4.0]])
    chosen, weights = routed(rule, logits, 2)
    assert chosen.tolist() == [[1, 0], [0, 1]]
    first = 1 / (1 + torch.tensor([-0.03, -0.01]).exp())
    torch.testing.assert_close(weights, torch.stack([first, torch.ones(2)], dim=1))


@both
def test_large_logits_are_told_apart_although_their_sigmoids_are_not(routed: Router) -> None:
    chosen, weights = routed(SIGMOIDS, torch.tensor([[30.0, 90.0, -90.0, 60.0]]), 3)
    assert chosen.tolist() == [[1, 3, 0]] and weights.tolist() == [[1.0, 1.0, 1.0]]


@both
def test_only_weights_normalised_over_the_chosen_experts_sum_to_one(routed: Router) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    probabilities = logits.softmax(-1)[0]
    chosen, weights = routed(OF_ALL, logits, 2)
    assert chosen.tolist() == [[1, 2]]
    torch.testing.assert_close(weights[0], probabilities[[1, 2]])
    _, renormalised = routed(OF_CHOSEN, logits, 2)
    torch.testing.assert_close(renormalised, weights / weights.sum())
    _, alone = routed(SIGMOIDS, logits, 2)
    torch.testing.assert_close(alone, logits[:, [1, 2]].sigmoid())


@both
def test_experts_are_chosen_from_the_groups_with_the_best_expert(routed: Router) -> None:
    logits = torch.tensor([[3.0, 0.0, 2.9, 2.8]])
    one = Routing(Scores.SOFTMAX, groups=2, used_groups=1, scale=4.0)
    chosen, weights = routed(one, logits, 2)
    assert chosen.tolist() == [[0, 1]]
    torch.testing.assert_close(weights, 4 * logits.softmax(-1)[:, :2])


@both
def test_groups_may_be_ranked_by_the_sum_of_their_two_best_experts(routed: Router) -> None:
    logits = torch.tensor([[3.0, 0.0, 2.9, 2.8]])
    pairs = Routing(Scores.SIGMOID, groups=2, used_groups=1, group_pairs=True, renormalised=True)
    chosen, weights = routed(pairs, logits, 2)
    assert chosen.tolist() == [[2, 3]]
    expected = logits.sigmoid()[:, 2:]
    torch.testing.assert_close(weights, expected / expected.sum())


@both
def test_a_bias_of_the_choice_does_not_change_the_weights(routed: Router) -> None:
    logits = torch.tensor([[3.0, 0.0, 2.9, 2.8]])
    biased = Routing(Scores.SIGMOID, bias=torch.tensor([0.0, 1.0, 0.0, 0.0]))
    chosen, weights = routed(biased, logits, 1)
    assert chosen.tolist() == [[1]] and weights.tolist() == [[0.5]]


@both
@pytest.mark.parametrize("rule", [OF_ALL, OF_CHOSEN, SIGMOIDS])
def test_a_nan_logit_gives_a_nan_weight(routed, rule: Routing) -> None:
    logits = random_logits(3, 20)
    logits[1, 7] = torch.nan
    chosen, weights = routed(rule, logits, 4)
    assert all(len(set(row)) == 4 for row in chosen.tolist())
    assert weights.isnan().any(dim=1).tolist() == [False, True, False]


def test_what_the_kernel_cannot_route_is_refused() -> None:
    require_native_kernels()
    for rule, experts, used in (
        (OF_ALL, 4097, 1),
        (OF_ALL, 4, 5),
        (Routing(Scores.SOFTMAX, groups=3, used_groups=2), 4, 1),
        (Routing(Scores.SOFTMAX, groups=2, used_groups=3), 4, 1),
        (replace(OF_ALL, bias=torch.zeros(3)), 4, 1),
    ):
        with pytest.raises(ValueError, match=r"experts|takes"):
            rule(torch.zeros(1, experts), used)
