"""Functions inside the forward of a head: what they get, who sees their results, and what is left of them."""

import copy
import pickle
import threading

import pytest
import torch

from exgrpo.heads.inside import close_head, compute, compute_during, is_open, is_outermost, open_head


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


def test_threads_share_a_head():
    """Each one's function runs for its own hidden states, and a call without a function is the head's own."""
    head, together = torch.nn.Linear(4, 6), threading.Barrier(3, timeout=60)
    open_head(head)
    hidden = {name: torch.randn(rows, 4) for name, rows in (("largest", 2), ("sum", 3), ("own", 5))}
    functions = {"largest": largest, "sum": lambda given: torch.nn.functional.linear(*given).sum(-1)}
    found = {}

    def run(name):
        def forward():
            together.wait()  # all are under way
            output = head(hidden[name])
            together.wait()
            return output

        found[name] = compute_during(head, functions[name], forward)[1] if name in functions else forward()

    threads = [threading.Thread(target=run, args=(name,)) for name in hidden]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    logits = {name: torch.nn.functional.linear(rows, head.weight, head.bias) for name, rows in hidden.items()}
    expected = {"largest": logits["largest"].amax(-1), "sum": logits["sum"].sum(-1), "own": logits["own"]}
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda head: pickle.loads(pickle.dumps(head))], ids=["deep", "pickle"]
)
def test_a_copy_computes_with_its_own_weight(copied):
    head, hidden = torch.nn.Linear(4, 6), torch.randn(3, 4)
    open_head(head)
    twin = copied(head)
    with torch.no_grad():
        twin.weight.zero_()
        twin.bias.fill_(5)
    torch.testing.assert_close(compute(twin, hidden, largest), torch.full((3,), 5.0))
    torch.testing.assert_close(compute(head, hidden, largest), head(hidden).amax(-1))


def test_a_closed_head_is_what_it_was():
    head = torch.nn.Linear(4, 6)
    before = dict(vars(head))
    open_head(head)
    assert is_open(head)
    assert is_outermost(head)
    close_head(head)
    assert not is_open(head)
    assert vars(head) == before
