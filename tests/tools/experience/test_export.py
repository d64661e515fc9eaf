"""What a run has stored becomes a data set, whole or not at all."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from exgrpo.tools.experience.export import export, kinds
from exgrpo.tools.experience.sources import open_run
from exgrpo.train.checkpoint.listing import EXPERIENCE
from exgrpo.train.common.errors import CheckpointError, DataError, OutputError
from exgrpo.train.common.step_batch import LOG_PROB_SOURCES
from exgrpo.train.data.prompts import PromptFormat
from exgrpo.train.data.questions import question_set
from exgrpo.train.data.rows import Row
from tests.tools.experience.runs import config, make_run, pretrained, questions, rows_of, some
from tests.train.batches import same, stored_rows
from tests.train.files import write_rows


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    run = make_run(folder / "run", some())
    assert export(run, folder / "set") == len(some())
    return folder / "set"


def test_the_hubs_library_loads_every_column(exported, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets

    loaded = datasets.load_dataset(str(exported), split="train", cache_dir=str(tmp_path))
    assert loaded.column_names == list(kinds())
    assert len(loaded) == len(some())
    for i, (row, one) in enumerate(zip(loaded, some(), strict=True)):
        question = questions()[one.question]
        assert (row["question"], row["answer"], row["source"]) == (question.text, question.gold, question.source)
        assert tuple(row["prompt_ids"]) == question.prompt
        assert row["response_ids"] == one.response.tolist()
        assert np.array_equal(np.array(row["log_prob"], np.float32), one.log_prob)
        assert row["response_mask"] == (None if one.response_mask is True else one.response_mask.tolist())
        assert row["allowed_tokens"] == one.allowed_tokens
        assert (row["finished"], row["reward"]) == (one.finished, one.reward)
        assert row["old_log_probs_from"] == LOG_PROB_SOURCES[one.old_log_probs_from]
        assert (row["step"], row["key"], row["model"]) == (one.step, one.key, "builtin:arithmetic")
        assert (row["advantage"], row["group_successes"], row["group_answers"]) == (0.25 + i, 1 + i % 2, 3)
        assert row["replays"] == i
    assert loaded[0]["response"] == f"<think>0</think>\\boxed{{{questions()[0].gold}}}"
    assert loaded[len(loaded) - 1]["response"] == "\\boxed{no"


def test_the_card_says_how_the_data_set_was_made(exported):
    _, head, text = (exported / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(head)["license"] == "unknown"
    assert all(f"| {name} | " in text for name in kinds())
    assert "training step: 5" in text


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", some())
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "mine").write_text("mine")
    with pytest.raises(OutputError, match="exists already and is not empty"):
        export(run, tmp_path / "set")
    assert [path.name for path in (tmp_path / "set").iterdir()] == ["mine"]
    (tmp_path / "set" / "mine").unlink()
    monkeypatch.chdir(tmp_path / "set")
    export(run, Path("."))
    monkeypatch.undo()
    assert (tmp_path / "set" / "README.md").is_file()


def test_an_empty_buffer_and_other_questions_leave_no_folder(tmp_path):
    with pytest.raises(DataError, match="nothing is stored after step 5"):
        export(make_run(tmp_path / "empty", []), tmp_path / "set")
    other = make_run(tmp_path / "other", some(), **{"data.train_limit": 3})
    with pytest.raises(DataError, match="not the questions that .*other was trained on any more"):
        export(other, tmp_path / "set")
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "other"}


def test_the_newest_sound_checkpoint_counts_and_damage_is_named(tmp_path, caplog):
    run = make_run(tmp_path / "run", some(), step=5)
    before = {path.name for path in (run / EXPERIENCE).iterdir()}
    make_run(run, some()[:1], step=7)
    assert open_run(run).step == 7
    (of_newer,) = [path for path in (run / EXPERIENCE).iterdir() if path.name not in before][:1]
    of_newer.write_bytes(bytes(reversed(of_newer.read_bytes())))
    experience = open_run(run)
    assert experience.step == 5
    assert of_newer.name in caplog.text
    assert all(map(same, stored_rows(experience.answers), some()))
    for path in (run / EXPERIENCE).iterdir():
        path.unlink()
    with pytest.raises(CheckpointError, match=r"no sound checkpoint.*is missing"):
        open_run(run)


def test_rows_that_repeat_questions_or_have_no_gold_answer_are_read_as_the_run_has_read_them(tmp_path):
    once = [{"question": one.text, "answer": one.gold, "level": 1} for one in questions()]
    second = once[0] | {"level": 2}
    rows = [*once, {"question": "why?", "answer": "proof", "level": 1}, second, *once]
    mine = write_rows(tmp_path / "mine.jsonl", rows)
    (tmp_path / "mine.py").write_text("def score(response, gold, *, level):\n    return level\n")
    of_file = {"data": {"train": mine, "train_limit": None}}
    export(make_run(tmp_path / "plain", some(), **of_file), tmp_path / "set")
    assert len(rows_of(tmp_path / "set")) == len(some())
    taken = [*once, {"question": "why?", "answer": "proof"}, second]
    asked_rows = [Row(row["question"], row["answer"], None, "") for row in taken]
    asked = question_set("", asked_rows, pretrained().tokenizer, PromptFormat.from_options(config().data))
    own = {**of_file, "reward": {"function": f"{tmp_path}/mine.py:score"}}
    export(make_run(tmp_path / "own", some(), asked=asked, **own), tmp_path / "other")
    assert len(rows_of(tmp_path / "other")) == len(some())
