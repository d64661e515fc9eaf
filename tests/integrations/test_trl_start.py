"""A run in TRL begins with experience from files, and goes on exactly; in two processes: see test_trl_zero3.py."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

pytest.importorskip("trl", reason="trl is not installed: pip install 'trl>=1.16,<2'", exc_type=ImportError)

from transformers import AutoModelForCausalLM

from exgrpo.integrations.trl import ExGRPOTrainer
from exgrpo.tools.experience.convert import ANSWERS, import_answers
from exgrpo.train.common.errors import DataError
from exgrpo.train.run.traces import read_traces
from tests.integrations.trl_trainers import WrittenAnswers, exgrpo, grpo, questions, reward, tokenizer
from tests.train.batches import Row, stored_rows
from tests.train.files import write_rows

pytestmark = pytest.mark.usefixtures("one_thread")

LOGGED = {"question": "prompt", "response": "completion"}
EXPERT = ["3+4=7", "1 + 2 = 3", "12", "\\boxed{5}", "7-2=5", "2*3=6"]
RUN = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "lr_scheduler_type": "constant", "refills": 2}


def trainer_of(folder: Path, model: Path, **changes: Any) -> ExGRPOTrainer:
    return exgrpo(folder, model, **{**RUN, **changes})


def expert(path: Path) -> str:
    """Answers as text, without rewards; the last row is of another question."""
    prompts = list(questions()["prompt"])
    rows = [{"question": prompts[i], "answer": "1", "response": text} for i, text in enumerate(EXPERT)]
    return write_rows(path, [*rows, {"question": "another one", "response": "1"}])


def stored(trainer: ExGRPOTrainer) -> list[Row]:
    return stored_rows(trainer.replay.memory.table.stored())


def begun(trainer: ExGRPOTrainer) -> dict[int, Row]:
    """What is stored when the first generation begins, by question."""
    found: dict[int, Row] = {}
    plan = trainer.replay.plan

    def watched(*args: Any) -> Any:
        found.update({one.question: one for one in stored(trainer)} if not trainer.generation else {})
        return plan(*args)

    trainer.replay.plan = watched
    trainer.train()
    return found


def test_answers_of_an_expert_are_encoded_graded_and_scored(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = trainer_of(tmp_path, model, start=expert(tmp_path / "expert.jsonl"), max_steps=1, temperature=0.7)
    found = begun(trainer)
    assert "the experience starts with 6 answers to 6 questions" in capsys.readouterr().out
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    for i, text in enumerate(EXPERT):
        ids = [*tokenizer()(text, add_special_tokens=False)["input_ids"], tokenizer().eos_token_id]
        assert found[i].response.tolist() == ids
        assert found[i].reward == reward([ids])[0]
        prompt = tokenizer()(questions()[i]["prompt"])["input_ids"]
        with torch.no_grad():
            logits = plain(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1] / 0.7
        expected = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        np.testing.assert_allclose(found[i].log_prob, expected.numpy(), atol=5e-5)
    assert trainer.state.log_history[0]["experience/replayed"] == 2  # at once: half of four questions


def test_a_run_begins_with_completions_that_trl_has_logged(tmp_path: Path, model: Path) -> None:
    grpo(WrittenAnswers, tmp_path / "logged", model, log_completions=True, max_steps=2).train()
    files = sorted((tmp_path / "logged" / "completions").iterdir())
    logged = [row for file in files for row in pq.read_table(file).to_pylist()]
    told = import_answers(f"{tmp_path}/logged/completions/*.parquet", tmp_path / "set", LOGGED)
    assert told.counts[ANSWERS] == 16
    rows = [(row.question, row.response, row.reward, row.advantage, row.step) for row in read_traces(tmp_path / "set")]
    assert rows == [
        tuple(row[name] for name in ("prompt", "completion", "reward", "advantage", "step")) for row in logged
    ]
    trainer = trainer_of(tmp_path / "next", model, start=str(tmp_path / "set"), max_steps=1)
    found = begun(trainer)
    last = {row["prompt"]: row["reward"] for row in logged}
    assert {questions()[i]["prompt"]: one.reward for i, one in found.items()} == last


def test_a_resumed_run_goes_on_exactly_and_starts_from_no_file(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = expert(tmp_path / "expert.jsonl")
    whole = trainer_of(tmp_path / "whole", model, start=source)
    whole.train()
    capsys.readouterr()
    resumed = trainer_of(tmp_path / "resumed", model, start=source)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert "the experience starts" not in capsys.readouterr().out
    for log, other in zip(resumed.state.log_history[2:4], whole.state.log_history[2:4], strict=True):
        for name in ("loss", "grad_norm", "num_tokens", "experience/replayed", "experience/refilled"):
            assert log[name] == pytest.approx(other[name], abs=1e-6), name
    for one, other in zip(stored(resumed), stored(whole), strict=True):
        np.testing.assert_array_equal(one.response, other.response)
        np.testing.assert_allclose(one.log_prob, other.log_prob, atol=1e-6)
    for name, values in whole.replay.memory.arrays().items():
        np.testing.assert_array_equal(resumed.replay.memory.arrays()[name], values, err_msg=name)


def test_gold_answers_tell_questions_apart(tmp_path: Path, model: Path) -> None:
    source = write_rows(tmp_path / "two.jsonl", [{"question": "Say it.", "answer": "2", "response": "2"}])
    data = questions().select(range(6)).add_column("answer", ["x #### 1", "2", "3", "4", "5", "6"])
    data = data.map(lambda row, i: {"prompt": "Say it." if i < 2 else row["prompt"]}, with_indices=True)
    assert list(begun(trainer_of(tmp_path, model, data=data, max_steps=1, start=source))) == [1]


def test_refused(tmp_path: Path, model: Path) -> None:
    others = write_rows(tmp_path / "others.jsonl", [{"question": "another one", "response": "1"}])
    with pytest.raises(DataError, match=r"nothing in .*others\.jsonl can be used"):
        trainer_of(tmp_path, model, start=others).train()
    with pytest.raises(ValueError, match="ratio=0 never replays"):
        trainer_of(tmp_path, model, start=others, ratio=0.0)
