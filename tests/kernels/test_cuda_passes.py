"""The row kernel by itself against float64: its source on an emulated machine, and on a GPU where there is one."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from exgrpo.kernels.chunks import softmax
from exgrpo.kernels.chunks.softmax import PolicyRows, RowTerms, Statistics, Sums, Upstream
from exgrpo.kernels.cuda_chunks.binding import Output
from exgrpo.kernels.cuda_chunks.cuda_passes import rows_call, set_output, set_policy
from exgrpo.kernels.inputs import PolicyTokens, Surrogate

from .cuda_support import INTERPRETING, ON_GPU, emulate_rows, emulated_plan

pytestmark = pytest.mark.skipif(INTERPRETING, reason="the process that interprets Triton kernels tests nothing else")

EPS = 2.0**-23
ROUNDINGS = {torch.float32: 16 * EPS, torch.bfloat16: 2.0**-8}
GPU = pytest.param("gpu", marks=[pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="needs a GPU and _cuda.so")])
SHAPE = {"cluster": 2, "threads": 64, "columns": 152}
"""Of the emulated blocks."""


@pytest.fixture(params=["emulated", GPU])
def machine(request):
    return request.param


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request):
    return request.param


class Case:
    """Raw products of a few rows, NaN beyond the vocabulary; targets are likely words."""

    def __init__(self, machine, vocabulary, *, rows=3, stride=None, bias=None, temperature=False, softcap=None):
        self.machine = machine
        self.device = "cuda" if machine == "gpu" else "cpu"
        self.storage = torch.full((rows, stride or vocabulary), torch.nan, device=self.device)
        self.logits = self.storage[:, :vocabulary]
        self.logits.copy_(2 * torch.randn(rows, vocabulary))
        self.target = torch.randint(0, vocabulary, (rows,), device=self.device)
        self.logits[torch.arange(rows), self.target] = 5.0 + torch.rand(rows, device=self.device)
        self.bias = None if bias is None else torch.randn(vocabulary, device=self.device).to(bias)
        self.temperature = torch.linspace(0.5, 2.0, rows, device=self.device) if temperature else None
        self.softcap = softcap
        self.before = self.logits.clone()
        self.sums = Sums(*torch.full((4, rows), torch.nan, device=self.device))

    def run(self, output=Output.NOTHING, out=None, policy=None, **shape):
        call = rows_call(self.logits, self.bias, self.target, self.temperature, self.softcap, self.sums)
        if out is not None:
            set_output(call, output, out)
        if policy is not None:
            set_policy(call, *policy)
        if self.machine == "gpu":
            call.launch(torch.device("cuda"))
        else:
            emulate_rows(call, **{**SHAPE, **shape})
        return self.sums

    def exact(self, anchor):
        """Sums in float64 from given anchors; z and exp(d), 0 at the target."""
        z = self.before.double()
        if self.bias is not None:
            z = z + self.bias.double()
        if self.softcap is not None:
            z = self.softcap * torch.tanh(z / self.softcap)
        tau = 1.0 if self.temperature is None else self.temperature.double().unsqueeze(1)
        d = (z - anchor.double().unsqueeze(1)) / tau
        index = self.target.unsqueeze(1)
        e = d.exp().scatter(1, index, 0.0)
        moment = torch.where(e > 0, e * d, 0.0).sum(1)
        return Sums(anchor.double(), d.gather(1, index).squeeze(1), e.sum(1), moment), z, e

    def roundings(self):
        """Of exp(d): z is rounded before d is formed, and exp turns an absolute error of d into a relative one."""
        size = self.before.abs().max().item() + (0.0 if self.bias is None else self.bias.abs().max().item())
        return (16 + 4 * size / (0.5 if self.temperature is not None else 1.0)) * EPS


def assert_close(found, exact, roundings):
    """Up to roundings of each value, and what is lost below 1e-30 with the smallest numbers of fp32."""
    assert found.isfinite().all()
    error = (found.double() - exact).abs()
    assert (error <= roundings * exact.abs() + 1e-30).all(), error.max()


def check_sums(case):
    """Returns exp(d) as it should be."""
    exact, z, e = case.exact(case.sums.anchor)
    at_target = z.gather(1, case.target.unsqueeze(1)).squeeze(1)
    far = (e * ((case.sums.anchor.double() - at_target).exp()).unsqueeze(1)).sum(1) > 64
    if case.temperature is None:
        assert_close(case.sums.anchor, torch.where(far, z.amax(1), at_target), case.roundings())
    assert ((case.sums.gap - exact.gap).abs() <= case.roundings()).all()
    assert_close(case.sums.rest, exact.rest, case.roundings())
    # Terms of both signs: the error is that of the largest, not of the sum.
    size = 1 + case.before.abs().max()
    assert ((case.sums.moment - exact.moment).abs() <= case.roundings() * size * (1 + exact.rest)).all()
    return e


@pytest.mark.parametrize("vocabulary", [1, 3, 152, 153, 299, 304])
@pytest.mark.parametrize("bias", [None, torch.bfloat16], ids=["", "bias"])
def test_sums_alone(vocabulary, bias, machine):
    case = Case(machine, vocabulary, bias=bias)
    case.run()
    check_sums(case)
    assert torch.equal(case.logits, case.before)


@pytest.mark.parametrize(("cluster", "threads", "columns"), [(1, 256, 304), (1, 32, 304), (4, 64, 80), (8, 32, 40)])
def test_any_cluster_finds_the_same(cluster, threads, columns):
    """A block may even be left without columns."""
    case = Case("emulated", 270, temperature=True)
    case.run(cluster=cluster, threads=threads, columns=columns)
    check_sums(case)


@pytest.mark.parametrize(("vocabulary", "stride"), [(299, 299), (299, 304), (300, 301), (304, 304)])
def test_exponentials_beside_the_logits(vocabulary, stride, dtype, machine):
    """In 16-byte pieces and without; nothing beyond the vocabulary is written. -S stands at the target."""
    case = Case(machine, vocabulary, stride=stride, temperature=True)
    storage = torch.full(case.storage.shape, 7.0, dtype=dtype, device=case.device)
    out = storage[:, :vocabulary]
    case.run(Output.EXPONENTIALS, out)
    exact = check_sums(case).scatter(1, case.target.unsqueeze(1), -case.sums.rest.double().unsqueeze(1))
    assert_close(out, exact, case.roundings() + ROUNDINGS[dtype])
    assert (storage[:, vocabulary:] == 7).all()
    assert torch.equal(case.logits, case.before)


def test_exponentials_in_place(machine):
    case = Case(machine, 299, stride=304)
    case.run(Output.EXPONENTIALS, case.logits)
    exact = check_sums(case).scatter(1, case.target.unsqueeze(1), -case.sums.rest.double().unsqueeze(1))
    assert_close(case.logits, exact, case.roundings())
    assert case.storage[:, 299:].isnan().all()


def make_policy(rows, device, *, clip=(0.2, 0.2), beta=0.1, entropy_coef=0.05, softcap=None):
    """Tokens, terms and rows for results."""
    old = -torch.rand(rows, device=device)
    advantage = torch.randn(rows, device=device)
    replayed = torch.arange(rows, device=device) % 3 == 1
    normalizer = torch.tensor(7.0, dtype=torch.float64, device=device)
    results = PolicyRows(*torch.full((len(PolicyRows._fields), rows), torch.nan, device=device))
    terms = RowTerms(Surrogate(clip, beta), entropy_coef, normalizer, softcap)
    return PolicyTokens(old, advantage, replayed), terms, results


def check_gradient(case, dtype, **terms):
    """Objective, factors and F of one visit, against the formulas in float64 on the sums that were found."""
    rows = len(case.logits)
    tokens, given, results = make_policy(rows, case.device, softcap=case.softcap, **terms)
    out = case.logits if dtype == torch.float32 else torch.empty_like(case.logits, dtype=dtype)
    case.run(Output.GRADIENT, out, (tokens, given, results))
    check_sums(case)
    sums, z, _ = case.exact(case.sums.anchor)
    exact_tokens = PolicyTokens(tokens.old_log_prob.double(), tokens.advantage.double(), tokens.replayed)
    temperature = None if case.temperature is None else case.temperature.double()
    exact = softmax.policy_rows(sums, exact_tokens, given, temperature)
    largest = 1 + max(value.abs().max().item() for value in (sums.gap, exact.ratio, sums.rest, exact.mean))
    for name, found, true in zip(PolicyRows._fields, results, exact, strict=True):
        assert ((found - true).abs() <= 4 * case.roundings() * largest * (1 + true.abs())).all(), name
    upstream = Upstream(exact.coefficient, torch.full_like(exact.coefficient, -given.entropy_coef) / given.normalizer)
    d = (z - case.sums.anchor.double().unsqueeze(1)) / (1 if temperature is None else temperature.unsqueeze(1))
    c, h = (values.unsqueeze(1) for values in upstream)
    f = d.exp() * (c + h * (d - exact.mean.unsqueeze(1)))
    f = f.scatter(1, case.target.unsqueeze(1), exact.at_target.unsqueeze(1))
    if case.softcap is not None:
        f = f * (1 - (z / case.softcap) ** 2)
    scale = d.exp() * (c.abs() + h.abs() * (1 + d.abs() + exact.mean.abs().unsqueeze(1))) + f.abs()
    assert out.isfinite().all()
    assert ((out.double() - f).abs() <= (4 * case.roundings() * largest + ROUNDINGS[dtype]) * scale + 1e-30).all()
    assert Statistics(*sums[:3], exact.mean).excess.isfinite().all()


@pytest.mark.parametrize(
    "terms",
    [{}, {"clip": None}, {"beta": None}, {"entropy_coef": -0.5, "clip": None, "beta": None}, {"clip": (0.0, 0.0)}],
    ids=str,
)
def test_objective_and_gradient_in_one_visit(terms, dtype, machine):
    check_gradient(Case(machine, 299, rows=6, temperature=True), dtype, **terms)


@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
@pytest.mark.parametrize("bias", [None, torch.float32], ids=["", "bias"])
def test_a_cap(entropy_coef, bias, dtype, machine):
    check_gradient(Case(machine, 200, bias=bias, softcap=6.0), dtype, entropy_coef=entropy_coef)


@pytest.mark.parametrize("output", [Output.EXPONENTIALS, Output.GRADIENT])
def test_improbable_targets_are_anchored_anew(output, machine):
    """Below 1 / 65 the anchor is the largest logit; one row's exponentials would overflow from its target's."""
    case = Case(machine, 300, rows=4)
    case.logits[torch.arange(4), case.target] = torch.tensor([-2.0, -10.0, -300.0, 8.0], device=case.device)
    case.before = case.logits.clone()
    if output == Output.GRADIENT:
        check_gradient(case, torch.float32)
    else:
        case.run(output, case.logits)
        check_sums(case)
    assert torch.equal(case.sums.anchor[:3], case.before.amax(1)[:3])
    assert case.sums.anchor[3] == 8.0


def test_both_sides_of_the_threshold(machine):
    """49 words a little likelier than the target do not move the anchor, 50 do: S is 62.9 and 64.2."""
    case = Case(machine, 200, rows=2)
    case.logits[:] = -200.0
    case.logits[:, 0] = 0.0
    case.logits[0, 1:50] = case.logits[1, 1:51] = 0.25
    case.target[:] = 0
    case.run()
    assert case.sums.anchor.tolist() == [0.0, 0.25]


def test_a_certain_target(machine):
    """Every other probability is beyond fp32's range beside 1, or nearly: no digit of S is lost."""
    case = Case(machine, 200)
    case.logits[torch.arange(3), case.target] = torch.tensor([30.0, 60.0, 1000.0], device=case.device)
    case.before = case.logits.clone()
    case.run()
    check_sums(case)


def test_forbidden_words(machine):
    case = Case(machine, 200, bias=torch.float32)
    case.bias[(case.target[0] + 1) % 200] = -torch.inf
    case.target[:] = case.target[0]
    case.run()
    exact, _, _ = case.exact(case.sums.anchor)
    assert_close(case.sums.rest, exact.rest, 64 * EPS)
    assert case.sums.moment.isfinite().all()


def test_a_broken_logit_shows(machine):
    """NaN in one column is NaN in the sums, in whichever block, and no other row has it."""
    case = Case(machine, 299, rows=3)
    case.target[:] = torch.tensor([0, 1, 2])
    case.logits[0, 150], case.logits[2, 290] = torch.nan, torch.nan
    case.run()
    assert case.sums.rest.isnan().tolist() == [True, False, True]
    assert case.sums.moment.isnan().tolist() == [True, False, True]


def test_the_order_of_threads_does_not_matter():
    """Whoever comes first: the same bits."""
    case = Case("emulated", 299, rows=4, temperature=True)
    case.logits[torch.arange(4), case.target] = torch.tensor([-2.0, -10.0, 3.0, 8.0])
    found = []
    for backwards in (False, True):
        _, terms, results = make_policy(4, case.device)
        out = torch.empty_like(case.logits, dtype=torch.bfloat16)
        tokens = PolicyTokens(torch.zeros(4), torch.ones(4), None)
        case.run(Output.GRADIENT, out, (tokens, terms, results), backwards=backwards)
        found.append([*case.sums, *results, out])
        case.sums = Sums(*torch.empty(4, 4))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("vocabulary", [1, 8, 1000, 19_000, 32_000, 128_256, 151_936, 152_064, 262_144, 900_000])
def test_a_plan_holds_the_row_and_fits(vocabulary):
    plan = emulated_plan(vocabulary)
    assert plan.cluster in (1, 2, 4, 8, 16)
    assert plan.threads % 32 == 0
    assert plan.columns % 8 == 0
    assert (plan.cluster - 1) * plan.columns < vocabulary + 8 * plan.cluster
    assert plan.cluster * plan.columns >= vocabulary
    assert 4 * plan.columns < plan.shared_bytes <= 227 << 10
    if vocabulary <= 152_064:  # three blocks on a multiprocessor, each with a KiB of the system's
        assert 3 * (plan.shared_bytes + 1024) <= 228 << 10


def test_a_row_that_no_cluster_holds():
    assert emulated_plan(1_000_000).cluster == 0
