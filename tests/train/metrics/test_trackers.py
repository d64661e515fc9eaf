"""TensorBoard, wandb and trackio: what they are told, also where a run is continued or a service fails.

The last tests tell the same to the real packages, where those are installed.
"""

import importlib
import json
import resource
import sys
import types
from importlib.machinery import ModuleSpec

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from exgrpo.train import main as program
from exgrpo.train.common import process
from exgrpo.train.common.errors import ConfigError
from exgrpo.train.config.options import Config
from exgrpo.train.metrics.run_log import RunLog, check_trackers, open_trackers
from tests.train.configs import configured


class FakeRun:
    """A run of a service that keeps what it is told."""

    def __init__(self, known):
        self.known, self.step, self.finished = known, 0, False

    def log(self, values, step):
        assert step >= self.step, "wandb takes no step below its latest"
        self.step = step
        self.known.append((step, dict(values)))

    def finish(self):
        self.finished = True


class FakeService:
    """A module whose `init` gives a run; what runs of one name or id were told stays here."""

    def __init__(self, key):
        self.key = key
        self.known, self.inits, self.runs, self.failure = {}, [], [], None

    def init(self, **arguments):
        if self.failure:
            raise self.failure
        self.inits.append(arguments)
        self.runs.append(FakeRun(self.known.setdefault(arguments[self.key], [])))
        return self.runs[-1]

    def finish(self):
        self.runs[-1].finish()


@pytest.fixture
def services(monkeypatch):
    fakes = {"wandb": FakeService("id"), "trackio": FakeService("name")}
    for name, fake in fakes.items():
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, origin="stand-in")
        module.init, module.finish = fake.init, fake.finish
        monkeypatch.setitem(sys.modules, name, module)
    return fakes


def config(*names, **options) -> Config:
    return configured({"output": {"trackers": names, "project": "sums"}, **options})


def train(log, first, last, scale=1.0):
    for step in range(first, last + 1):
        log.metrics(
            "training", {"step": step, "reward": scale * step, "replayed_ratio": float("nan"), "bucket/1": step}
        )
        if step % 2 == 0:
            log.metrics("evaluation", {"step": step, "test/pass_rate": scale * step})


def interrupted_and_continued(folder, settings):
    """Steps 1 to 5 with a checkpoint after step 2, two ends without warning, and steps 3 to 7."""
    first = RunLog(folder, open_trackers(settings, folder, None))
    train(first, 1, 2)
    position = first.position()
    train(first, 3, 5)
    first.close()
    RunLog(folder, open_trackers(settings, folder, position["step"]), resume=position).close()
    second = RunLog(folder, open_trackers(settings, folder, position["step"]), resume=position)
    assert second.position() == position
    train(second, 3, 7, scale=10.0)
    second.close()


def told(known, name):
    return {step: values[name] for step, values in known if name in values}


ONCE = {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.0, 6: 60.0, 7: 70.0}


def test_tensorboard_has_the_numbers_and_forgets_what_a_continued_run_repeats(tmp_path):
    interrupted_and_continued(tmp_path, config("tensorboard"))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {"train/reward", "bucket/1", "test/pass_rate"}
    rewards = [(event.step, event.value) for event in events.Scalars("train/reward")]
    assert rewards == [(1, 1), (2, 2), (3, 30), (4, 40), (5, 50), (6, 60), (7, 70)]
    assert [event.step for event in events.Scalars("test/pass_rate")] == [2, 4, 6]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_continued_run_goes_on_in_the_same_tracker_run_and_repeats_nothing(tmp_path, services, name):
    folder, other = tmp_path / "run", tmp_path / "elsewhere" / "run"
    for each in (folder, other):
        each.mkdir(parents=True)
    interrupted_and_continued(folder, config(name, seed=3))
    service = services[name]
    ((_, known),) = service.known.items()
    assert told(known, "train/reward") == ONCE
    assert told(known, "test/pass_rate") == {2: 2.0, 4: 4.0, 6: 60.0}
    assert len([values for _, values in known if "train/reward" in values]) == 7
    assert not any("train/replayed_ratio" in values for _, values in known)
    assert all(run.finished for run in service.runs)
    first, *others = service.inits
    assert others == [first, first]
    interrupted_and_continued(other, config(name))
    assert len(service.known) == 2, "runs in folders of one name stay apart"
    assert (first["project"], first["resume"], first["config"]["seed"]) == ("sums", "allow", 3)
    assert json.dumps(first["config"])


def test_an_evaluation_that_the_interruption_prevented_is_sent(tmp_path, services):
    settings = config("trackio")
    log = RunLog(tmp_path, open_trackers(settings, tmp_path, None))
    position = log.position()
    log.metrics("training", {"step": 1, "reward": 0.5})
    log.close()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\0\n[1]\n{}\n{"step": 1, "test/pa')
    log = RunLog(tmp_path, open_trackers(settings, tmp_path, 0), resume=position)
    log.metrics("training", {"step": 1, "reward": 0.5})
    log.metrics("evaluation", {"step": 1, "test/pass_rate": 0.25})
    log.close()
    ((_, known),) = services["trackio"].known.items()
    assert known == [(1, {"train/reward": 0.5}), (1, {"test/pass_rate": 0.25})]


@pytest.mark.parametrize("when", ["log", "finish"])
def test_a_tracker_that_fails_is_dropped_with_one_warning(tmp_path, services, caplog, when):
    trackers = open_trackers(config("wandb", "trackio"), tmp_path, None)
    log = RunLog(tmp_path, trackers)
    train(log, 1, 1)

    def fail(*_, **__):
        raise ConnectionError("no route to host")

    setattr(services["wandb"].runs[0], when, fail)
    train(log, 2, 4)
    log.close()
    (warning,) = caplog.messages
    assert warning == "wandb failed (no route to host) and gets no more numbers; metrics.jsonl has all of them"
    ((_, known),) = services["trackio"].known.items()
    assert sorted(told(known, "train/reward")) == [1, 2, 3, 4]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 6


def test_a_tracker_that_cannot_start_is_one_error_and_the_others_are_closed(tmp_path, services):
    services["trackio"].failure = RuntimeError("not logged in")
    with pytest.raises(ConfigError, match=r"output\.trackers: trackio cannot start: not logged in"):
        open_trackers(config("wandb", "trackio"), tmp_path, None)
    assert services["wandb"].runs[0].finished


def test_a_disk_that_was_full_leaves_no_run_without_an_id(tmp_path, services):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(ConfigError, match="wandb cannot start"):
            open_trackers(config("wandb"), tmp_path, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    open_trackers(config("wandb"), tmp_path, None)
    (started,) = services["wandb"].inits
    assert len(started["id"]) == 8


def test_a_missing_package_is_one_clear_error_before_anything_is_set_up(tmp_path, monkeypatch, capsys):
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(process, "stop_on_signals", lambda: None)  # the signals of this process are pytest's
    folder = tmp_path / "runs"
    assert program.main(["--output.trackers", "tensorboard", "wandb", "trackio", f"--output.folder={folder}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "wandb and trackio cannot be imported; run pip install 'exgrpo[wandb,trackio]'" in error
    assert not folder.exists()


def test_a_package_is_looked_for_where_it_is_asked_for_and_a_folder_of_its_name_is_none(tmp_path, monkeypatch):
    check_trackers([])
    assert open_trackers(config(), tmp_path, None) == []
    assert not list(tmp_path.iterdir())
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match="wandb cannot be imported"):
        check_trackers(["wandb"])


@pytest.fixture
def real(request, tmp_path, monkeypatch):
    """The real package, kept from the network, with its storage in the test's folder."""
    offline = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "HF_HUB_OFFLINE": "1"}
    for key, value in (offline | {"TRACKIO_DIR": str(tmp_path / "trackio")}).items():
        monkeypatch.setenv(key, value)
    return pytest.importorskip(request.param, reason=f"{request.param} is not installed: exgrpo[{request.param}]")


@pytest.mark.parametrize("real", ["wandb"], indirect=True)
def test_wandb_for_real(tmp_path, real):
    folder = tmp_path / "my run"
    folder.mkdir()
    interrupted_and_continued(folder, config("wandb", seed=3))
    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    assert {path.stem for path in files} == {f"run-{(folder / 'run_id').read_text()}"}
    assert all(path.stat().st_size > 1000 for path in files)


@pytest.mark.parametrize("real", ["trackio"], indirect=True)
def test_trackio_for_real(tmp_path, real):
    from trackio.sqlite_storage import SQLiteStorage

    folder = tmp_path / "my run"
    folder.mkdir()
    interrupted_and_continued(folder, config("trackio", seed=3))
    (name,) = SQLiteStorage.get_runs("sums")
    logs = SQLiteStorage.get_logs("sums", name)
    assert told([(log["step"], log) for log in logs], "train/reward") == ONCE
    assert [log["step"] for log in logs if "train/reward" in log] == list(ONCE)
    assert [log["step"] for log in logs if "test/pass_rate" in log] == [2, 4, 6]
    assert SQLiteStorage.get_run_config("sums", name)["seed"] == 3
