"""Environments as functions: found, and what they take."""

from collections.abc import Callable
from dataclasses import dataclass

from exgrpo.train.data.questions import Question
from exgrpo.train.errors import ConfigError, RolloutError, shown
from exgrpo.train.reward.contract import Columns, columns_of
from exgrpo.train.turns.settings import ENVIRONMENTS, EnvironmentConfig

Reply = Callable[[str], str | None]
"""What the policy has written since the last reply, to what comes behind it; None: nothing."""


@dataclass(frozen=True)
class Environment:
    """An environment by its name.

    Attributes:
        name: of its function.
        function: begins an answer.
        columns: of a question's row that the function takes.
        stop: strings at which the policy waits for a reply.
    """

    name: str
    function: Callable[..., Reply]
    columns: Columns
    stop: tuple[str, ...]

    def begin(self, question: Question) -> Reply:
        """What replies in one answer to a question.

        Raises:
            RolloutError: the function fails, or gives nothing that can be called.
        """
        try:
            reply = self.function(question.text, question.gold, **self.columns.of(question.columns))
        except Exception as error:  # whatever it raises
            cause = f"{type(error).__name__}: {shown(error)}"
            raise self._useless(question, cause) from error
        if not callable(reply):
            raise self._useless(question, f"it gave {shown(reply)}, which cannot be called")
        return reply

    def _useless(self, question: Question, cause: str) -> RolloutError:
        return RolloutError(
            f"environment {self.name!r} cannot begin an answer to {shown(question.text)}: {cause}. Mend it, and go on "
            "with --resume auto"
        )


def find_environment(options: EnvironmentConfig) -> Environment | None:
    """The environment of a run; None: it has none.

    Raises:
        ConfigError: there is no such function, or it cannot be called with a question.
    """
    if options.function is None:
        return None
    name = options.function
    function = ENVIRONMENTS.find(name)
    columns = columns_of(function, f"environment {name!r}", "(question, gold)", ConfigError)
    stop = options.stop if options.stop is not None else tuple(getattr(function, "stop", ()))
    return Environment(name, function, columns, stop)
