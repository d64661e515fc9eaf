"""ExGRPO in TRL where a function of one's own rolls out, or tools and environments take part in answers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("trl", reason="trl is not installed: pip install 'trl>=1.16,<2'", exc_type=ImportError)

from datasets import Dataset

from exgrpo.integrations.trl import ExGRPOConfig
from exgrpo.integrations.trl_replay import Prompts
from tests.integrations import trl_methods
from tests.integrations.trl_methods import METHODS, Recorded
from tests.integrations.trl_trainers import WrittenAnswers, options, questions, reward, tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


def roll_out(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """The written answers, as a function of one's own gives them."""
    ids = tokenizer()(prompts)["input_ids"]
    completions, _ = WrittenAnswers._generate_single_turn(trainer, ids)
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}


def every_third(ids: list[int]) -> list[int]:
    """A mask of answers in which an environment wrote every third token, but never the last."""
    return [int(place % 3 != 2 or place == len(ids) - 1) for place in range(len(ids))]


def masked(prompts: list[str], trainer: Any) -> dict[str, Any]:
    output = roll_out(prompts, trainer)
    return {**output, "env_mask": [every_third(ids) for ids in output["completion_ids"]]}


def trainer_of(folder: Path, model: Path, rollout: Any = None, **changes: Any) -> Recorded:
    return trl_methods.trainer_of(folder, model, rollout=rollout, **{"max_steps": 3, **changes})


@pytest.mark.parametrize("compose", ["mixed", "appended"])
def test_a_rollout_function_gives_the_run_of_trl_s_own_rollouts(tmp_path: Path, model: Path, compose: str) -> None:
    changes = {**METHODS[compose], "compose": compose, "refills": 1}
    runs = [trainer_of(tmp_path / str(of), model, rollout=of, **changes) for of in (None, roll_out)]
    for trainer in runs:
        trainer.train()
    for log, other in zip(*(trainer.state.log_history[:3] for trainer in runs), strict=True):
        for name in ("loss", "grad_norm", "num_tokens", "reward", "experience/replayed", "experience/refilled"):
            assert log[name] == pytest.approx(other[name], rel=1e-5, abs=1e-6), name
    assert runs[1].state.log_history[2]["experience/replayed"]
    assert runs[0].asked == runs[1].asked, "nothing is generated for a row that is replayed"


@pytest.mark.parametrize("compose", ["mixed", "appended"])
def test_nothing_is_learnt_from_tokens_of_an_environment(tmp_path: Path, model: Path, compose: str) -> None:
    changes = {**METHODS[compose], "compose": compose, "loss_type": "dapo", "weigh": "ratio", "ratio": 1.0}
    trainer = trainer_of(tmp_path, model, masked, **changes)
    trainer.train()
    replayed = 0
    for losses in trainer.losses:
        total, tokens = 0.0, 0.0
        mixed = any(bool(inputs["replayed"].any()) for inputs, _, _ in losses)
        for inputs, log_prob, _ in losses:
            ratio = (log_prob - inputs["old_per_token_logps"]).double().exp()
            own = torch.zeros_like(ratio)
            for i, length in enumerate(inputs["completion_mask"].sum(1).tolist()):
                own[i, :length] = torch.tensor(every_third([0] * length))
                replayed += bool(inputs["replayed"][i])
            advantage = inputs["advantages"][:, None]
            bound = ratio if mixed else ratio.clamp(0.8, 1.2)
            total += float((torch.minimum(ratio * advantage, bound * advantage) * own).sum())
            tokens += float(own.sum())
        assert sum(loss for _, _, loss in losses) == pytest.approx(-total / tokens, rel=1e-5, abs=1e-6)
    assert replayed


def test_what_stored_answers_lack_is_told(tmp_path: Path, model: Path) -> None:
    def with_more(prompts: list[str], trainer: Any) -> dict[str, Any]:
        output = roll_out(prompts, trainer)
        return {**output, "judgement": [1.0] * len(output["prompt_ids"])}

    with pytest.raises(ValueError, match="rollout_func: returns judgement for rewards, .* 'appended'"):
        trainer_of(tmp_path, model, rollout=with_more).train()
    added = trainer_of(tmp_path, model, rollout=with_more, compose="appended", **METHODS["appended"])
    added.train()
    assert added.state.log_history[2]["experience/replayed"]
    prompts = Prompts()
    prompts.learn([(3, [1, 2]), (3, [1, 2])])
    with pytest.raises(ValueError, match="row 3 has another prompt than before"):
        prompts.learn([(3, [1])])


def test_a_resumed_run_has_the_prompts_of_its_rollout_function(tmp_path: Path, model: Path) -> None:
    changes = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "lr_scheduler_type": "constant"}
    whole = trainer_of(tmp_path / "whole", model, rollout=masked, **changes)
    whole.train()
    resumed = trainer_of(tmp_path / "resumed", model, rollout=masked, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for log, other in zip(resumed.state.log_history[2:4], whole.state.log_history[2:4], strict=True):
        assert log["loss"] == pytest.approx(other["loss"], abs=1e-6)
    table = resumed.replay.memory.table
    assert set(table.column("question").tolist()) <= set(resumed.prompts.ids)


class Room:
    """An environment with one tool."""

    def reset(self, **row: Any) -> str:
        self.looked = 0
        return " Look."

    def look(self) -> str:
        """Looks around.

        Returns:
            What there is.
        """
        self.looked += 1
        return "7"


CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALLS = {"open": "<tool_call>", "close_pattern": "</tool_call>", "repeats": True, "content": "json"}
CALLS |= {"transform": {"type": "function", "function": "{content}"}}
FIELDS = {"tool_calls": CALLS, "content": {"close_pattern": "<eos>", "content": "text"}}
PARSED = {"defaults": {"role": "assistant"}, "start_anchor": "<|assistant|>", "fields": FIELDS}
"""How the tokenizer reads an answer."""


class Acting(Recorded):
    """Every second answer calls the tool first."""

    def _generate_single_turn(self, prompt_ids: list, *rest: Any, **more: Any) -> tuple[list, list | None]:
        answers, log_probs = super()._generate_single_turn(prompt_ids, *rest, **more)
        call = self._tokenizer(CALL, add_special_tokens=False)["input_ids"]
        first = "<|tool|>" not in self._tokenizer.decode(prompt_ids[0])
        return [call if first and i % 2 else one for i, one in enumerate(answers)], log_probs


def acting(folder: Path, model: Path, **changes: Any) -> Acting:
    own = type(tokenizer()).from_pretrained(tokenizer().name_or_path)
    own.chat_template, own.response_template = TEMPLATE, PARSED
    chats = [[{"role": "user", "content": one}] for one in questions()["prompt"][:4]]
    changes = {"max_completion_length": 128, "max_steps": 3, "gradient_accumulation_steps": 2, **changes}
    config = ExGRPOConfig(**options(folder, start_pass_rate=0.0, learning_rate=1e-2, expire=[], **changes))
    data = Dataset.from_dict({"prompt": chats})
    return Acting(str(model), reward, config, data, processing_class=own, environment_factory=Room)


def test_answers_with_an_environment_are_stored_and_replayed_beside_fresh_ones(tmp_path: Path, model: Path) -> None:
    trainer = acting(tmp_path, model, compose="appended", **METHODS["appended"])
    trainer.train()
    call = trainer._tokenizer(CALL, add_special_tokens=False)["input_ids"]
    seen = {False: 0, True: 0}
    for losses in trainer.losses:
        for inputs, _, _ in losses:
            for i, length in enumerate(inputs["completion_mask"].sum(1).tolist()):
                prompt = inputs["prompt_ids"][i][inputs["prompt_mask"][i].bool()].tolist()
                assert prompt in trainer.prompts.ids.values()
                assert trainer._tokenizer.decode(prompt).endswith(" Look.<|assistant|>"), "the environment's word"
                ids, own = (inputs[name][i, :length].tolist() for name in ("completion_ids", "response_mask"))
                if ids[: len(call)] == call:
                    reply = np.flatnonzero(np.array(own) == 0)
                    assert reply[0] == len(call)
                    assert trainer._tokenizer.decode(np.array(ids)[reply]) == "<|tool|>7<|assistant|>"
                    seen[bool(inputs["replayed"][i])] += 1
                else:
                    assert all(own)
    assert all(seen.values()), seen


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "environment_factory: compose='mixed' puts stored answers in the places of fresh ones"),
        ({"compose": "appended", "start": __file__}, "unknown kind of file"),
    ],
)
def test_refused(tmp_path: Path, model: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as told:
        acting(tmp_path, model, **changes)
    assert len(str(told.value).splitlines()) == 1
