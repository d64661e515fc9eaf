"""Which runs a study needs."""

import hashlib
import json

import pytest

from exgrpo.train.common.errors import ConfigError
from studies.origin import ROOT
from studies.results import ResultFile
from studies.run import RESULTS
from studies.study import key_of, load_study, settings_of
from tests.studies.plans import PLAN, with_function, write

SEARCH = {"over": {"optimizer.lr": [1e-4, 3e-4]}, "seeds": [100, 101]}
CLIMB = {**SEARCH, "trials": 4}
AT, TWO = {"settings": {"optimizer.lr": 1e-4}}, {"starts": [{"optimizer.lr": 3e-4}], "trials": 1}


def nothing(key):
    return None


def test_layers_are_recipe_study_task_arm_choice_and_seed(tmp_path):
    (tmp_path / "mine.yaml").write_text("experience.mu: 0.25\noptimizer.lr: 5.0e-4")
    tasks = {"countdown": {"recipes": ["builtin:countdown"], "settings": {"steps": 5, "questions": 16}}}
    arms = {"one": {"recipes": ["mine.yaml"], "settings": {"questions": 32}}}
    study = load_study(write(tmp_path, tasks=tasks, arms=arms, baseline="one"))
    config = study.planned("countdown", "one", 7, {}).config
    assert (config.steps, config.questions, config.seed) == (5, 32, 7)
    assert (config.experience.mu, config.optimizer.lr, config.rollout.max_tokens) == (0.25, 5e-4, 24)
    assert study.planned("countdown", "one", 7, {"optimizer.lr": 1e-3}).config.optimizer.lr == 1e-3


def test_a_key_is_of_what_a_run_computes(tmp_path):
    study = load_study(write(tmp_path))
    run, other = (study.planned("countdown", arm, 0, {}) for arm in PLAN["arms"])
    assert run.key == study.planned("countdown", "without", 0, {}).key != other.key
    assert run.key != study.planned("countdown", "without", 1, {}).key
    same = load_study(write(tmp_path, title="Another", settings={**PLAN["settings"], "output.folder": "/elsewhere"}))
    assert same.planned("countdown", "without", 0, {}).key == run.key
    spelt = run.config.model_copy(update={"preflight": "stop"})  # the default, written out
    assert key_of(spelt) == run.key
    assert settings_of(run.config)["experience.ratio"] == 0
    plain = json.dumps(settings_of(run.config), sort_keys=True)
    assert run.key == hashlib.sha256(plain.encode()).hexdigest()[:16], "stored results are found by this"
    done = ResultFile(RESULTS).by_key
    assert all(one.key in done for one in load_study(ROOT / "studies" / "diversity.yaml").known(nothing))


def test_a_key_is_also_of_the_text_of_own_functions(tmp_path):
    path = with_function(tmp_path)

    def keys():
        study = load_study(path)
        return [study.planned("countdown", arm, 0, {}).key for arm in ("without", "with")]

    before = keys()
    (tmp_path / "other.py").write_text("nobody imports this")
    assert keys() == before
    seen = {before[1]}
    for name in ("mine.py", "near/__init__.py", "near/inner.py", "far.py"):
        (tmp_path / name).write_text((tmp_path / name).read_text() + "\n")
        without, replayed = keys()
        assert without == before[0]
        assert replayed not in seen, name
        seen.add(replayed)
    (tmp_path / "mine.py").write_text("def first(")
    with pytest.raises(ConfigError, match=r"arm with on countdown: prioritise function .*cannot run .*SyntaxError"):
        keys()
    (tmp_path / "mine.py").unlink()
    with pytest.raises(ConfigError, match=r"mine.py: there is no such file; a path in a study"):
        keys()


def test_a_wrong_function_is_told_before_the_first_run(tmp_path):
    path = with_function(tmp_path)
    (tmp_path / "mine.py").write_text("def first(candidates, options):\n    return candidates.count\n")
    with pytest.raises(ConfigError) as error:
        load_study(path)
    assert str(error.value).startswith(f"{path}, arm with on countdown: experience.prioritise {tmp_path}/mine.py:first")
    assert "it gives Priority(log_weight)" in str(error.value)


def test_runs_go_seed_by_seed_and_equal_ones_of_two_arms_are_needed_once(tmp_path):
    runs = list(load_study(write(tmp_path)).known(nothing))
    assert [(run.arm, run.seed) for run in runs] == [("without", 0), ("with", 0), ("without", 1), ("with", 1)]
    equal = load_study(write(tmp_path, arms={"one": {}, "two": {}}, baseline="one"))
    assert [run.seed for run in equal.known(nothing)] == [0, 1]


def test_an_arm_chooses_the_best_mean_over_the_seeds_of_the_search(tmp_path):
    study = load_study(write(tmp_path, search=SEARCH))
    searched = list(study.known(nothing))
    assert {run.seed for run in searched} == {100, 101}
    assert len(searched) == 2 * 2 * 2
    heights = {}
    for arm, of_arm in (("without", ((0.9, 0.1), (0.6, 0.7))), ("with", ((0.5, 0.6), (0.8, 0.2)))):
        for (_, runs), of_choice in zip(study.searched("countdown", arm, nothing)[0], of_arm, strict=True):
            heights |= {run.key: height for run, height in zip(runs, of_choice, strict=True)}
    assert study.chosen("countdown", "without", heights.get) == {"optimizer.lr": 3e-4}
    assert study.chosen("countdown", "with", heights.get) == {"optimizer.lr": 1e-4}
    del heights[study.searched("countdown", "with", nothing)[0][0][1][0].key]
    assert study.chosen("countdown", "with", heights.get) is None
    counted = [run for run in study.known(heights.get) if run.seed < 100]
    assert [(run.arm, run.seed, dict(run.chosen)) for run in counted] == [
        ("without", seed, {"optimizer.lr": 3e-4}) for seed in (0, 1)
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"baseline": "none"}, "baseline 'none' is none of the arms, without, with"),
        ({"search": {**SEARCH, "seeds": [1]}}, "share [1]"),
        ({"arms": {"without": {"settings": {"experience.ratoi": 0}}}}, "arm without on countdown: unknown key"),
        ({"arms": {"without": {"recipes": ["nowhere.yaml"]}}}, "nowhere.yaml: no such recipe"),
        ({"search": {"over": {"optimizer.lr": [1e-4, 7]}, "seeds": [100]}}, "optimizer.lr"),
        ({"search": {**CLIMB, "over": {"optimizer.lr": [1.0]}}}, ", none of those searched over"),
        ({"search": CLIMB, "arms": {"without": AT | {"search": {"optimizer.lrr": [1]}}}}, "optimizer.lrr"),
        ({"search": CLIMB, "arms": {"without": AT | TWO}}, "arm without: 2 starts need as many trials, and it has 1"),
        ({"settings": {"evaluation.samples": 1}}, "evaluation.samples to 2, 4, 8"),
        ({"settings": {"evaluation.samples": 4, "data.test": None}}, "set data.test"),
        ({"claims": [{"text": "?", "arm": "third", "sign": 1}]}, "claims.0.arm 'third' is none of the arms"),
        ({"sedes": [1]}, "unknown key 'sedes'; did you mean 'seeds'?"),
    ],
)
def test_a_mistake_is_told_before_the_first_run(tmp_path, changes, message):
    with pytest.raises(ConfigError) as error:
        load_study(write(tmp_path, **changes))
    assert str(error.value).count("arm without on") <= 1
    assert message in str(error.value)
    assert "trial.yaml" in str(error.value) or "nowhere" in message


def test_a_file_that_is_missing_or_no_yaml(tmp_path):
    with pytest.raises(ConfigError, match="no such study"):
        load_study(tmp_path / "trial.yaml")
    (tmp_path / "trial.yaml").write_text("arms: [")
    with pytest.raises(ConfigError, match=r"trial.yaml: not valid YAML"):
        load_study(tmp_path / "trial.yaml")
