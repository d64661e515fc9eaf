"""The engine of a whole model against AdamW written out in float64, in fp32, bf16 and fp16.

In fp16 the loss is scaled, which a model in fp32 can be trained with, too.
"""

import copy

import pytest
import torch
from torch import nn

from exgrpo.train.common.distributed import ALONE
from exgrpo.train.config.objective import ObjectiveConfig
from exgrpo.train.config.policy import OptimizerConfig
from exgrpo.train.policy.engine import WholeEngine, rate_factor
from exgrpo.train.policy.policy import Policy
from exgrpo.train.policy.source import find_model
from exgrpo.train.policy.states import MOMENTS, WEIGHT, LossScale, WholeStates
from tests.train import tiny
from tests.train.configs import configured

OPTIONS = {"lr": 0.01, "grad_clip": 0.5, "weight_decay": 0.1, "schedule": "linear", "warmup_steps": 1}
BETAS, EPSILON = (0.9, 0.999), 1e-8
STEPS, MICRO_BATCHES = 4, 3
OBJECTIVE = ObjectiveConfig(entropy_coef=0.01)
DTYPES = pytest.mark.parametrize(
    ("dtype", "asked"),
    [(torch.bfloat16, "bf16"), (torch.float32, "fp32"), (torch.float16, "fp16"), (torch.float32, "fp16")],
    ids=["bf16", "fp32", "fp16", "fp32, scaled"],
)


class Tied(nn.Module):
    """An embedding that is the head, too, and a layer between that is frozen in part."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layer = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.layer.bias.requires_grad_(False)

    def forward(self, tokens):
        return self.head(torch.tanh(self.layer(self.embedding(tokens))))


def make(dtype, asked, scale=2.0**10):
    options = {"steps": STEPS, "optimizer": {**OPTIONS, "minibatches": 1}, "policy": {"dtype": asked}}
    engine = WholeEngine(Tied().to(dtype), configured(options))
    if asked == "fp16":
        WholeStates(engine).set_loss_scale(LossScale(scale, 0))  # these losses have gradients up to 2^5
    return engine


def loss(module, number):
    tokens = torch.randint(11, (7,), generator=torch.Generator().manual_seed(number))
    return nn.functional.cross_entropy(module(tokens).float(), tokens.flip(0))


class PlainAdamW:
    """Of weights by name, in float64; rates and clipping as in OPTIONS."""

    def __init__(self, module):
        self.weights = {name: p.detach().double() for name, p in module.named_parameters() if p.requires_grad}
        self.first = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self.second = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self.steps = 0

    def step(self, gradients):
        """With gradients in float64; returns their norm."""
        rate = OPTIONS["lr"] * rate_factor(self.steps, OptimizerConfig(**OPTIONS), STEPS)
        self.steps += 1
        norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
        for name, gradient in gradients.items():
            gradient = gradient * min(1.0, OPTIONS["grad_clip"] / norm)
            self.first[name] = BETAS[0] * self.first[name] + (1 - BETAS[0]) * gradient
            self.second[name] = BETAS[1] * self.second[name] + (1 - BETAS[1]) * gradient**2
            mean = self.first[name] / (1 - BETAS[0] ** self.steps)
            size = (self.second[name] / (1 - BETAS[1] ** self.steps)).sqrt()
            self.weights[name] -= rate * (OPTIONS["weight_decay"] * self.weights[name] + mean / (size + EPSILON))
        return norm


def gradients_of(module, number, scale):
    """Of one micro-batch in float64: what the module's own dtype makes of them, of a loss that is multiplied so."""
    module = copy.deepcopy(module)  # without the engine's hooks
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(scale * loss(module, number), list(parameters.values()))
    return {name: gradient.double() / scale for name, gradient in zip(parameters, found, strict=True)}


@DTYPES
@pytest.mark.parametrize("in_kernel", [False, True])
def test_masters_are_those_of_a_plain_loop_in_float64(dtype, asked, in_kernel):
    engine = make(dtype, asked)
    engine.clips_in_kernel = in_kernel
    plain = PlainAdamW(engine.module)
    frozen = engine.module.layer.bias.clone()
    for step in range(STEPS):
        summed = {name: torch.zeros_like(weight) for name, weight in plain.weights.items()}
        for number in range(MICRO_BATCHES * step, MICRO_BATCHES * (step + 1)):
            for name, gradient in gradients_of(engine.module, number, engine.scaler.get_scale()).items():
                summed[name] += gradient
            engine.backward(loss(engine, number), scale_wrt_gas=False)
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(plain.step(summed).item(), rel=1e-5)
        assert engine.get_global_grad_norm() > OPTIONS["grad_clip"]
        for name, master in engine.masters.items():
            # Roundings of fp32, of weights up to 2.5 in each step and of what is added up: 3.5e-7 was seen. With sums
            # in bf16 it is 3e-5.
            torch.testing.assert_close(master.double(), plain.weights[name], rtol=1e-6, atol=1e-6)
            assert torch.equal(engine.module.get_parameter(name), master.to(dtype))
    assert list(engine.masters) == ["embedding.weight", "layer.weight"]
    assert torch.equal(engine.module.layer.bias, frozen)


@pytest.mark.parametrize("clip", [0.0, 1e-3, 1e6])
def test_steps_are_those_of_clipped_gradients_to_the_bit(clip):
    engine, other = (make(torch.float32, "fp32") for _ in range(2))
    engine.clip = clip
    for one in (engine, other):
        one.backward(loss(one, 0), scale_wrt_gas=False)
    engine.step()
    torch.nn.utils.clip_grad_norm_(other.masters.values(), clip or float("inf"))
    other.optimizer.step()
    moments = ([one.optimizer.state[master][MOMENTS[0]] for master in one.masters.values()] for one in (engine, other))
    for ours, expected in zip(*moments, strict=True):
        assert ours.any()
        assert torch.equal(ours, expected)


@DTYPES
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_gradient_that_is_not_finite_moves_nothing(bad, dtype, asked):
    engine, other = make(dtype, asked), make(dtype, asked)
    for number in range(3):
        if number == 1:
            engine.backward(loss(engine, 5) * bad, scale_wrt_gas=False)
            engine.step()
            assert engine.get_global_grad_norm() == float("inf")
        for one in (engine, other):
            one.backward(loss(one, number), scale_wrt_gas=False)
            one.step()
    assert (engine.skipped_steps, other.skipped_steps) == (1, 0)
    assert engine.get_lr() == other.get_lr() == [pytest.approx(0.01 / 3)]
    assert engine.scaler.get_scale() == (other.scaler.get_scale() / 2 if asked == "fp16" else 1)
    if dtype != torch.float16:  # which loses other digits of small gradients at another scale
        for ours, theirs in zip(engine.masters.values(), other.masters.values(), strict=True):
            assert torch.equal(ours, theirs)


def test_steps_that_overflow_fp16_halve_the_scale_until_the_gradient_is_within_its_range():
    engine = make(torch.float16, "fp16", 2.0**16)
    plain, scales = PlainAdamW(engine.module), []
    while not scales or engine.skipped_steps == len(scales):
        scales.append(engine.scaler.get_scale())
        engine.backward(loss(engine, 0), scale_wrt_gas=False)
        engine.step()
    assert len(scales) > 1
    assert scales == [2.0 ** (16 - halvings) for halvings in range(len(scales))]
    within, beyond = (gradients_of(Tied().half(), 0, scale) for scale in (scales[-1], scales[-2]))
    assert not all(gradient.isfinite().all() for gradient in beyond.values())
    plain.step(within)
    for name, master in engine.masters.items():
        torch.testing.assert_close(master.double(), plain.weights[name], rtol=1e-6, atol=1e-6)


def test_the_scale_doubles_after_finite_steps_and_never_falls_below_1():
    engine = make(torch.float32, "fp16", 2.0**16)
    engine.scaler.set_growth_interval(2)
    seen = []
    for bad in (1, 1, torch.nan, 1, 1, *[torch.nan] * 18, 1):
        seen.append(engine.scaler.get_scale())
        engine.backward(loss(engine, 0) * bad, scale_wrt_gas=False)
        engine.step()
    falling = [2.0**power for power in range(17, -1, -1)]
    assert seen == [2**16, 2**16, 2**17, 2**16, 2**16, *falling, 1]
    assert WholeStates(engine).loss_scale == LossScale(1, 1)


def policy_in(dtype, folder, objective=OBJECTIVE):
    config = tiny.config(folder, objective, dtype=dtype, optimizer={"schedule": "linear"})
    return Policy(config, find_model(str(folder)), ALONE)


@pytest.mark.parametrize("surrogate", ["clipped", "cispo"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_head_in_bf16_adds_to_the_fp32_gradient_by_itself(surrogate, tied, tmp_path, one_thread):
    """Against the way of all other parameters: gradients that are rounded to bf16, 2^-8 of their size, then added."""
    tiny.save_model(tmp_path / "model", tied=tied)
    objective = ObjectiveConfig(surrogate=surrogate, entropy_coef=0.01)
    batch, found = tiny.minibatches(objective)[0], []
    for direct in (True, False):
        policy = policy_in("bf16", tmp_path / "model", objective)
        head, handed = policy.model.get_output_embeddings().weight, []
        head.register_hook(handed.append)
        if not direct:
            policy.engine._head = None
        policy.update(batch, clip=True)
        assert any(gradient is not None for gradient in handed) == (tied or not direct)
        assert head.grad is None
        assert getattr(head, "main_grad", None) is None
        (name,) = (name for name, parameter in policy.engine.module.named_parameters() if parameter is head)
        found.append(policy.states.get(name, MOMENTS[0]))  # a multiple of the gradient
    ours, others = found
    assert 0 < (ours - others).norm() < 2**-8 * others.norm()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_policy_in_16_bits_goes_on_to_the_last_bit(tmp_path, one_thread, dtype):
    """Masters and moments have what the weights have lost, and in fp16 the loss scale is that of the steps before."""
    tiny.save_model(tmp_path / "model", tied=True)
    straight, first, last = (policy_in(dtype, tmp_path / "model") for _ in range(3))
    batches = tiny.minibatches(OBJECTIVE)
    for policy in (straight, first):
        policy.update(tiny.poisoned(batches[0]), clip=True)
        policy.update(batches[0], clip=True)
    first.save_checkpoint(tmp_path / "states")
    last.load_checkpoint(tmp_path / "states")
    for number in (1, 2):
        ours, theirs = (policy.update(batches[number], clip=True) for policy in (last, straight))
        assert (ours.loss, ours.grad_norm) == (theirs.loss, theirs.grad_norm)
    assert last.states.loss_scale == straight.states.loss_scale == (LossScale(2**15, 3) if dtype == "fp16" else None)
    for name in straight.states.parameters:
        for key in (WEIGHT, *MOMENTS):
            assert torch.equal(last.states.get(name, key), straight.states.get(name, key)), (key, name)
    for ours, theirs in zip(last.weights(), straight.weights(), strict=True):
        assert torch.equal(ours[1], theirs[1])
