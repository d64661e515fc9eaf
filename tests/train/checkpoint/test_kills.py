"""Runs that are killed at random moments and damaged, and go on each time: they end as one that nothing interrupts."""

import random
import re
import signal
import time
from pathlib import Path

import pytest

from exgrpo.train.checkpoint.listing import MANIFEST, find, survey
from exgrpo.train.checkpoint.resume import FINISHED
from exgrpo.train.common.durable import sha256
from exgrpo.train.metrics.log_files import SAMPLES
from exgrpo.train.run.model_folder import MODEL
from tests.train.checkpoint.parts import flip
from tests.train.launch import MAIN, Ranks, completed
from tests.train.run.test_run import untimed

SMALL = (
    *("--steps=6", "--questions=4", "--rollout.samples=4", "--rollout.engine=transformers", "--preflight=off"),
    *("--data.train_limit=40", "--data.test_limit=8", "--experience.start_pass_rate=0", "--evaluation.every=3"),
    *("--checkpoint.every=1", "--checkpoint.keep=3"),
)
"""A checkpoint in each step: runs save and delete often."""
METHODS = {"plain": (), "adapters": ("--lora.rank=4",), "calculator": ("--environment.function=calculator",)}
MOMENTS = (
    *("", "checkpoints/step_*.unfinished", "checkpoints/step_*.unfinished/policy/*", "experience/*.tmp"),
    *(f"checkpoints/step_*.unfinished/{MANIFEST}*", "checkpoints/step_*.deleted", "checkpoints/step_00000006"),
)
"""A run is killed once new files match the pattern, or at any time."""
DAMAGES = {
    "flip": flip,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "remove": Path.unlink,
}


def outcome(run):
    """What has to be equal, bit for bit."""
    newest = find(run)[0]
    files = [*(newest.folder / "policy").rglob("*"), *(run / MODEL).glob("*.safetensors")]
    return {
        "finished": (run / FINISHED).exists(),
        "newest step": newest.step,
        "metrics": [str(record) for record in untimed(run)],
        "files": {str(path.relative_to(run)): sha256(path) for path in (run / SAMPLES, *files) if path.is_file()},
    }


@pytest.fixture(scope="module", params=[(name, ranks) for name in METHODS for ranks in (1, 2)], ids=str)
def whole(request, tmp_path_factory):
    """Options, number of processes, seconds and outcome of a run that nothing interrupts."""
    (name, ranks), folder = request.param, tmp_path_factory.mktemp("whole")
    options, begun = (*SMALL, *METHODS[name]), time.monotonic()
    completed(MAIN, *options, f"--output.folder={folder}", "--output.name=run", ranks=ranks)
    return options, ranks, time.monotonic() - begun, outcome(folder / "run")


def kill(rng, started, run, seconds):
    """Kill one process or all, within the seconds of a whole run; returns whether the run still ran."""
    pattern, since = rng.choice(MOMENTS), time.time_ns()
    until = time.monotonic() + rng.random() * seconds * (0.02 if pattern else 1)
    while started.running():
        try:
            reached = not pattern or any(path.stat().st_ctime_ns > since for path in run.glob(pattern))
        except FileNotFoundError:  # listed, and gone
            continue
        if reached and time.monotonic() >= until:
            break
        time.sleep(0.0005)
    alive = started.running()
    for rank in started.ranks if rng.random() < 0.5 else [rng.choice(started.ranks)]:
        rank.send(signal.SIGKILL)
    return alive


def damage(rng, newest):
    """Damage a file that only this checkpoint needs; returns its path."""
    files = sorted(path for path in newest.folder.rglob("*") if path.is_file() and path.stat().st_size)
    path = rng.choice(files)
    DAMAGES[rng.choice(sorted(DAMAGES))](path)
    return str(path)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_kills_and_damages_change_nothing(whole, tmp_path):
    options, ranks, seconds, expected = whole
    seed, run, damaged = random.SystemRandom().randrange(10**9), tmp_path / "run", ""
    print(f"seed {seed}")
    rng, options = random.Random(seed), (*options, f"--output.folder={tmp_path}", "--output.name=run", "--resume=auto")
    for kills_left in range(rng.randint(2, 4), -1, -1):
        if (run / FINISHED).exists():
            break
        found = find(run)
        if kills_left and len(found) > 1 and not damaged and rng.random() < 0.5:
            damaged = damage(rng, found[0])
        sound = [one.step for one in found if not damaged.startswith(str(one.folder))]
        started = Ranks(MAIN, *options, ranks=ranks)
        killed = kills_left > 0 and kill(rng, started, run, seconds)
        done = started.finish()
        assert killed or done.returncode == 0, done.stderr
        assert [one.step for one in find(run)][:1] >= sound[:1], "a complete checkpoint is lost"
        assert all(damaged and damaged in problem for problem in survey(run)[1])
        if begun := re.search(r"going on with .* after step (\d+)", done.stdout):
            assert int(begun[1]) == sound[0]
            assert damaged in done.stderr
            damaged = ""  # set aside
    assert outcome(run) == expected
