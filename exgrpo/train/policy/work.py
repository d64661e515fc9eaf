"""What a step reads and writes with the model, by phase, and the FLOPs of that."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from exgrpo.train.common.step_batch import Ints, StepBatch
from exgrpo.train.policy.flops import ForwardFlops


@dataclass(frozen=True)
class Reading:
    """A prompt that is needed once, and the responses to it, each read or written behind it.

    Attributes:
        prompt: tokens of the prompt.
        responses: tokens of each response.
    """

    prompt: int
    responses: tuple[int, ...]

    @property
    def written(self) -> int:
        """Response tokens."""
        return sum(self.responses)

    @property
    def read(self) -> int:
        """Tokens of the rows that the model reads: the prompt, once per response, and all of it but its last token."""
        return sum(self.prompt + response - 1 for response in self.responses)

    def flops(self, model: ForwardFlops) -> float:
        """FLOPs of a forward pass; the first tokens of all responses are predicted from the end of the one prompt."""
        prompt = model.decoder_flops(self.prompt)
        behind = sum(model.decoder_flops(self.prompt + response - 1) - prompt for response in self.responses)
        return prompt + behind + model.head_flops(1 + self.written - len(self.responses))


Work = Mapping[str, Sequence[Reading]]
"""By phase, what the model reads or writes in it: select, generate, score, update. Empty where a step does without."""


def together(batch: StepBatch, rows: Ints | None = None) -> list[Reading]:
    """Some rows, or all of them; those of the same question as one, in the order of their first ones."""
    readings: dict[int, tuple[int, list[int]]] = {}
    for row in range(len(batch)) if rows is None else rows:
        group = batch.group[row]
        _, responses = readings.setdefault(int(batch.question[group]), (len(batch.prompt[group]), []))
        responses.append(int(batch.length[row]))
    return [Reading(prompt, tuple(responses)) for prompt, responses in readings.values()]
