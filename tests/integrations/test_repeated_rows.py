"""In TRL and in verl, too, rows that ask the same are one question."""

from pathlib import Path

import pytest

pytest.importorskip("trl", reason="trl is not installed: pip install 'trl>=1.16,<2'", exc_type=ImportError)

from datasets import Dataset, concatenate_datasets

from exgrpo.integrations.trl_replay import distinct_rows
from tests.integrations.trl_trainers import QUESTIONS, exgrpo, questions

pytestmark = pytest.mark.usefixtures("one_thread")

ROW = {
    "data_source": "sums",
    "prompt": [{"role": "user", "content": "1 + 1"}],
    "reward_model": {"ground_truth": "2", "style": "rule"},
    "extra_info": {"index": 0, "split": "train"},
}


def test_a_run_in_trl_on_repeated_rows_is_that_on_each_row_once(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    once = questions().add_column("index", list(range(QUESTIONS)))
    often = concatenate_datasets([once, *(once.map(lambda row: {"index": row["index"] + 100}) for _ in range(4))])
    runs = [
        exgrpo(tmp_path / str(len(data)), model, data=data, num_train_epochs=2, refills=1) for data in (once, often)
    ]
    assert capsys.readouterr().out == f"train_dataset: {5 * QUESTIONS} rows, {QUESTIONS} questions\n"
    for trainer in runs:
        trainer.train()
    histories = [trainer.state.log_history for trainer in runs]
    assert len(histories[0]) > 4
    assert histories[0][-2]["experience/replayed"] > 0
    for log, other in zip(*histories, strict=True):  # where tensors begin in memory changes the last bit of their sums
        measured = {name for name in log if "time" in name or "second" in name}
        for name in log.keys() - measured:
            assert log[name] == pytest.approx(other[name], rel=1e-5, abs=1e-6), name
    tables = [trainer.replay.memory.table.column("question").tolist() for trainer in runs]
    assert tables[0] == tables[1]
    with pytest.raises(ValueError, match=r"takes 16 different questions and there are 12 in 60 rows"):
        exgrpo(tmp_path, model, data=often, per_device_train_batch_size=64)


@pytest.mark.parametrize("whole", [False, True], ids=["rows", "data set"])
def test_rows_are_one_question_unless_a_column_differs_that_may_decide_on_a_reward(whole: bool) -> None:
    rows = [
        ROW,
        ROW | {"extra_info": {"index": 7, "split": "train"}},
        ROW | {"reward_model": {"ground_truth": "3", "style": "rule"}},
        ROW | {"extra_info": {"index": 0, "split": "test"}},
        ROW | {"prompt": [{"role": "system", "content": "Be brief."}, *ROW["prompt"]]},
        ROW,
    ]
    data = Dataset.from_list(rows) if whole else rows
    assert distinct_rows(data) == [0, 2, 3, 4]
    assert distinct_rows(data, ()) == [0, 1, 2, 3, 4]
