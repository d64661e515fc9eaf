"""What a run starts from: a model with its tokenizer, questions in its tokens, a grader. No process has joined yet."""

from collections.abc import Sequence
from dataclasses import dataclass

from exgrpo.train.config import Config
from exgrpo.train.data.prompts import PromptFormat
from exgrpo.train.data.questions import QuestionSet, joined, question_set
from exgrpo.train.data.rows import Row
from exgrpo.train.data.sources import settings_of
from exgrpo.train.early import Early
from exgrpo.train.errors import is_first_rank
from exgrpo.train.evaluate.course import check_best
from exgrpo.train.evaluate.settings import held_out_sets
from exgrpo.train.pretrained.tokenizer import Pretrained, load_pretrained
from exgrpo.train.reward.pool import Grader


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a run starts from.

    Attributes:
        pretrained: the model, and its tokenizer.
        train_set: questions to train on.
        held_out: held-out questions, by the name of their set.
        grader: grades answers.
    """

    pretrained: Pretrained
    train_set: QuestionSet
    held_out: dict[str, QuestionSet]
    grader: Grader


def read_inputs(config: Config, early: Early) -> Inputs:
    """Find the model and put the questions into its tokens.

    Args:
        config: what to do.
        early: what the first look has read.

    Raises:
        ExgrpoError: the model or its tokenizer cannot be used, or does not suit the questions.
    """
    pretrained, data = load_pretrained(config.policy.path, config.policy.overrides), config.data

    def tokenised(sources: Sequence[str], rows: Sequence[list[Row]], limit: int | None) -> QuestionSet:
        progress = is_first_rank()

        def of_source(source: str, of: list[Row]) -> QuestionSet:
            prompts = PromptFormat.of_source(source, data)
            stop = settings_of(source, data.sources).stop
            return question_set(source, of, pretrained.tokenizer, prompts, limit=limit, progress=progress, stop=stop)

        return joined([of_source(source, of) for source, of in zip(sources, rows, strict=True)])

    train = tokenised(data.train, early.train, data.train_limit)
    sets = held_out_sets(config)
    held_out = {name: tokenised(asked.source, early.held_out[name], asked.limit) for name, asked in sets.items()}
    check_best(config, held_out)
    return Inputs(pretrained, train, held_out, early.grader)
