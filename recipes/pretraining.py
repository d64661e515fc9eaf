"""What the pretraining of the tiny models has in common: tokenizer, model, training loop, evaluation by sampling.

A script of a task gives a `Corpus` and its options to `run`. The supervised start of a model that is there uses `train`
and `evaluate_samples`, too.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from exgrpo.train.data.tasks import Split

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

IGNORED = -100
PROMPTS_AT_A_TIME = 32
SIGNIFICANT = 4
"""Bits of a weight that are saved: so all models take 2 MB of a wheel in the place of 6."""


@dataclass(frozen=True)
class Training:
    """What a supervised training on the problems of a task does."""

    output: Path
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
    questions: int = 512
    """Held-out problems of the evaluation."""
    samples: int = 8
    """Samples for each of them, at temperature 1."""
    threads: int = 1
    """Threads of torch."""
    device: str = "cpu"
    """On which the model is trained; the shipped models were on a CPU."""


@dataclass(frozen=True)
class Options(Training):
    """What the pretraining of every task does."""

    hidden: int = 128
    """Width of the model."""
    layers: int = 3
    """Layers of the model."""


@dataclass(frozen=True)
class Corpus:
    """The problems of a task, how they are answered, and how answers are graded."""

    tokenizer: PreTrainedTokenizerFast
    problems: Callable[[Split, int, int], Sequence[Any]]
    """Of a split, a count and a seed: objects with a question and an answer."""
    solution: Callable[[Any, random.Random], str]
    """A solution of a problem, written anew in each pass."""
    max_tokens: int
    """Of a sampled response."""
    reward: Callable[[str, str], float]
    """1.0 where a response is right for an answer."""
    group: Callable[[Any], str]
    """The row of the report that a problem counts in."""
    key: Callable[[str, str], str] | None = None
    """The solution that a response gives; None where all right responses give the same one."""


def mixture(generate: Callable[..., list[Any]], shares: Sequence[float]) -> Callable[[Split, int, int], list[Any]]:
    """Return the `problems` of a corpus of difficulties 1, 2, ... in these shares, evaluated at the default one."""

    def problems(split: Split, count: int, seed: int) -> list[Any]:
        if split != "pretrain":
            return generate(split, count, seed)
        parts = [
            generate(split, round(share * count), seed, difficulty=difficulty)
            for difficulty, share in enumerate(shares, start=1)
        ]
        return [problem for part in parts for problem in part]

    return problems


@dataclass
class Scores:
    """What the evaluation found."""

    correct: dict[str, list[int]] = field(default_factory=dict)
    """Right answers of each problem, by group."""
    distinct: list[int] = field(default_factory=list)
    """Different right solutions of each problem."""
    lengths: list[int] = field(default_factory=list)
    """Tokens of each response."""


def build_tokenizer(pieces: str, text: str, marks: Sequence[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer.

    The regular expression `pieces` cuts a text; each different piece of `text` is a single token. `marks` are tokens
    that text may hold as well. Reserved tokens fill the vocabulary up to the size given.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator([text] * 2, trainer)
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in marks])
    specials = [BEGIN, END, PAD, *ROLES]
    free = vocabulary - tokenizer.get_vocab_size() - len(specials)
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


def run(corpus: Corpus, options: Options) -> None:
    """Build, train, evaluate and save."""
    console = Console()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    model = build_model(options, corpus.tokenizer)
    console.print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    train(model, corpus, options, console)
    corpus.tokenizer.padding_side = "left"
    corpus.tokenizer.save_pretrained(options.output, save_jinja_files=False)
    model.save_pretrained(options.output)
    (options.output / "generation_config.json").unlink()  # it repeats the config
    shorten(options.output / "model.safetensors")
    model = LlamaForCausalLM.from_pretrained(options.output).to(options.device).eval()
    report(evaluate_samples(model, corpus, options), options, console)
    console.print(f"saved in {options.output}")


def shorten(file: Path) -> None:
    """Round the weights of a file to `SIGNIFICANT` bits and store them in bf16, which holds eight.

    Its config goes on to say fp32, in which the model computes. Over 8,192 answers of each shipped model, Pass@1 and
    Pass@8 moved by less than their standard errors.
    """
    weights = load_file(file)
    for name, weight in weights.items():
        mantissa, exponent = torch.frexp(weight)
        rounded = torch.round(mantissa * 2**SIGNIFICANT) / 2**SIGNIFICANT
        weights[name] = torch.ldexp(rounded, exponent).to(torch.bfloat16)
    save_file(weights, file, metadata={"format": "pt"})


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
    ).to(options.device)


def train(model: PreTrainedModel, corpus: Corpus, options: Training, console: Console) -> None:
    """Fit the model to the corpus: the matrices of the layers by Muon, all other parameters by AdamW."""
    matrices = {name for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name}
    inner = [p for name, p in model.named_parameters() if name in matrices]
    outer = [p for name, p in model.named_parameters() if name not in matrices]
    optimizers = [
        torch.optim.Muon(inner, lr=options.matrix_lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outer, lr=options.lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: warmed_up(step, options)) for o in optimizers]
    stream = batches(corpus, options, random.Random(options.seed))
    for step in track(range(options.steps), "pretraining", console=console):
        ids, targets = (part.to(options.device) for part in next(stream))
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


def warmed_up(step: int, options: Training) -> float:
    """Return the fraction of the peak rate: a linear warm-up over a twentieth of the steps, then a half cosine."""
    warmup = max(1, options.steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (options.steps - warmup)))


def batches(corpus: Corpus, options: Training, rng: random.Random) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield token ids and targets for ever, each problem answered anew in each pass."""
    tokenizer = corpus.tokenizer
    problems = corpus.problems("pretrain", options.problems, options.seed)
    prompts = [prompt_ids(problem.question, tokenizer) for problem in problems]
    while True:
        answers = tokenizer([corpus.solution(problem, rng) + tokenizer.eos_token for problem in problems])["input_ids"]
        rows = list(zip(prompts, answers, strict=True))
        rng.shuffle(rows)
        for start in range(0, len(rows) - options.batch + 1, options.batch):
            yield collate(rows[start : start + options.batch], tokenizer.pad_token_id)


def prompt_ids(question: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the tokens of the question as the chat template puts it."""
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


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


@torch.no_grad()
def evaluate_samples(model: PreTrainedModel, corpus: Corpus, options: Training) -> Scores:
    """Sample answers to held-out problems at temperature 1, and count the right ones and the different ones of them."""
    scores = Scores()
    tokenizer = corpus.tokenizer
    tokenizer.padding_side = "left"
    problems = sorted(corpus.problems("test", options.questions, options.seed), key=corpus.group)
    for start in track(range(0, len(problems), PROMPTS_AT_A_TIME), "evaluating"):
        part = problems[start : start + PROMPTS_AT_A_TIME]
        questions = {"input_ids": [prompt_ids(p.question, tokenizer) for p in part]}
        prompts = tokenizer.pad(questions, return_tensors="pt").to(options.device)
        output = model.generate(
            **prompts,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=options.samples,
            max_new_tokens=corpus.max_tokens,
        )
        answers = output[:, prompts["input_ids"].shape[1] :]
        scores.lengths += (answers != tokenizer.pad_token_id).sum(1).tolist()
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        for index, problem in enumerate(part):
            group = texts[index * options.samples : (index + 1) * options.samples]
            right = [text for text in group if corpus.reward(text, problem.answer)]
            scores.correct.setdefault(corpus.group(problem), []).append(len(right))
            scores.distinct.append(len({corpus.key(text, problem.answer) if corpus.key else "" for text in right}))
    return scores


def report(scores: Scores, options: Training, console: Console) -> None:
    """Print Pass@1 and the share of questions with a right answer, with the questions for each count of them."""
    samples = options.samples
    table = Table("questions of", "number", "Pass@1", f"Pass@{samples}", *map(str, range(samples + 1)))
    everything = [count for group in scores.correct.values() for count in group]
    for name, correct in [*scores.correct.items(), ("all", everything)]:
        counts = Counter(correct)
        rates = (sum(correct) / len(correct) / samples, sum(count > 0 for count in correct) / len(correct))
        spread = [str(counts[k]) for k in range(samples + 1)]
        table.add_row(name, str(len(correct)), *(f"{rate:.3f}" for rate in rates), *spread)
    console.print(table)
    several = [(d, c) for d, c in zip(scores.distinct, everything, strict=True) if c > 1]
    if several:
        means = (sum(column) / len(several) for column in zip(*several, strict=True))
        console.print("where several answers are right: {:.2f} different solutions in {:.2f} answers".format(*means))
    lengths = sorted(scores.lengths)
    marks = [lengths[int(q * (len(lengths) - 1))] for q in (0.05, 0.5, 0.95, 1.0)]
    console.print("response tokens at 5, 50, 95 and 100 %:", *marks)
