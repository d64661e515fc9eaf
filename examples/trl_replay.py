"""ExGRPO in TRL: its trainer with experience replay, on a tiny model and generated arithmetic.

    pip install 'exgrpo[trl]'
    python examples/trl_replay.py    # about twenty seconds on one core, mostly imports

It prints the mean reward of each generation, the share of replayed answers, and the number of stored answers:

    step 1  reward 0.28  replayed 0.00  stored 3

Replay begins after the first success. Half of the questions of a generation are then drawn from those with a stored
success, and one of their eight answers is replayed: two of four questions, 0.06 of 32 answers.

What to change next: the model and the questions are those of any `GRPOTrainer`; `ratio=0` is a run without replay;
docs/trl.md has all options and the other methods.
"""

import tempfile

from datasets import Dataset
from transformers import PrinterCallback

from exgrpo.integrations.trl import ExGRPOConfig, ExGRPOTrainer
from exgrpo.train.data.tasks.arithmetic import generate
from exgrpo.train.policy.tokenizer import load_pretrained

problems = generate("train", 64, seed=0)
rows = [{"prompt": [{"role": "user", "content": p.question}], "answer": p.answer} for p in problems]


def is_right(completions, answer, **_):
    """Return 1 for each completion with the right answer in its box."""
    return [float(f"\\boxed{{{a}}}" in c[0]["content"]) for c, a in zip(completions, answer, strict=True)]


options = ExGRPOConfig(
    tempfile.mkdtemp(),
    max_steps=6,
    per_device_train_batch_size=32,
    num_generations=8,
    max_completion_length=48,
    learning_rate=1e-4,
    start_pass_rate=0.0,
    logging_steps=1,
    report_to=[],
    disable_tqdm=True,
    save_strategy="no",
    use_cpu=True,
    bf16=False,
)
pretrained = load_pretrained("builtin:arithmetic")
trainer = ExGRPOTrainer(
    pretrained.model.path, is_right, options, Dataset.from_list(rows), processing_class=pretrained.tokenizer
)
trainer.remove_callback(PrinterCallback)  # replaced by the output below
trainer.train()
for step, log in enumerate(trainer.state.log_history[:-1], 1):
    replayed = log["experience/replayed"] / options.generation_batch_size
    print(f"step {step}  reward {log['reward']:.2f}  replayed {replayed:.2f}  ", end="")
    print(f"stored {log['experience/buffer_trajectories']:.0f}")
