"""The product by itself against float64: its source on an emulated machine, and on a GPU where there is one."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from exgrpo.kernels.cuda_chunks import cuda_fused
from exgrpo.kernels.cuda_chunks.cuda_fused import TILE_COLUMNS, run_product
from exgrpo.kernels.triton_chunks.fused_product import AnchoredRows, GradientRows, Operands

from .cuda_support import ON_GPU, emulate_product

GPU = pytest.param(
    "gpu", marks=[pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="needs an sm_90 GPU and _cuda.so")]
)


@pytest.fixture(params=["emulated", GPU])
def machine(request):
    return request.param


class Case:
    """Operands in wider matrices, NaN beyond them, and a result in one whose other numbers must stay."""

    def __init__(self, machine, rows, vocabulary, width, *, bias=None, temperature=False):
        self.machine = machine
        self.device = "cuda" if machine == "gpu" else "cpu"
        weight = torch.randn(vocabulary, width) / width**0.5
        self.target = torch.randint(0, vocabulary, (rows,)).to(self.device)
        likely = 2 * torch.rand(rows, 1) * weight[self.target.cpu()]
        self.hidden = self.within(3 * (torch.randn(rows, width) + likely))
        self.weight = self.within(weight)
        self.bias = None if bias is None else torch.randn(vocabulary).to(self.device, bias)
        self.temperature = torch.linspace(0.5, 2.0, rows, device=self.device) if temperature else None
        self.storage = torch.full((rows, -(-vocabulary // 8) * 8 + 8), 7.0, dtype=torch.bfloat16, device=self.device)
        self.out = self.storage[:, :vocabulary]
        self.partial = torch.full((2, -(-vocabulary // TILE_COLUMNS), rows), torch.nan, device=self.device)
        self.anchor = self.logits().gather(1, self.target.unsqueeze(1)).squeeze(1).float()

    def within(self, matrix):
        rows, columns = matrix.shape
        storage = torch.full((rows, -(-columns // 8) * 8 + 8), torch.nan, dtype=torch.bfloat16, device=self.device)
        storage[:, :columns] = matrix
        return storage[:, :columns]

    def logits(self):
        z = self.hidden.double() @ self.weight.double().T
        return z if self.bias is None else z + self.bias.double()

    def run(self, *, out=True, known=None, **schedule):
        operands = Operands(self.hidden, self.weight, self.bias)
        rows = AnchoredRows(self.target, self.anchor, self.temperature)
        with pytest.MonkeyPatch.context() as monkeypatch:
            if self.machine == "emulated":
                emulation = partial(emulate_product, **schedule)
                monkeypatch.setattr(cuda_fused, "launch", lambda arguments, device: emulation(arguments))
            run_product(operands, rows, self.out if out else None, self.partial, known)

    def check(self, *, out=True):
        tau = 1.0 if self.temperature is None else self.temperature.double().unsqueeze(1)
        d = (self.logits() - self.anchor.double().unsqueeze(1)) / tau
        e = d.exp()
        held = self.target >= 0
        e[held, self.target[held]] = 0
        # exp turns an absolute error of d into a relative one of e; d has half of the digits of a sum of D terms.
        size = (self.hidden.double().abs() @ self.weight.double().abs().T).amax(1, keepdim=True) / tau
        if self.bias is not None:
            size = size + self.bias.double().abs().max() / tau
        roundings = (16 + 4 * size) * 2.0**-23
        for found, terms in zip(self.partial, (e, e * d.clamp(min=-1e4)), strict=True):
            for tile, columns in enumerate(terms.split(TILE_COLUMNS, 1)):
                # Terms of both signs: the error is that of the largest, not of the sum.
                error = (found[tile] - columns.sum(1)).abs()
                weighed = (1 + d.abs()) * e
                bound = (roundings * weighed.split(TILE_COLUMNS, 1)[tile]).sum(1)
                assert (error <= bound + 1e-30).all()
        if out:
            assert ((self.out.double() - e).abs() <= (roundings + 2.0**-8) * e + 1e-30).all()
        ended = -(-self.out.shape[1] // 8) * 8  # tensor copies write 16 bytes as a whole
        assert (self.storage[:, ended if out else 0 :] == 7).all()


@pytest.mark.parametrize("options", [{}, {"bias": torch.float32, "temperature": True}], ids=["plain", "bias"])
@pytest.mark.parametrize(
    ("rows", "vocabulary", "width"), [(128, 128, 64), (1, 1, 8), (130, 200, 72), (37, 75, 45), (7, 129, 200)], ids=str
)
def test_exponentials_and_sums(rows, vocabulary, width, options, machine):
    case = Case(machine, rows, vocabulary, width, **options)
    case.run()
    case.check()


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(
    ("rows", "vocabulary", "width", "clusters"), [(130, 200, 72, 1), (37, 475, 45, 2), (7, 129, 200, 1)]
)
def test_the_gradient_of_the_logits(rows, vocabulary, width, clusters, entropy, machine):
    """F = exp(d) (intercept + slope d) in the place of exp(d); its own value at the target, if that is held."""
    case = Case(machine, rows, vocabulary, width, bias=torch.float32, temperature=True)
    case.target[::5] = -1
    at_target, intercept, slope = torch.randn(3, rows, device=case.device)
    case.run(known=GradientRows(at_target, *((intercept, slope) if entropy else (None, None))), clusters=clusters)
    d = (case.logits() - case.anchor.double().unsqueeze(1)) / case.temperature.double().unsqueeze(1)
    line = intercept.double().unsqueeze(1) + slope.double().unsqueeze(1) * d if entropy else torch.ones_like(d)
    exact, terms = d.exp() * line, d.exp() * (1 + 4 * entropy * (1 + d.abs()))
    held = case.target >= 0
    exact[held, case.target[held]] = at_target[held].double()
    terms[held, case.target[held]] = at_target[held].double().abs()
    assert ((case.out.double() - exact).abs() <= 2.0**-8 * exact.abs() + 2e-5 * terms).all()
    ended = -(-vocabulary // 8) * 8
    assert (case.storage[:, ended:] == 7).all()
    assert case.partial.isnan().all()


# Row tiles by clusters that have several, an odd number of them or one; and more rows than share a stretch of words.
@pytest.mark.parametrize(("rows", "clusters"), [(140, 1), (140, 2), (140, 5), (128 * 16 + 1, 17)])
def test_tiles_in_turn(rows, clusters, machine):
    """Forward only finds the same sums; some targets are on other ranks."""
    case = Case(machine, rows, 300 if rows == 140 else 130, 130 if rows == 140 else 8, temperature=True)
    case.target[::3] = -1
    case.run(out=False, clusters=clusters)
    case.check(out=False)
    sums = case.partial.clone()
    case.run(clusters=clusters)
    case.check()
    assert torch.equal(case.partial, sums)


def test_a_broken_token_shows_and_breaks_no_other(machine):
    case = Case(machine, 40, 200, 64)
    case.run()
    sums = case.partial.clone()
    case.hidden[5, 3] = torch.nan
    case.run()
    others = torch.arange(40, device=case.device) != 5
    assert case.partial[:, :, 5].isnan().all()
    assert torch.equal(case.partial[:, :, others], sums[:, :, others])


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("backwards", [False, True])
def test_the_machines_schedule_does_not_matter(backwards, eager):
    """Whoever comes first, and whether copies take long or no time: the same bits, and nobody waits for ever."""
    case = Case("emulated", 260, 260, 500)
    case.run(clusters=2)
    sums, out = case.partial.clone(), case.out.clone()
    case.partial.fill_(torch.nan)
    case.run(clusters=2, backwards=backwards, eager=eager)
    assert torch.equal(case.partial, sums)
    assert torch.equal(case.out, out)
