import math

import pytest
import torch
from torch import nn

from torchcaps.recipes import Recipe
from torchcaps.train.optim import EMA, create_optimizer, learning_rate, set_rates


def recipe(**changes):
    return Recipe(**{"model": "capsnet_mnist", "data": "mnist", "lr": 1e-3, "epochs": 10, **changes})


def rates(steps, steps_per_epoch=5, **changes):
    return [learning_rate(recipe(**changes), step, steps_per_epoch) for step in range(steps)]


def test_constant():
    assert rates(12) == [1e-3] * 12


def test_exponential_falls_once_an_epoch_down_to_its_floor():
    args = {"decay": 0.5, "floor": 2e-4}
    expected = [max(2e-4, 1e-3 * 0.5 ** (step // 5)) for step in range(25)]
    assert rates(25, schedule="exponential", schedule_args=args) == expected
    assert expected[4:6] == [1e-3, 5e-4]
    assert expected[-1] == 2e-4


def test_sabours_decay_is_continuous():
    args = {"decay": 0.96, "every": 2000, "floor": 1e-6}
    by_hand = recipe(schedule="exponential_steps", schedule_args=args)
    for step in (0, 1, 999, 2000, 300_000, 10_000_000):
        assert learning_rate(by_hand, step, 468) == pytest.approx(max(1e-6, 1e-3 * 0.96 ** (step / 2000)), rel=1e-12)
    assert learning_rate(by_hand, 1, 468) < 1e-3


def test_steps_fall_at_epochs_counted_from_0():
    args = {"milestones": (2, 3), "factor": 0.1}
    assert rates(20, schedule="steps", schedule_args=args) == pytest.approx([1e-3] * 10 + [1e-4] * 5 + [1e-5] * 5)


def test_cosine_rises_then_falls_to_its_floor():
    found = rates(51, schedule="cosine", schedule_args={"warmup": 2, "floor": 1e-5})
    assert found[:10] == pytest.approx([1e-3 * (k + 1) / 11 for k in range(10)])
    expected = [1e-5 + 0.5 * (1e-3 - 1e-5) * (1 + math.cos(math.pi * k / 40)) for k in range(41)]
    assert found[10:] == pytest.approx(expected)
    assert found[50] == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"schedule": "exponential"}, "needs 'decay'"),
        ({"schedule": "constant", "schedule_args": {"decay": 0.9}}, "has no 'decay'; it takes nothing"),
        ({"schedule": "steps", "schedule_args": {"milestones": (1,), "floor": 0.1}}, "milestones, factor"),
        ({"schedule": "steps", "schedule_args": {"milestones": "25"}}, "a list of them, got milestones = '25'"),
        ({"schedule": "cosine", "schedule_args": {"warmup": "two"}}, "takes numbers, .* got warmup = 'two'"),
    ],
)
def test_a_schedule_says_what_it_takes(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        learning_rate(recipe(**changes), 0, 1)


def test_an_optimizer_says_what_it_takes():
    with pytest.raises(ValueError, match="sgd has no 'rho'; it takes momentum"):
        create_optimizer(recipe(optimizer="sgd", optimizer_args={"rho": 0.9}), [nn.Parameter(torch.ones(1))])


def test_a_rate_on_the_device_is_written_when_it_changes():
    how = recipe(schedule="steps", schedule_args={"milestones": [2]})
    rate = torch.tensor(0.0)
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(1))], rate, capturable=True)
    versions = []
    for step in range(4):
        set_rates(optimizer, how, step, 1)
        torch.testing.assert_close(rate, torch.tensor(learning_rate(how, step, 1)))
        versions.append(rate._version)
    assert versions == [1, 1, 2, 2]
    rate.fill_(0.5)
    set_rates(optimizer, how, 4, 1)
    torch.testing.assert_close(rate, torch.tensor(learning_rate(how, 4, 1)))


def descend(how, gradients, steps_per_epoch=1000):
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))
    optimizer = create_optimizer(how, [weight])
    for step, gradient in enumerate(gradients):
        set_rates(optimizer, how, step, steps_per_epoch)
        weight.grad = gradient.clone()
        optimizer.step()
    return weight.detach()


@pytest.fixture
def gradients():
    return torch.randn(30, 3, dtype=torch.float64) * torch.tensor([1.0, 1e-4, 1e-7], dtype=torch.float64)


def test_rmsprop_is_kerass(gradients):
    how = recipe(optimizer="rmsprop_keras", optimizer_args={"rho": 0.9, "decay": 1e-2})
    expected = [1.0, -2.0, 0.5]
    for k in range(3):
        square = 0.0
        for iteration, gradient in enumerate(gradients[:, k].tolist()):
            lr = 1e-3 / (1 + 1e-2 * iteration)
            square = 0.9 * square + 0.1 * gradient**2
            expected[k] -= lr * gradient / (math.sqrt(square) + 1e-7)
    torch.testing.assert_close(descend(how, gradients), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


def plain_adam(gradients, eps, keras):
    expected = [1.0, -2.0, 0.5]
    for k in range(3):
        m = v = 0.0
        for t, gradient in enumerate(gradients[:, k].tolist(), 1):
            m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
            root, right = math.sqrt(1 - 0.999**t), 1 - 0.9**t
            if keras:
                expected[k] -= 1e-3 * root / right * m / (math.sqrt(v) + eps)
            else:
                expected[k] -= 1e-3 / right * m / (math.sqrt(v) / root + eps)
    return torch.tensor(expected, dtype=torch.float64)


def test_adam_with_an_epsilon(gradients):
    how = recipe(optimizer_args={"eps": 1e-7})
    torch.testing.assert_close(descend(how, gradients), plain_adam(gradients, 1e-7, False), rtol=1e-10, atol=0)


def test_kerass_adam_adds_epsilon_before_the_correction(gradients):
    how = recipe(optimizer="adam_keras", optimizer_args={"eps": 1e-7})
    found = descend(how, gradients)
    torch.testing.assert_close(found, plain_adam(gradients, 1e-7, True), rtol=1e-10, atol=0)
    assert (found - plain_adam(gradients, 1e-7, False)).abs().max() > 1e-5


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_weight_decay_is_in_the_gradient_of_adam_and_beside_it_in_adamw(name):
    found = descend(
        recipe(optimizer=name, optimizer_args={"weight_decay": 0.1}), torch.zeros(1, 3, dtype=torch.float64)
    )
    start = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    expected = start - 1e-3 * start.sign() if name == "adam" else start * (1 - 1e-4)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_sgd_has_momentum(gradients):
    found = descend(recipe(optimizer="sgd", optimizer_args={"momentum": 0.9}), gradients)
    weight, velocity = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for gradient in gradients:
        velocity = 0.9 * velocity + gradient
        weight = weight - 1e-3 * velocity
    torch.testing.assert_close(found, weight)


def test_frozen_weights_are_left_out():
    weights = [nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1), requires_grad=False)]
    assert len(create_optimizer(recipe(), weights).param_groups[0]["params"]) == 1


def test_ema_follows_weights_and_statistics():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    ema = EMA(model, 0.5)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for n in range(8):
        with torch.no_grad():
            model[0].weight.add_(torch.randn(4, 3, dtype=torch.float64))
        model(torch.randn(5, 3, dtype=torch.float64))
        ema.update(model)
        keep = min(0.5, (1 + n) / (10 + n))
        for name, value in model.state_dict().items():
            expected[name] = keep * expected[name] + (1 - keep) * value if value.is_floating_point() else value.clone()
    assert ema.average["1.num_batches_tracked"] == 8
    assert not torch.equal(ema.average["1.running_mean"], model[1].running_mean)
    torch.testing.assert_close(ema.average, expected)


def test_ema_takes_the_networks_place_and_gives_it_back():
    model = nn.Linear(2, 2)
    ema = EMA(model, 0.9)
    old = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1)
    with ema.in_place_of(model):
        assert torch.equal(model.weight, old)
    assert torch.equal(model.weight, old + 1)


def test_ema_keeps_its_state():
    model = nn.Linear(2, 2)
    ema, other = EMA(model, 0.9), EMA(nn.Linear(2, 2), 0.9)
    ema.update(model)
    other.load_state_dict(ema.state_dict())
    assert other.updates == 1
    torch.testing.assert_close(other.average, ema.average, rtol=0, atol=0)
