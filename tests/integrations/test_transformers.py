"""Patched causal LMs against their own logits: architectures, loss, gradients, and what else a user does with them."""

import copy
import inspect
import io
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from exgrpo.integrations.transformers import MARK, patch_lm_head, unpatch_lm_head  # noqa: E402

from . import tiny  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def own_results(model, batch, temperature=1.0):
    """Log-probability and entropy of each label in float64, from the model's own logits, and its own loss."""
    output = model(**batch)
    exact = (output.logits[:, :-1].double() / temperature).log_softmax(-1)
    target = batch["labels"][:, 1:]
    kept = target != -100
    log_prob = exact.gather(-1, target.clamp(min=0)[..., None]).squeeze(-1)
    entropy = -(exact.exp() * exact).sum(-1)
    return output.loss, *(torch.nn.functional.pad(x * kept, (0, 1)) for x in (log_prob, entropy))


def gradients(model, loss):
    """Of all parameters, 0 where one takes no part."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    pairs = zip(parameters, found, strict=True)
    return dict(zip(names, [torch.zeros_like(p) if g is None else g for p, g in pairs], strict=True))


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_an_architecture_gives_what_its_own_logits_give(name):
    model, batch = tiny.model(name).double(), tiny.batch()
    loss, log_prob, entropy = own_results(model, batch)
    upstream = torch.randn(2, *log_prob.shape, dtype=torch.float64)
    exact = gradients(model, loss + (upstream[0] * log_prob + upstream[1] * entropy).sum())
    # Code of the model that computes in float32 (rotary embeddings, routers) does so on both sides; only logits that it
    # rounds to float32 before its own loss differ, by their rounding.
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if name in tiny.FLOAT32_LOGITS else {"rtol": 1e-9, "atol": 1e-11}

    found = patch_lm_head(model)(**batch)
    assert "logits" not in found
    torch.testing.assert_close([found.log_prob, found.entropy], [log_prob, entropy], **tolerance)
    torch.testing.assert_close(found.loss.double(), loss.double(), rtol=1e-6, atol=1e-6)  # theirs: always in float32
    ours = gradients(model, found.loss + (upstream[0] * found.log_prob + upstream[1] * found.entropy).sum())
    torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_nearer_to_float64_than_the_model_itself(dtype):
    model, batch = tiny.model("llama", scale=1.0), tiny.batch()
    model.to(dtype)
    exact_head = copy.deepcopy(model.lm_head).double()
    hidden = model.model(input_ids=batch["input_ids"]).last_hidden_state
    exact = exact_head(hidden.double())[:, :-1].log_softmax(-1)
    target = batch["input_ids"][:, 1:, None]
    exact = exact.gather(-1, target).squeeze(-1)
    rounded = model(batch["input_ids"]).logits[:, :-1].float().log_softmax(-1).gather(-1, target).squeeze(-1)
    found = patch_lm_head(model)(batch["input_ids"], labels=batch["input_ids"]).log_prob[:, :-1]
    assert found.dtype == torch.float32
    error, own_error = (float((x - exact).abs().max().detach()) for x in (found, rounded))
    assert error < 0.05 * own_error


def test_autocast_and_gradient_checkpointing():
    model, batch = tiny.model("llama"), tiny.batch()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    with torch.autocast("cpu", torch.bfloat16):
        loss, log_prob, entropy = own_results(model, batch)
        exact = gradients(model, loss + entropy.mean())
        found = patch_lm_head(model)(**batch)
        ours = gradients(model, found.loss + found.entropy.mean())
    torch.testing.assert_close(found.log_prob.double(), log_prob, rtol=2**-7, atol=2**-6)
    torch.testing.assert_close(ours, exact, rtol=2**-4, atol=2**-6)


def test_compiled_without_a_graph_break():
    model, batch = patch_lm_head(tiny.model("gemma2")), tiny.batch()
    exact = model(**batch)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = compiled(**batch)
    torch.testing.assert_close([found.log_prob, found.entropy], [exact.log_prob, exact.entropy])
    torch.testing.assert_close(gradients(model, found.loss), gradients(model, exact.loss))


def test_what_else_the_model_returns_is_passed_on_by_its_own_names():
    model, batch = tiny.model("qwen3_moe"), tiny.batch()
    own = model(**batch, use_cache=True, output_hidden_states=True)
    found = patch_lm_head(model)(**batch, use_cache=True, output_hidden_states=True)
    assert found.keys() - {"log_prob", "entropy"} == own.keys() - {"logits"}
    assert len(found) >= 7
    torch.testing.assert_close(found.hidden_states, own.hidden_states)


def test_generation_is_as_before():
    model, prompt = tiny.model("llama"), tiny.batch()["input_ids"]
    own = model.generate(prompt, max_new_tokens=5, do_sample=False)
    logits = model(prompt).logits
    patch_lm_head(model)
    assert torch.equal(model.generate(prompt, max_new_tokens=5, do_sample=False), own)
    assert torch.equal(model(prompt).logits, logits)


def test_temperature_shifted_labels_and_the_count_of_a_whole_batch():
    model, batch = tiny.model("cohere").double(), tiny.batch()
    _, log_prob, entropy = own_results(model, batch, temperature=0.6)
    own_loss = model(**batch, num_items_in_batch=torch.tensor(40)).loss
    patch_lm_head(model)
    found = model(**batch, temperature=0.6)
    torch.testing.assert_close([found.log_prob, found.entropy], [log_prob, entropy])
    shifted = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    again = model(batch["input_ids"], shift_labels=shifted, temperature=torch.full(shifted.shape, 0.6).double())
    torch.testing.assert_close(again.log_prob, found.log_prob, rtol=1e-6, atol=1e-6)
    counted = model(**batch, num_items_in_batch=torch.tensor(40)).loss
    torch.testing.assert_close(counted, own_loss.double(), rtol=1e-6, atol=1e-6)
    as_tuple = model(**batch, temperature=0.6, return_dict=False)
    torch.testing.assert_close(as_tuple[:3], (found.loss, found.log_prob, found.entropy))
    assert isinstance(model(batch["input_ids"], return_dict=False), tuple)
    nothing = model(batch["input_ids"], labels=torch.full_like(batch["labels"], -100))
    assert nothing.loss == 0
    with pytest.raises(ValueError, match=r"temperature: .*labels"):
        model(batch["input_ids"], temperature=0.6)


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded])
def test_a_copy_is_patched_by_itself(copied):
    model, batch = patch_lm_head(tiny.model("llama")), tiny.batch()
    twin = copied(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert inspect.signature(twin.forward) == inspect.signature(model.forward)
    own = unpatch_lm_head(copy.deepcopy(twin))
    torch.testing.assert_close(twin(**batch).log_prob.double(), own_results(own, batch)[1], rtol=1e-5, atol=1e-6)
    assert "logits" in own(**batch)


def test_threads_share_a_model():
    """One thread's labels, another one's, and a forward without labels, in turns that nobody decides."""
    model, batch = patch_lm_head(tiny.model("llama")), tiny.batch()
    tokens = {rows: batch["input_ids"][:1].repeat(rows, 1).flip(1 if rows == 2 else 0) for rows in (1, 2, 3)}

    def run(rows):
        labels = None if rows == 3 else tokens[rows]
        with torch.no_grad():
            output = model(tokens[rows], labels=labels)
        return output.logits if labels is None else output.log_prob

    expected = {rows: run(rows) for rows in tokens}
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as threads:
            found = list(threads.map(lambda call: (call % 3 + 1, run(call % 3 + 1)), range(60)))
    finally:
        sys.setswitchinterval(before)
    for rows, result in found:
        torch.testing.assert_close(result, expected[rows])


@pytest.mark.parametrize("name", ["llama", "qwen2"])  # a head of its own, a tied one
def test_weights_that_accelerate_loads_when_a_module_is_called(name):
    """Its hooks move what a module gets to the module's device, too, where a model is on several."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
    model, batch = tiny.model(name), tiny.batch()
    own = model(**batch).loss
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    torch.testing.assert_close(patch_lm_head(model)(**batch).loss, own)
    assert model.get_output_embeddings().weight.is_meta


def test_unpatched_it_is_the_model_that_it_was():
    model, batch = tiny.model("llama"), tiny.batch()
    keys, logits = set(vars(model)), model(**batch).logits
    signature = inspect.signature(model.forward)
    patch_lm_head(model)
    assert inspect.signature(model.forward) == signature
    with pytest.raises(ValueError, match="patched already"):
        patch_lm_head(model)
    assert unpatch_lm_head(model) is model
    assert set(vars(model)) == keys
    assert torch.equal(model(**batch).logits, logits)
    with pytest.raises(ValueError, match="is not patched"):
        unpatch_lm_head(model)


def test_modes_of_modules_survive():
    model = tiny.model("llama").train()
    model.model.layers[0].eval()
    patch_lm_head(model)
    assert model.training
    assert model.model.layers[1].training
    assert not model.model.layers[0].training


class NormedHead(torch.nn.Linear):
    def forward(self, hidden):
        return torch.nn.functional.linear(hidden, torch.nn.functional.normalize(self.weight) * 5)


def test_refused_with_a_reason():
    batch = tiny.batch()
    model = tiny.model("llama")
    with pytest.raises(TypeError, match="Linear.*no output embedding"):
        patch_lm_head(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="DataParallel.*inner one"):
        patch_lm_head(torch.nn.DataParallel(model))
    with pytest.raises(ValueError, match="expected auto"):
        patch_lm_head(model, backend="none")
    assert "logits" in model(**batch)  # and left as it was
    patch_lm_head(model)
    with pytest.raises(ValueError, match="labels: expected shape .*logits_to_keep"):
        model(**batch, logits_to_keep=3)
    assert "logits" in model(batch["input_ids"])  # the error has left nothing behind
    model.lm_head = torch.nn.Linear(32, tiny.VOCABULARY, bias=False)
    with pytest.raises(RuntimeError, match="head was replaced"):
        model(**batch)

    normed = tiny.model("llama")
    normed.lm_head = NormedHead(32, tiny.VOCABULARY, bias=False)
    with pytest.raises(ValueError, match="LlamaForCausalLM is no plain linear layer"):
        patch_lm_head(normed)
    assert not hasattr(normed, MARK)

    masked = tiny.model("llama")
    own = masked.forward

    def forward(*args, **kwargs):
        output = own(*args, **kwargs)
        output.logits[..., 7] = -torch.inf
        return output

    masked.forward = forward
    with pytest.raises(ValueError, match="more with its logits"):
        patch_lm_head(masked)
    config = transformers.T5Config(vocab_size=67, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    with pytest.raises(TypeError, match="encoder-decoder"):
        patch_lm_head(transformers.T5ForConditionalGeneration(config))


def test_the_trainer_of_transformers_trains_as_without(tmp_path):
    batch = tiny.batch()
    rows = [{name: values[i] for name, values in batch.items()} for i in range(2)] * 4
    losses = []
    for patch in (lambda model: model, patch_lm_head):
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=3, per_device_train_batch_size=2, logging_steps=1, report_to=[], use_cpu=True
        )
        trainer = transformers.Trainer(patch(tiny.model("qwen2")), arguments, train_dataset=rows)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)
