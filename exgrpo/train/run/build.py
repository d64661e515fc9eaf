"""Read the inputs of a run, check them, and build its parts."""

import datetime
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from exgrpo.heads.logit_map import measure
from exgrpo.kernels.dispatch import leave_out, passed_over, requested
from exgrpo.train.checkpoint.checkpoint import Checkpoints
from exgrpo.train.checkpoint.resume import AUTO, is_unsaved, set_aside
from exgrpo.train.common.distributed import World, agree, on_main
from exgrpo.train.common.durable import claim
from exgrpo.train.common.errors import ConfigError, DataError, ModelError, is_first_rank, os_errors_as
from exgrpo.train.config.options import Config, held_out_sets
from exgrpo.train.config.recipe import changed, to_yaml
from exgrpo.train.data.questions import QuestionSet, joined_questions
from exgrpo.train.data.rows import Row
from exgrpo.train.metrics.utilisation import BACKWARD, FROZEN_BACKWARD, Utilisation, matrix_rate
from exgrpo.train.policy.adapters import check_adapters
from exgrpo.train.policy.check import check_dtype, check_weights
from exgrpo.train.policy.flops import forward_flops
from exgrpo.train.policy.policy import Policy
from exgrpo.train.policy.scores import make_reference
from exgrpo.train.policy.source import ModelSource
from exgrpo.train.policy.tokenizer import Pretrained, check_prompts, load_pretrained
from exgrpo.train.rollout.answers import RolloutWorker
from exgrpo.train.rollout.engine import EngineSettings, training_settings
from exgrpo.train.rollout.registry import Choice, choose_engine, open_engine
from exgrpo.train.rollout.transformers.engine import SharedEngine, shares_policy
from exgrpo.train.rollout.turns.conversations import conversations_of
from exgrpo.train.run.plan import plan_run
from exgrpo.train.run.startup_checks import StartupResult, check_surrogate
from exgrpo.train.run.validation import check_best
from exgrpo.train.trainer import Trainer


@dataclass(frozen=True, eq=False)
class Inputs:
    """Model and tokenized questions of a run, held-out ones by set, and the result of its startup checks."""

    pretrained: Pretrained
    train_set: QuestionSet
    held_out: dict[str, QuestionSet]
    startup: StartupResult


def read_inputs(config: Config, startup: StartupResult) -> Inputs:
    """Find the model and tokenize the questions; raise ExgrpoError if they cannot be used together."""
    pretrained = load_pretrained(config.policy.path, config.policy.overrides, config.lora.path)
    data = config.data

    def tokenised(sources: Sequence[str], rows: Sequence[list[Row]], limit: int | None) -> QuestionSet:
        return joined_questions(data, sources, rows, pretrained.tokenizer, limit=limit, progress=is_first_rank())

    train = tokenised(data.train, startup.questions, data.train_limit)
    sets = held_out_sets(config)
    held_out = {name: tokenised(asked.source, startup.held_out[name], asked.limit) for name, asked in sets.items()}
    for questions in (train, *held_out.values()):
        check_prompts(pretrained, questions)
    check_best(config, held_out)
    return Inputs(pretrained, train, held_out, startup)


@dataclass(frozen=True, eq=False)
class Parts:
    """Parts of a run.

    Attributes:
        trainer: takes the steps; has the policy, the sleeping engine, and the configuration with all planned values.
        checkpoints: checkpoints in the run's folder, which this process has locked.
        choice: the rollout engine's name, and why it was chosen.
        memory: a line about the memory plan of the GPUs; None: there is none.
        utilisation: computes MFU on this machine.
    """

    trainer: Trainer
    checkpoints: Checkpoints
    choice: Choice
    memory: str | None
    utilisation: Utilisation


def build(config: Config, inputs: Inputs, world: World, resources: ExitStack, resume: Path | None = None) -> Parts:
    """Build the parts of a run in the folder to resume or in a new one; a collective call.

    Raises:
        ExgrpoError: the inputs or the machine do not fit the configuration.
    """
    check_dtype(config.policy.dtype, world.device)
    _check_kernels(config.policy.kernel_backend, world)
    check_surrogate(config)  # not earlier, since a user's function may import torch
    check_alike(inputs, world)
    pretrained = inputs.pretrained
    conversations = conversations_of(config.environment, pretrained)
    choice = choose_engine(training_settings(config, pretrained), world)
    check_weights(pretrained.model, world)
    if config.lora.path:
        agree(world, lambda: check_adapters(config.lora, pretrained.model))
    check_head(pretrained.model)
    # Engine and plan are saved: a resumed run keeps them, whatever is installed or free then.
    config, memory = plan_run(changed(config, {"rollout.engine": choice.name}), pretrained.model, world)
    settings = training_settings(config, pretrained)
    settle_kernels(config.policy.kernel_backend, settings, world)
    utilisation = Utilisation(
        forward_flops(pretrained.model.empty()),
        matrix_rate(world, settings.dtype),
        elsewhere=("generate",) if config.rollout.servers else (),
        backward=FROZEN_BACKWARD if config.lora.rank else BACKWARD,
    )
    # Load the engine's copy first: once the policy's DeepSpeed configuration exists, models load sharded.
    copy = None if shares_policy(config, world.size) else open_engine(choice, settings, world)
    if copy:
        resources.callback(copy.close)
        copy.sleep()  # frees its memory for setting up the policy
    folder = resume or _make_folder(config, world)
    on_main(world, lambda: resources.enter_context(claim(folder)))
    with os_errors_as(ConfigError, "DeepSpeed cannot set the policy up"):
        policy = Policy(config, pretrained.model, world)
        policy.end_with(pretrained.ends(config.common_stop))
        reference = make_reference(config, pretrained.model, policy)
    engine = copy or SharedEngine(settings, world, policy)
    rollout_worker = RolloutWorker(engine, inputs.startup.grader, pretrained.tokenizer.decode, world, conversations)
    trainer = Trainer(config, inputs.train_set, policy, rollout_worker, reference)
    checkpoints = Checkpoints(
        folder,
        world,
        fingerprint=inputs.train_set.fingerprint,
        config=config.model_dump(mode="json"),
        keep=config.checkpoint.keep,
    )
    return Parts(trainer, checkpoints, choice, memory, utilisation)


def check_alike(inputs: Inputs, world: World) -> None:
    """Raise DataError on every rank unless all have the same questions: otherwise their decisions would differ."""
    sets = {"data.train": inputs.train_set, **inputs.held_out}
    found = world.gather({name: questions.fingerprint for name, questions in sets.items()})
    if differing := [name for name in found[0] if len({of_rank.get(name) for of_rank in found}) > 1]:
        raise DataError(
            f"{', '.join(differing)}: the processes of the run have read different questions: give all hosts the same "
            "files and options"
        )


def _check_kernels(backend: str, world: World) -> None:
    try:
        requested(backend, world.device)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"policy.kernel_backend: {error}") from None


def check_head(source: ModelSource) -> None:
    """Check that the kernels support the model's output head.

    Raises:
        ModelError: its code transforms hidden states or logits in a way that they do not support.
    """
    try:
        measure(source.empty(), direct=True)
    except ValueError as error:
        raise ModelError(f"policy.path: {source.path} cannot be trained: {error}") from None


def settle_kernels(backend: str, settings: EngineSettings, world: World) -> None:
    """Select one backend that passes its self-test on all ranks; raise ConfigError if a requested one fails on one."""

    def find() -> dict[str, str]:
        try:
            return passed_over(requested(backend, world.device), world.device, settings.dtype)
        except RuntimeError as error:
            raise ConfigError(f"policy.kernel_backend: {error}") from None

    for of_rank in world.gather(agree(world, find)):
        leave_out(of_rank)


def _make_folder(config: Config, world: World) -> Path:
    name = config.output.name or datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder = world.gather(config.output.folder / name)[0]

    def make() -> None:
        if config.resume == AUTO and is_unsaved(folder):
            set_aside(folder)
        with os_errors_as(ConfigError, f"output.folder: {folder} cannot be made", "Choose another output.folder"):
            folder.mkdir(parents=True)
            (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")

    on_main(world, make)
    return folder
