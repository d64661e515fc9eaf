"""The engine of a process that has the model whole: a plain loop, steps that are left out, and going on."""

import pytest
import torch
from torch import nn

from exgrpo.train.policy.whole import WholeEngine

CLIP = 0.5


@pytest.fixture
def make():
    """Engines of equal weights; their rate falls with each step."""

    def engine(clip=CLIP):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
        return WholeEngine(module, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), clip)

    return engine


def loss(engine, number):
    inputs = torch.randn(7, 6, generator=torch.Generator().manual_seed(number))
    return (engine(inputs) - number).square().mean()


def step(engine, number):
    for part in (number, number + 100):  # two passes of one step
        engine.backward(loss(engine, part), scale_wrt_gas=False)
    engine.step()


def weights(engine):
    return torch.cat([parameter.detach().flatten() for parameter in engine.module.parameters()])


@pytest.mark.parametrize("clip", [CLIP, 0.0])
def test_a_step_is_adamws_with_the_clipped_sum_of_gradients(make, clip):
    engine, plain = make(clip), make().module.double()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for number in range(4):
        assert engine.get_lr() == [0.1 * 0.5**number]
        optimizer.param_groups[0]["lr"] = 0.1 * 0.5**number
        optimizer.zero_grad()
        for part in (number, number + 100):
            inputs = torch.randn(7, 6, generator=torch.Generator().manual_seed(part)).double()
            (plain(inputs) - part).square().mean().backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in plain.parameters()])
        if clip:
            for parameter in plain.parameters():
                parameter.grad /= max(1.0, gradient.norm() / clip)
        optimizer.step()
        step(engine, number)
        assert engine.get_global_grad_norm() == pytest.approx(gradient.norm().item(), rel=1e-5)
    expected = torch.cat([parameter.detach().flatten() for parameter in plain.parameters()])
    # AdamW divides by the size of the gradient: its rounding, some 1e-7 of it, comes back as part of a step of 0.1.
    torch.testing.assert_close(weights(engine).double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_gradient_that_is_not_finite_moves_nothing(make, bad):
    engine, other = make(), make()
    for number in range(3):
        if number == 1:
            engine.backward(loss(engine, 5) * bad, scale_wrt_gas=False)
            engine.step()
            assert engine.get_global_grad_norm() == float("inf")
        step(engine, number)
        step(other, number)
    assert engine.skipped_steps == 1
    assert engine.get_lr() == other.get_lr()
    assert torch.equal(weights(engine), weights(other))
