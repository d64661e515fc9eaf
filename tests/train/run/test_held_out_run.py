"""A run on 2 ranks with several held-out sets: the best model, the early end, exports, cards, the hub, the way on."""

import shutil

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from exgrpo.train.checkpoint.listing import find
from exgrpo.train.checkpoint.resume import FINISHED
from tests.train.hub import running
from tests.train.launch import MAIN, completed, launch_by_deepspeed
from tests.train.run.test_run import SMALL, records, untimed

STEPS, PATIENCE, METRIC = 5, 2, "mixed/pass_at/2"
RECIPE = f"""
base: {MAIN.parents[1] / "assets" / "arithmetic" / "recipe.yaml"}
steps: {STEPS}
evaluation:
  every: 1
  patience: {PATIENCE}
  sets:
    mixed: {{source: ["builtin:arithmetic?difficulty=1", "builtin:arithmetic?difficulty=4"], limit: 8, samples: 2}}
checkpoint: {{best: {METRIC}, every: 1, keep: {STEPS}}}
output: {{export_every: 1, push_to_hub: me/mine, trackers: []}}
"""


pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of the run, what it has printed, and the hub that it has uploaded to."""
    root = tmp_path_factory.mktemp("runs")
    (root / "recipe.yaml").write_text(RECIPE)
    small = [argument for argument in SMALL if not argument.startswith("--steps")]
    arguments = (f"--recipe={root / 'recipe.yaml'}", *small, f"--output.folder={root}")
    with running() as hub, pytest.MonkeyPatch.context() as patch:
        for name, value in {"HF_ENDPOINT": hub.address, "HF_TOKEN": hub.token}.items():
            patch.setenv(name, value)
        patch.setenv("HF_HUB_OFFLINE", "0")
        done = completed(MAIN, *arguments, ranks=2, by=launch_by_deepspeed)
    return root / "small", done.stdout, hub


def evaluations(folder):
    return [record for record in records(folder) if record["kind"] == "evaluation"]


def best_and_last(rates):
    """The step of the first highest rate, and the step at which patience or the run is at its end."""
    best = 0
    for step, rate in enumerate(rates):
        best = step if rate > rates[best] else best
        if step - best >= PATIENCE:
            break
    return best, step


def weights(folder):
    return load_file(folder / "model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_run_ends_by_patience_and_keeps_the_best_model(run):
    folder, printed, _ = run
    found = evaluations(folder)
    best, last = best_and_last([record[METRIC] for record in found])
    assert [record["step"] for record in found] == list(range(last + 1))
    assert len([record for record in records(folder) if record["kind"] == "training"]) == last
    assert f"best {METRIC}: {found[best][METRIC]:.3f} after {best} steps" in printed
    assert ("evaluations have not improved it, so the run ends" in printed) == (last - best >= PATIENCE)
    assert (folder / FINISHED).exists()
    exports = {path.name: weights(path) for path in (folder / "exports").iterdir()}
    assert sorted(exports) == [f"step_{step:08d}" for step in range(1, last + 1)]
    start = weights(MAIN.parents[1] / "assets" / "arithmetic")
    assert same(weights(folder / "best"), exports[f"step_{best:08d}"] if best else start)
    assert same(weights(folder / "model"), exports[f"step_{last:08d}"])
    assert not list(folder.rglob("*.unfinished"))
    assert AutoModelForCausalLM.from_pretrained(folder / "best").config.vocab_size >= len(
        AutoTokenizer.from_pretrained(folder / "best")
    )


def test_every_set_has_its_numbers_in_the_log_and_in_the_report(run):
    folder, printed, _ = run
    first, last = evaluations(folder)[0], evaluations(folder)[-1]
    for record in (first, last):
        for heading, rate in (("held_out", "test"), ("mixed", "mixed")):
            assert record[f"{heading}/low"] <= record[f"{rate}/pass_rate"] <= record[f"{heading}/high"]
        parts = [record[f"mixed/source/arithmetic?difficulty={level}"] for level in (1, 4)]
        assert record["mixed/pass_rate"] == pytest.approx(sum(parts) / 2)
    before, after = first["mixed/pass_rate"], last["mixed/pass_rate"]
    assert f"held-out Pass@1 on mixed: before {before:.3f}, after {after:.3f}" in printed
    assert '"name":"mixed"' in (folder / "report.html").read_text()


def test_the_cards_say_what_the_models_are_and_reach(run):
    folder, _, _ = run
    last = evaluations(folder)[-1]
    for place in ("model", "best", "exports/step_00000001"):
        card = ModelCard.load(folder / place / "README.md")
        assert card.data.to_dict()["library_name"] == "transformers"
        assert str(folder) not in card.content
    card = ModelCard.load(folder / "model" / "README.md")
    low, high = last["mixed/low"], last["mixed/high"]
    assert f"| {last['mixed/pass_rate']:.3f} | {low:.3f} to {high:.3f} |" in card.text
    assert "- training questions: builtin:arithmetic\n" in card.text


def test_the_hub_has_the_models(run):
    folder, printed, hub = run
    assert hub.private == {"me/mine": True}
    assert f"uploaded to {hub.address}/me/mine" in printed
    for place, prefix in (("model", ""), ("best", "best/")):
        files = {f"{prefix}{path.name}": path.read_bytes() for path in (folder / place).iterdir()}
        assert files.items() <= hub.files.items()


def test_a_run_that_goes_on_from_its_first_step_ends_alike(run):
    folder, _, _ = run
    again = folder.with_name("again")
    shutil.copytree(folder, again)
    for found in find(again)[:-1]:
        shutil.rmtree(found.folder)
    completed(MAIN, f"--resume={again}", "--output.push_to_hub=None", "--output.export_every=None", ranks=2)
    assert [str(record) for record in untimed(again)] == [str(record) for record in untimed(folder)]
    assert same(weights(again / "best"), weights(folder / "best"))
    assert (again / "best" / "README.md").read_text() == (folder / "best" / "README.md").read_text()
