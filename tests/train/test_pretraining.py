"""The scripts that make the shipped models: their tokenizers, their corpora, and a short run of one."""

from dataclasses import replace
from importlib import import_module
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from exgrpo.train.common.functions import ASSETS, model_names
from exgrpo.train.data.tasks.countdown import MODEL_FOLDER, generate, reward
from recipes import pretraining
from recipes.countdown import start


@pytest.fixture(params=model_names())
def script(request):
    return import_module(f"recipes.{request.param}.pretrain")


def test_a_script_makes_the_tokenizer_that_ships(script, tmp_path):
    script.corpus(script.Options()).tokenizer.save_pretrained(tmp_path)
    made, shipped = tmp_path / "tokenizer.json", script.MODEL_FOLDER / "tokenizer.json"
    assert made.read_text() == shipped.read_text()
    made, shipped = map(AutoTokenizer.from_pretrained, (tmp_path, script.MODEL_FOLDER))
    assert made.chat_template == shipped.chat_template
    assert made.special_tokens_map == shipped.special_tokens_map


def test_solutions_fit_survive_the_tokenizer_and_are_of_mixed_quality(script):
    corpus = script.corpus(script.Options())
    rng = Random(0)
    rewards = []
    for problem in corpus.problems("pretrain", 400, 0):
        solution = corpus.solution(problem, rng)
        ids = corpus.tokenizer(solution)["input_ids"]
        assert corpus.tokenizer.decode(ids) == solution
        assert len(ids) + 1 <= corpus.max_tokens
        rewards.append(corpus.reward(solution, problem.answer))
    assert 0.1 < sum(rewards) / len(rewards) < 0.9


def test_the_corpus_has_the_given_shares_of_the_difficulties():
    script = import_module("recipes.countdown.pretrain")
    corpus = script.corpus(script.Options(output=ASSETS, shares=(0.5, 0.3, 0.2, 0.0)))
    found = [problem.difficulty for problem in corpus.problems("pretrain", 100, 0)]
    assert [found.count(difficulty) for difficulty in (1, 2, 3, 4)] == [50, 30, 20, 0]
    assert {p.difficulty for p in corpus.problems("test", 20, 0)} == {2}


def test_a_short_run_saves_a_model_that_can_be_loaded(tmp_path, capsys):
    script = import_module("recipes.colouring.pretrain")
    options = script.Options(output=tmp_path, steps=3, batch=8, problems=40, questions=8, samples=2, hidden=32)
    pretraining.run(script.corpus(options), options)
    assert "Pass@2" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.float32
    for weight in model.parameters():
        scaled = torch.frexp(weight.detach()).mantissa * 2**pretraining.SIGNIFICANT
        assert torch.equal(scaled, scaled.round())
    assert model.config.hidden_size == 32
    assert model.config.vocab_size == script.VOCABULARY


def test_answers_of_a_supervised_start_try_expressions_until_one_is_right():
    rng, wrong = Random(0), set()
    for problem in generate("pretrain", 200, 0):
        *tried, boxed = start.search(problem, rng).split("\n")
        expressions, values = zip(*(line.split(" = ") for line in tried), strict=True)
        assert [eval(text) for text in expressions] == [int(value) for value in values]
        right = [reward(f"\\boxed{{{text}}}", problem.answer) for text in expressions]
        assert right == [0.0] * (len(tried) - 1) + [1.0]
        assert boxed == f"\\boxed{{{expressions[-1]}}}"
        wrong.add(len(tried) - 1)
    assert wrong == set(range(start.WRONG + 1))


def test_a_supervised_start_teaches_a_model_and_saves_it_with_its_tokenizer(tmp_path, capsys):
    options = start.Options(model=MODEL_FOLDER, output=tmp_path, steps=16, batch=4, lr=6e-3, matrix_lr=6e-3)
    start.main(replace(options, problems=100, questions=4, samples=2))
    said = capsys.readouterr().out
    assert "Pass@2" in said
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16
    losses = []
    for folder in (MODEL_FOLDER, tmp_path):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        corpus = start.corpus_of(tokenizer)
        ids, targets = next(pretraining.batches(corpus, replace(options, problems=64, batch=64), Random(1)))
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item())
    assert losses[1] < 0.5 * losses[0], losses
