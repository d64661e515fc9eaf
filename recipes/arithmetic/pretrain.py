r"""Pretrain the tiny model of the default run and save it, with its tokenizer, in Hugging Face format.

The corpus is synthetic and, like real corpora, of mixed quality. Each problem is answered in one of two manners:

- careful: the columns one by one, units first, then the result. A column is wrong at a small rate (a forgotten carry,
  or off by one), and the rest of the solution follows from the mistake.
- hasty: the result is stated at once, and more often than not it is wrong: some of its digits are random.

Training stops early, so that the model knows both manners and is sure of neither. It is a base model: sampled at
temperature 1 it answers some of the problems right, and reinforcement learning has something to select from. The
problems are those of the `pretrain` split, which shares none with the `train` and `test` splits.

Run it from the repository: `python recipes/arithmetic/pretrain.py`. The result depends only on the seed and
on the arithmetic of the machine.
"""

import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from exgrpo.train.data.arithmetic import (
    LEVELS,
    MAX_RESPONSE_TOKENS,
    MODEL_FOLDER,
    Problem,
    format_solution,
    generate,
    worked_solution,
)

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
MARKS = ("<think>", "</think>", "\\boxed{")
VOCABULARY = 320

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

IGNORED = -100


@dataclass(frozen=True)
class Options:
    """What the pretraining does; the defaults make the shipped model."""

    output: Path = MODEL_FOLDER
    """Folder for the model and the tokenizer."""
    seed: int = 0
    """Seed of the problems, the solutions, the weights and the samples."""
    steps: int = 2000
    """Optimiser steps."""
    batch: int = 64
    """Solutions in a step."""
    matrix_lr: float = 0.02
    """Peak learning rate of the layers' matrices; it warms up and then falls by a cosine."""
    lr: float = 3e-3
    """Peak learning rate of all other parameters."""
    problems: int = 30_000
    """Different problems in the corpus; each pass answers them anew."""
    careful: tuple[float, float, float, float] = (0.6, 0.6, 0.6, 0.6)
    """Share of careful solutions at levels 1 to 4; the others are hasty."""
    slip: float = 0.05
    """Rate of mistakes in a column of a careful solution."""
    hasty_wrong: float = 0.7
    """Share of wrong results among hasty solutions."""
    hidden: int = 128
    """Width of the model."""
    layers: int = 3
    """Layers of the model."""
    questions: int = 512
    """Held-out problems of the evaluation."""
    samples: int = 8
    """Samples for each of them, at temperature 1."""
    threads: int = 1
    """Threads of torch."""


@dataclass
class Scores:
    """What the evaluation found."""

    correct: list[int] = field(default_factory=list)
    by_level: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    lengths: list[int] = field(default_factory=list)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer in which digits, words and operators with their spaces are single tokens."""
    tokenizer = Tokenizer(models.BPE())
    pieces = Regex(r" ?[A-Za-z]+|\d| ?[^\sA-Za-z\d]+ ?|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pieces, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    corpus = ["What is 1 + 2 * 3 - 4? Compute 5: 6, 7; 8 = 9. The answer is 0."] * 2
    trainer = trainers.BpeTrainer(
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in MARKS])
    specials = [BEGIN, END, PAD, *ROLES]
    free = VOCABULARY - tokenizer.get_vocab_size() - len(specials)
    specials += [f"<|reserved_{index}|>" for index in range(free)]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in specials])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def build_model(options: Options, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a small Llama decoder with fresh weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=options.hidden,
            intermediate_size=2 * options.hidden,
            num_hidden_layers=options.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def hasty_solution(problem: Problem, wrong: float, rng: random.Random) -> str:
    """Return a solution that states its result at once; at the rate `wrong` one or two of the digits are random."""
    digits = list(problem.answer)
    if rng.random() < wrong:
        while "".join(digits) == problem.answer:
            for place in rng.choices(range(len(digits)), k=2):
                digits[place] = rng.choice("0123456789")
    result = str(int("".join(digits)))
    return format_solution(f"{problem.expression} = {result}", result)


def solution(problem: Problem, options: Options, rng: random.Random) -> str:
    """Return one solution of the corpus."""
    if rng.random() < options.careful[problem.level - 1]:
        return worked_solution(problem.expression, lambda: rng.random() < options.slip)
    return hasty_solution(problem, options.hasty_wrong, rng)


def prompt_ids(problem: Problem, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the tokens of the question as the chat template puts it."""
    messages = [{"role": "user", "content": problem.question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def batches(
    problems: list[Problem], tokenizer: PreTrainedTokenizerFast, options: Options, rng: random.Random
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield token ids and targets for ever, each problem answered anew in each pass."""
    prompts = [prompt_ids(problem, tokenizer) for problem in problems]
    while True:
        answers = tokenizer([solution(problem, options, rng) + END for problem in problems])["input_ids"]
        rows = list(zip(prompts, answers, strict=True))
        rng.shuffle(rows)
        for start in range(0, len(rows) - options.batch + 1, options.batch):
            yield collate(rows[start : start + options.batch], tokenizer.pad_token_id)


def collate(rows: list[tuple[list[int], list[int]]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return right-padded token ids and the targets, which are the tokens of the answers alone."""
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.full((len(rows), width), pad)
    targets = torch.full((len(rows), width), IGNORED)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        targets[row, len(prompt) : end] = torch.tensor(answer)
    return ids[:, :-1], targets[:, 1:]


def warmed_up(step: int, options: Options) -> float:
    """Return the fraction of the peak rate: a linear warm-up over a twentieth of the steps, then a half cosine."""
    warmup = max(1, options.steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (options.steps - warmup)))


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, options: Options, console: Console) -> None:
    """Fit the model to the corpus: the matrices of the layers by Muon, all other parameters by AdamW."""
    matrices = {name for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name}
    inner = [p for name, p in model.named_parameters() if name in matrices]
    outer = [p for name, p in model.named_parameters() if name not in matrices]
    optimizers = [
        torch.optim.Muon(inner, lr=options.matrix_lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outer, lr=options.lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: warmed_up(step, options)) for o in optimizers]
    corpus = generate("pretrain", options.problems, options.seed)
    stream = batches(corpus, tokenizer, options, random.Random(options.seed))
    for step in track(range(options.steps), "pretraining", console=console):
        ids, targets = next(stream)
        logits = model(ids).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if (step + 1) % 100 == 0:
            console.print(f"step {step + 1}  loss {loss.item():.4f}")


@torch.no_grad()
def evaluate_samples(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, options: Options) -> Scores:
    """Sample answers to held-out problems at temperature 1 and count the right ones."""
    scores = Scores()
    problems = generate("test", options.questions, options.seed)
    problems.sort(key=lambda problem: problem.level)
    tokenizer.padding_side = "left"
    for start in track(range(0, len(problems), 32), "evaluating"):
        part = problems[start : start + 32]
        prompts = tokenizer.pad({"input_ids": [prompt_ids(p, tokenizer) for p in part]}, return_tensors="pt")
        output = model.generate(
            **prompts,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=options.samples,
            max_new_tokens=MAX_RESPONSE_TOKENS,
        )
        answers = output[:, prompts["input_ids"].shape[1] :]
        scores.lengths += (answers != tokenizer.pad_token_id).sum(1).tolist()
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        for index, problem in enumerate(part):
            group = texts[index * options.samples : (index + 1) * options.samples]
            correct = sum(is_correct(text, problem.answer) for text in group)
            scores.correct.append(correct)
            scores.by_level[problem.level].append(correct)
    return scores


def is_correct(text: str, answer: str) -> bool:
    """Tell whether the text ends, after its thoughts, with the answer in a box."""
    found = re.fullmatch(r".*</think>\\boxed\{(\d+)\}", text, re.DOTALL)
    return found is not None and found[1] == answer


def report(scores: Scores, options: Options, console: Console) -> None:
    """Print Pass@1 for each level and over all, with the number of questions for each count of right answers."""
    table = Table("level", "questions", "Pass@1", *map(str, range(options.samples + 1)))
    for name, correct in [*((str(level), scores.by_level[level]) for level in LEVELS), ("all", scores.correct)]:
        if not correct:
            continue
        counts = Counter(correct)
        spread = [str(counts[k]) for k in range(options.samples + 1)]
        table.add_row(name, str(len(correct)), f"{sum(correct) / len(correct) / options.samples:.3f}", *spread)
    console.print(table)
    lengths = sorted(scores.lengths)
    marks = [lengths[int(q * (len(lengths) - 1))] for q in (0.05, 0.5, 0.95, 1.0)]
    console.print("response tokens at 5, 50, 95 and 100 %:", *marks)


def main(options: Options) -> None:
    """Build, train, evaluate and save."""
    console = Console()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer = build_tokenizer()
    model = build_model(options, tokenizer)
    console.print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    train(model, tokenizer, options, console)
    model.eval()
    report(evaluate_samples(model, tokenizer, options), options, console)
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(options.output)
    model.save_pretrained(options.output)
    console.print(f"saved in {options.output}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
