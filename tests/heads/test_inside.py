"""Functions inside the forward of a head: what they get, who sees their results, and what is left of them."""

import pytest
import torch

from exgrpo.heads.inside import compute, compute_during, open_head


class Model(torch.nn.Module):
    """A head of an engine that makes its weight whole for its forward alone, and says what it has seen."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(4, 6)
        self.whole = self.head.weight.detach().clone()
        self.seen = []
        self.head.weight.data = torch.empty(0)
        self.head.register_forward_pre_hook(self.gather)
        self.head.register_forward_hook(self.release)

    def gather(self, head, args):
        head.weight.data = self.whole.clone()

    def release(self, head, args, output):
        head.weight.data = torch.empty(0)
        self.seen.append(output)

    def forward(self, hidden):
        return 2 * self.head(hidden)


def largest(head):
    """The largest logit of each position."""
    return torch.nn.functional.linear(*head).amax(-1)


@pytest.fixture
def case():
    torch.manual_seed(0)
    model, hidden = Model(), torch.randn(3, 4)
    return model, hidden, torch.nn.functional.linear(hidden, model.whole, model.head.bias)


def test_a_function_finds_the_weight_that_the_engine_has_gathered(case):
    model, hidden, logits = case
    open_head(model.head)
    torch.testing.assert_close(compute(model.head, hidden, largest), logits.amax(-1))
    torch.testing.assert_close(model(hidden), 2 * logits)  # other calls are as before
    assert model.head.weight.numel() == 0


@pytest.mark.parametrize("engine_is_first", [True, False])
def test_the_engine_sees_the_result_and_the_model_sees_no_logits(case, engine_is_first):
    model, hidden, logits = case
    late = []
    open_head(model.head)
    if not engine_is_first:
        model.head.register_forward_hook(lambda head, args, output: late.append(output))
    output, result = compute_during(model.head, largest, lambda: model(hidden))
    torch.testing.assert_close(result, logits.amax(-1))
    assert output.shape == (3, 0)
    assert all(seen is result for seen in model.seen + late)
    torch.testing.assert_close(model(hidden), 2 * logits)


def test_an_error_leaves_nothing_behind(case):
    model, hidden, logits = case
    open_head(model.head)
    with pytest.raises(ZeroDivisionError):
        compute_during(model.head, lambda head: 1 / 0, lambda: model(hidden))
    model.head.weight.data = torch.empty(0)
    torch.testing.assert_close(model(hidden), 2 * logits)
    with pytest.raises(RuntimeError, match="did not call its head"):
        compute_during(model.head, largest, lambda: hidden)
