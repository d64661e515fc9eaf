"""The vocabulary split over 2 and 4 processes: each rank gets the whole results and its share of the gradients."""

from itertools import product

import pytest
import torch
import torch.distributed as dist

from exgrpo.kernels import linear_log_prob, linear_policy_loss, reference, sequence_entropy
from tests.gloo import on_ranks

from .conftest import backends_of, set_chunk_bytes, set_plan_fields
from .support import INTERPRETING, make_case, make_tokens

FOUR = [30, 0, 51, 20]
PAIRS = [[1, 100], [0, 101]]
LENGTH = 8 if INTERPRETING else 16
ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 2.0**-7}
"""Of gradients, which have the dtype of their leaf; by the norm of the whole one."""
OPTIONS = [{}, {"temperature": 0.7, "softcap": 5.0}, {"allowed_tokens": (1, 6, 0, 30, 3)}]


def check_split(rank, sizes, group, backend, options, dtype):
    """Every rank makes the same case, keeps its rows of the head, and compares with the oracle on the whole."""
    torch.manual_seed(0)
    case = make_case((3, LENGTH), 24, sum(sizes), dtype, "cpu", bias=True, **options)
    with torch.no_grad():
        case.bias[case.target[0, 1]] = -200.0  # its exponential overflows where the target is the anchor
    case.target[1] = -100
    old, advantage, replayed = make_tokens(case)
    start = sum(sizes[:rank])
    mine = slice(start, start + sizes[rank])
    hidden, weight, bias = (
        x.detach().clone().requires_grad_() for x in (case.hidden, case.weight[mine], case.bias[mine])
    )
    if rank == 1:  # it must take the same passes as the others, who would wait for it
        weight = weight.detach().t().contiguous().t().requires_grad_()
    leaves, whole = (hidden, weight, bias), case.to(torch.float64)
    where = {"bias": bias, "vocab_group": group, "backend": backend, **case.options}
    exact_where = {"bias": whole.bias, **whole.options}
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}

    def compare(found, exact):
        torch.testing.assert_close([x.double() for x in found], list(exact), **tolerance)

    def compare_gradients(loss, exact_loss):
        found = torch.autograd.grad(loss, leaves)
        exact = list(whole.gradients(exact_loss))
        for values, all_of_it, part in zip(found, exact, (slice(None), mine, mine), strict=True):
            off = (values.double() - all_of_it[part]).norm()
            assert off <= ROUNDING[dtype] * all_of_it.norm()
        same_on_all_ranks(found[0], group)

    result = linear_log_prob(hidden, weight, case.target, **where)
    exact = reference.linear_log_prob(whole.hidden, whole.weight, case.target, **exact_where)
    compare(result, exact)
    same_on_all_ranks(torch.stack(tuple(result)), group)
    upstream = torch.randn(2, 3, LENGTH, dtype=torch.float64)
    upstream[:, 2, 5:] = 0
    compare_gradients(*((torch.stack(tuple(x)) * upstream.to(x[0].dtype)).sum() for x in (result, exact)))
    more = {"replayed": replayed, "entropy_coef": 0.0 if options else 0.05}
    result = linear_policy_loss(hidden, weight, case.target, old, advantage, **more, **where)
    exact = reference.linear_policy_loss(whole.hidden, whole.weight, case.target, old, advantage, **more, **exact_where)
    compare(result, exact)
    compare_gradients(result.loss, exact.loss)

    word = case.target[2, 1].item() - start
    broken = weight.detach().clone()
    if 0 <= word < len(broken):
        broken[word, 0] = torch.nan
    assert linear_log_prob(hidden, broken, case.target, **where).log_prob[2, 1].isnan()

    for more in (where, exact_where) if "allowed_tokens" in options else ():
        ids, offsets = case.options["allowed_tokens"]
        more["allowed_tokens"] = ids[: offsets[LENGTH]], offsets[: LENGTH + 1]
    packed, bounds = slice(0, 1), torch.tensor([0, 4, LENGTH])
    found = sequence_entropy(hidden[packed].squeeze(0), weight, case.target[0], bounds, **where)
    exact = reference.sequence_entropy(whole.hidden[0], whole.weight, case.target[0], bounds, **exact_where)
    compare([found], [exact])

    where.pop("allowed_tokens", None)
    case.target[0, 3] = sum(sizes)
    with pytest.raises(ValueError, match=rf"\[0, {sum(sizes)}\).*the first is {sum(sizes)} at position 3"):
        linear_log_prob(hidden, weight, case.target, **where)


def same_on_all_ranks(values, group):
    gathered = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, values.detach().contiguous(), group=group)
    assert all(torch.equal(values, other) for other in gathered)


def run_rank(rank, dtypes):
    """The four ranks are one group, and two groups beside each other, each with splits of its own."""
    set_chunk_bytes(pytest.MonkeyPatch(), 7 * 101 * 4)
    if INTERPRETING:
        from exgrpo.kernels.triton_chunks.launch import Tile

        set_plan_fields(pytest.MonkeyPatch(), fused=torch.bfloat16 in dtypes, tile=Tile(32, 32, 32, 4, 2))
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for backend, options, dtype in product(backends_of("cpu"), OPTIONS, dtypes):
        check_split(rank, FOUR, dist.group.WORLD, backend, options, dtype)
        check_split(rank % 2, PAIRS[rank // 2], pairs[rank // 2], backend, options, dtype)


WIDE = (torch.float64, torch.float32)
DTYPES = [(torch.bfloat16,), pytest.param(WIDE, marks=pytest.mark.long)] if INTERPRETING else [(torch.bfloat16, *WIDE)]


@pytest.mark.parametrize("dtypes", DTYPES)
def test_split_vocabulary(dtypes, tmp_path):
    (tmp_path / "ranks").mkdir()
    on_ranks(run_rank, 4, tmp_path / "ranks", dtypes)
