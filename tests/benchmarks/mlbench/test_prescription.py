"""Learning rates, networks and published arithmetic against the document."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

Load = Callable[[str], ModuleType]
RATE = 0.1 / 256 * 32
"""Of one worker."""


@pytest.mark.parametrize(
    ("num_workers", "epoch", "expected"),
    [
        (1, 0, RATE),
        (1, 5, RATE),  # one worker has nothing to warm up to
        (4, 0, RATE),
        (4, 1, RATE * (1 + 3 / 5)),
        (4, 5, 4 * RATE),
        (32, 5, 0.4),  # 0.1 for each 256 samples
        (4, 81, 4 * RATE),
        (4, 82, 0.4 * RATE),  # after 82 complete epochs
        (4, 108, 0.4 * RATE),
        (4, 109, 0.04 * RATE),
        (4, 163, 0.04 * RATE),
    ],
)
def test_image_rate_at_the_start_of_an_epoch(load: Load, num_workers: int, epoch: int, expected: float) -> None:
    image_rate = load("tasks.prescription").image_rate
    assert image_rate(390 * epoch, steps_per_epoch=390, num_workers=num_workers) == pytest.approx(expected, rel=1e-12)


def test_image_rate_grows_evenly_at_every_step_of_the_warm_up(load: Load) -> None:
    image_rate = load("tasks.prescription").image_rate
    rates = [image_rate(step, steps_per_epoch=10, num_workers=8) for step in range(60)]
    grown = [later - earlier for earlier, later in itertools.pairwise(rates)]
    assert grown[:50] == pytest.approx([7 * RATE / 50] * 50)
    assert grown[50:] == [0.0] * 9


def test_image_rate_rejects_a_negative_step(load: Load) -> None:
    with pytest.raises(ValueError, match=r"step -1, 1 steps .* expected at least 0"):
        load("tasks.prescription").image_rate(-1, steps_per_epoch=1, num_workers=1)


@pytest.mark.parametrize(
    ("num_workers", "alpha"), [(1, 200), (2, 400), (4, 600), (8, 700), (16, 800), (32, 800), (64, 800)]
)
def test_linear_rate_is_alpha_over_the_root_of_the_step(load: Load, num_workers: int, alpha: float) -> None:
    prescription = load("tasks.prescription")
    assert prescription.linear_alpha(num_workers) == alpha
    assert prescription.linear_rate(1, alpha=alpha) == alpha
    assert prescription.linear_rate(100, alpha=alpha) == pytest.approx(alpha / 10)


def test_linear_alpha_for_a_number_of_workers_without_one_names_those_that_have(load: Load) -> None:
    with pytest.raises(ValueError, match=r"no alpha for 3 workers; expected one of 1, 2, 4, 8, 16, 32, 64"):
        load("tasks.prescription").linear_alpha(3)


def test_numbers_are_those_of_the_document(load: Load) -> None:
    prescription = load("tasks.prescription")
    images, linear, prices = prescription.IMAGES, prescription.LINEAR, prescription.PRICES
    assert (images.batch_size, images.max_epochs, images.momentum, images.nesterov) == (32, 164, 0.9, True)
    assert (images.weight_decay, images.target_accuracy, images.duration_s) == (0.0001, 0.8, 7200)
    assert (linear.batch_size, linear.momentum, linear.weight_decay) == (100, 0, 0)
    assert (linear.regularization, linear.target_accuracy, linear.target_loss) == (0.0000025, 0.89, 0.2828)
    assert (prices.host_usd, prices.preemptible_host_usd, prices.preemptible_gpu_usd) == (0.19, 0.04, 0.135)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("depth", "published"), [(20, 0.27), (32, 0.46), (44, 0.66), (56, 0.85)])
def test_network_has_the_layers_and_the_published_parameters(
    load: Load, version: int, depth: int, published: float
) -> None:
    network = load("tasks.residual").ResNet(version=version, depth=depth)
    layers = [module for module in network.modules() if isinstance(module, (torch.nn.Conv2d, torch.nn.Linear))]
    assert len(layers) == depth
    # Convolutions of 9 weights per pair of channels, without a bias, then a linear layer with one.
    number = (depth - 2) // 6
    convolutions = 3 * 16 + (2 * number) * 16 * 16
    convolutions += 16 * 32 + (2 * number - 1) * 32 * 32 + 32 * 64 + (2 * number - 1) * 64 * 64
    # Two parameters for each normalised channel. Version 2 normalises the inputs of convolutions.
    normalised = {1: 16 + 2 * number * (16 + 32 + 64), 2: 2 * number * (16 + 32 + 64) - 16 - 32 + 64}[version]
    found = sum(parameter.numel() for parameter in network.parameters())
    assert found == 9 * convolutions + 2 * normalised + 64 * 10 + 10
    if version == 1:
        assert found == {20: 269_722, 32: 464_154, 44: 658_586, 56: 853_018}[depth]
        assert round(found / 1e6, 2) == published  # He et al. (2015), table 6
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_network_of_another_depth_is_rejected(load: Load) -> None:
    with pytest.raises(ValueError, match="version 1 with 18 layers; expected version 1 or 2 and one of 20, 32, 44, 56"):
        load("tasks.residual").ResNet(version=1, depth=18)


def test_block_with_zero_convolutions_passes_on_its_shortcut(load: Load) -> None:
    residual = load("tasks.residual")
    features = torch.rand(2, 16, 8, 8) - 0.5
    for block, is_rectified in ((residual.BlockV1, True), (residual.BlockV2, False)):
        layer = block(16, 32, stride=2)
        torch.nn.init.zeros_(layer.second.weight)
        found = layer(features)
        expected = torch.zeros(2, 32, 4, 4)
        expected[:, 8:24] = features[:, :, ::2, ::2]
        torch.testing.assert_close(found, expected.relu() if is_rectified else expected, rtol=0, atol=0)


def test_gradient_of_the_regularized_loss_is_that_of_the_formula(load: Load) -> None:
    linear = load("tasks.linear")
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(100, 7, generator=generator, dtype=torch.float64)
    labels = torch.where(torch.rand(100, generator=generator) < 0.5, 1.0, -1.0).double()
    weights = torch.randn(7, generator=generator, dtype=torch.float64, requires_grad=True)
    rate = 0.25
    loss = linear.regularized_loss(features @ weights, labels, weights, rate)
    loss.backward()
    fixed = weights.detach()
    margins = labels * (features @ fixed)
    assert loss.item() == pytest.approx((torch.log1p(torch.exp(-margins)).mean() + rate / 2 * fixed @ fixed).item())
    expected = -(labels / (1 + torch.exp(margins))) @ features / 100 + rate * fixed
    torch.testing.assert_close(weights.grad, expected)


def test_published_costs_follow_from_times_and_prices(load: Load) -> None:
    figures = load("tasks.figures")
    costs = figures.published_costs_usd()
    assert costs["PyTorch, CPU"] == pytest.approx(5895 * 0.04 / 3600)  # USD 0.0655
    assert costs["PyTorch, GPU"] == pytest.approx(407 * (0.04 + 0.135) / 3600)  # the K80 is on top of its host
    assert costs["TensorFlow, GPU"] == pytest.approx(1191 * 0.175 / 3600)
    assert [round(cost, 4) for cost in costs.values()] == [0.0655, 0.0198, 0.0579]
    # Not preemptible, the baseline on a CPU costs 4.75 times as much.
    assert figures.cost_usd(5895, figures.hourly_usd(num_hosts=1, is_preemptible=False)) == pytest.approx(
        0.3111, abs=1e-4
    )
    # TensorFlow needs a parameter server: a second host, without a GPU.
    assert figures.cost_usd(1191, figures.hourly_usd(num_hosts=2, num_gpus=1)) == pytest.approx(0.0711, abs=1e-4)


def test_published_speed_ups_follow_from_times(load: Load) -> None:
    figures = load("tasks.figures")
    assert figures.speed_up(5895, 407) == pytest.approx(14.48, abs=0.01)
    assert figures.speed_up(1191, 407) == pytest.approx(2.93, abs=0.01)
    assert figures.speed_up(5895, 1191) == pytest.approx(4.95, abs=0.01)
    # On the GPU, the same accuracy costs 3.3 times less, although an hour costs 4.4 times more.
    costs = figures.published_costs_usd()
    assert costs["PyTorch, CPU"] / costs["PyTorch, GPU"] == pytest.approx(3.31, abs=0.01)
    assert figures.hourly_usd(num_hosts=1, num_gpus=1) / figures.hourly_usd(num_hosts=1) == pytest.approx(4.375)


def test_cost_of_a_regular_host_with_a_gpu_has_no_published_price(load: Load) -> None:
    with pytest.raises(ValueError, match="no price for a GPU that is not preemptible"):
        load("tasks.figures").hourly_usd(num_hosts=1, num_gpus=1, is_preemptible=False)


def test_speed_up_without_a_time_is_rejected(load: Load) -> None:
    with pytest.raises(ValueError, match="times 1 s and 0 s; expected both above 0"):
        load("tasks.figures").speed_up(1, 0)
