"""A trainer without a model, and what it saves and loads."""

from exgrpo.train.checkpoint.checkpoint import Checkpoints
from exgrpo.train.common.distributed import ALONE
from exgrpo.train.trainer import Trainer
from tests.train.configs import configured
from tests.train.fakes import RecordingPolicy, ScriptedEngine, question_set, rollout_worker


class SavingPolicy(RecordingPolicy):
    """A policy that saves its version."""

    checkpoint_bytes = 1

    def save_checkpoint(self, folder):
        folder.mkdir(parents=True)
        (folder / "version").write_text(str(self.version))

    def load_checkpoint(self, folder):
        self.version = int((folder / "version").read_text())


def make_trainer() -> Trainer:
    skill = {question: (0.25, 0.5, 0.75, 1.0)[question % 4] for question in range(24)}
    values = {"rollout": {"samples": 4, "max_tokens": 8}, "data": {"max_prompt_tokens": 8}}
    config = configured(values, questions=6, experience={"start_pass_rate": 0.0})
    return Trainer(config, question_set(24), SavingPolicy(), rollout_worker(ScriptedEngine(skill)))


def checkpoints(folder, *, keep=2, fingerprint="data", config=None) -> Checkpoints:
    return Checkpoints(folder, ALONE, fingerprint=fingerprint, config=config or {}, keep=keep)


def story(trainer: Trainer, first: int, last: int) -> list[str]:
    """Return what the steps from the first one to before the last one decide."""
    results = [trainer.step(step) for step in range(first, last)]
    return [
        str({k: v for k, v in r.metrics.items() if "second" not in k} | {"q": r.batch.question.tolist()})
        for r in results
    ]


def saved_run(folder, steps=(2, 4, 6), keep=2, config=None):
    """A run with checkpoints."""
    folder.mkdir(exist_ok=True)
    trainer, writer, done = make_trainer(), checkpoints(folder, keep=keep, config=config), 0
    for step in steps:
        story(trainer, done + 1, step + 1)
        done = step
        writer.save(step, trainer.policy, trainer, {"before": 0.5})
    return trainer


def load(folder, **options):
    """A new trainer that goes on, and the step it goes on from."""
    trainer = make_trainer()
    return trainer, checkpoints(folder, **options).load(trainer.policy, trainer)[0]


def flip(path):
    """Change one bit and leave the size."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
