"""The server engine with real servers on CPUs, which run in processes of their own."""

import json
import logging

import numpy as np
import pytest
import requests
import torch

from exgrpo.train.common.distributed import ALONE
from exgrpo.train.common.errors import ConfigError
from exgrpo.train.policy.tokenizer import DTYPES
from exgrpo.train.rollout.engine import Sampling, collect
from exgrpo.train.rollout.server.engine import ServerEngine
from exgrpo.train.rollout.server.pool import NoServerError
from exgrpo.train.rollout.stops import Stops
from exgrpo.train.run.weight_check import check_engine
from tests.train import pieces, tiny
from tests.train.asking import check_ends, in_two_parts, requests_for
from tests.train.launch import ROOT, completed, free_port
from tests.train.rollout.server.servers import LONGEST, Server
from tests.train.rollout.vllm.installed import real
from tests.train.run.test_weight_check import FullLogitPolicy

pytestmark = real

EOS = (2, 5)
PROMPTS = [tiny.prompt(question) for question in range(6)]
COUNTS = [40, 1, 0, 3, 140, 40]  # 140 are more than a server takes at once
MAX_TOKENS = 12
TEMPERATURE = 0.7


class Fleet:
    """Servers of two models, all started together; whoever kills one leaves it to the next to start it again."""

    def __init__(self, folder):
        self.models = {tied: folder / f"tied={tied}" for tied in (True, False)}
        for tied, model in self.models.items():
            tiny.save_model(model, tied=tied, heads=1)
            pieces.save_tokenizer(model)
        self.first = self._server(folder, "first", True)
        self.second = self._server(folder, "second", True)
        self.bf16 = self._server(folder, "bf16", False, "--dtype=bf16")  # started when it is asked for
        self.servers = [self.first, self.second, self.bf16]

    def _server(self, folder, name, tied, *options):
        common = f"--max-tokens={LONGEST}", "--kv-cache-gib=0.1"
        return Server(self.models[tied], folder / f"{name}.log", *common, *options)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    fleet = Fleet(tmp_path_factory.mktemp("servers"))
    try:
        fleet.first.start()
        fleet.second.start()
        yield fleet
    finally:
        for server in fleet.servers:
            server.kill()


@pytest.fixture
def opened(fleet):
    """Engines that are closed at the end."""
    engines = []

    def make(*servers, tied=True, dtype="fp32", max_tokens=LONGEST - 8):
        urls = tuple(server.ready() for server in servers)
        settings = tiny.engine_settings(fleet.models[tied], dtype, eos=EOS, max_tokens=max_tokens, servers=urls)
        # Several buckets, of one weight and of several.
        engine = ServerEngine(settings, ALONE, bucket_bytes=3000)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


def moved(fleet, *, tied=True, dtype="fp32"):
    """A policy some steps away from the model."""
    policy = FullLogitPolicy(fleet.models[tied], DTYPES[dtype])
    generator = torch.Generator().manual_seed(0)
    for _, weight in policy.weights():
        weight.add_(torch.randn(weight.shape, generator=generator).to(weight.dtype), alpha=0.03)
    return policy


def pushed(fleet, opened, *servers):
    """An engine whose servers have the weights of a policy, and that policy."""
    engine, policy = opened(*servers or [fleet.first]), moved(fleet)
    engine.push_weights(policy.weights())
    return engine, policy


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def sample(engine, counts=COUNTS, temperature=TEMPERATURE, **changes):
    sampling = Sampling(MAX_TOKENS, temperature=temperature, log_prob=True, **changes)
    asked = requests_for(PROMPTS, counts, sampling, range(len(PROMPTS)))
    return collect(asked, engine.generate(asked))


@pytest.mark.parametrize(
    ("name", "tied", "dtype"), [("first", True, "fp32"), pytest.param("bf16", False, "bf16", marks=pytest.mark.long)]
)
def test_log_probs_are_those_of_a_full_forward_before_and_after_a_push(fleet, opened, name, tied, dtype):
    largest, mean = {"fp32": (1e-4, 1e-5), "bf16": (0.2, 3e-2)}[dtype]
    engine = opened(getattr(fleet, name), tied=tied, dtype=dtype)
    gap = FullLogitPolicy(fleet.models[tied], DTYPES[dtype]).gap(PROMPTS, sample(engine), TEMPERATURE)
    assert gap[0] < largest
    assert gap[1] < mean
    policy = moved(fleet, tied=tied, dtype=dtype)
    engine.push_weights(policy.weights())
    assert check_engine(policy, engine, PROMPTS, dtype=dtype, max_tokens=MAX_TOKENS, seed=0) < mean
    gap = policy.gap(PROMPTS, sample(engine), TEMPERATURE)
    assert gap[0] < largest
    assert gap[1] < mean
    assert engine.differing(policy.weights()) == []
    for weight_name, weight in policy.weights():
        if weight_name.endswith(("layers.1.self_attn.k_proj.weight", "layers.0.input_layernorm.weight")):
            weight.mul_(1.5)
    expected = ["model.layers.0.input_layernorm.weight", "model.layers.1.self_attn.k_proj.weight"]
    assert engine.differing(policy.weights()) == expected


def test_finished_answers_end_with_their_first_eos_and_cut_ones_have_none(fleet, opened):
    engine, _ = pushed(fleet, opened)
    answers = sample(engine, temperature=1.0)
    assert [len(of_prompt) for of_prompt in answers] == COUNTS
    check_ends([(one.response, one.finished, one.log_prob) for of in answers for one in of], EOS, MAX_TOKENS)


def test_stopped_answers_end_at_their_first_stop_string_and_the_server_stops_there(fleet, opened):
    engine, policy = pushed(fleet, opened)
    strings = ("b\n", "é:", ":Q", "x1", "</s>")  # none of which can be complete before its last character is whole
    start = fleet.first.generated()
    answers = sample(engine, temperature=1.0, stop=Stops(strings, pieces.read))
    everything = [rollout for of_prompt in answers for rollout in of_prompt]
    ends = [pieces.scan(rollout.response, strings) for rollout in everything]
    assert sum(end is not None for end in ends) > 20
    for rollout, end in zip(everything, ends, strict=True):
        assert end in (None, len(rollout.response))
        assert rollout.finished == (end is not None or rollout.response[-1] in EOS)
        assert rollout.finished or len(rollout.response) == MAX_TOKENS
    assert policy.gap(PROMPTS, answers, temperature=1.0)[0] < 1e-4
    # Rarely a broken character keeps the server from seeing its text for a token.
    assert fleet.first.generated() - start < 1.05 * sum(len(rollout.response) for rollout in everything)


def test_begun_answers_go_on_as_the_policy_does_after_prompt_and_beginning(fleet, opened):
    engine, policy = pushed(fleet, opened)
    strings = ("b\n", "é:", ":Q", "x1", "</s>")
    sampling = Sampling(MAX_TOKENS, log_prob=True, stop=Stops(strings, pieces.read))
    answers = in_two_parts(engine, requests_for(PROMPTS, [40] * len(PROMPTS), sampling, range(len(PROMPTS))), 3)
    assert policy.gap(PROMPTS, answers, 1.0)[0] < 1e-4
    responses = [rollout.response for of_prompt in answers for rollout in of_prompt]
    ends = [pieces.scan(response, strings) for response in responses]
    assert all(end in (None, len(response)) for end, response in zip(ends, responses, strict=True))
    assert any(end and end > 3 for end in ends)


def test_prompts_that_share_a_block_come_from_the_cache_until_a_push(fleet, opened):
    engine = opened(fleet.first)
    policy = moved(fleet)
    prompt = np.arange(3, 3 + 40, dtype=np.int32)  # a block has 32 tokens
    cached = []
    for push in (True, False, True):
        if push:
            engine.push_weights(policy.weights())
        asked = requests_for([prompt], [1], Sampling(2), [0])
        collect(asked, engine.generate(asked))
        counts = engine.counts()
        assert counts.prompt_tokens == 40
        cached.append(counts.cached_tokens)
    assert cached == [0, 32, 0]


def test_a_consumer_that_has_enough_leaves_no_request_behind(fleet, opened):
    engine, _ = pushed(fleet, opened)
    answers = engine.generate(requests_for(PROMPTS * 5, [4] * 30, Sampling(LONGEST - 8), range(30)))
    next(answers)
    answers.close()
    # A push waits for all requests that are still there.
    engine.push_weights(moved(fleet).weights())
    assert len(sample(engine)[0]) == COUNTS[0]


def test_a_killed_server_loses_no_answer_and_comes_back_with_the_next_push(fleet, opened, caplog):
    engine, policy = pushed(fleet, opened, fleet.first, fleet.second)
    asked = requests_for(PROMPTS * 10, [4] * 60, Sampling(LONGEST - 8), range(60))
    answers = engine.generate(asked)
    got = [next(answers)]
    fleet.second.kill()
    got += answers
    assert [len(of_prompt) for of_prompt in collect(asked, got)] == [4] * 60
    assert len(got) == 4 * 60
    assert len([text for text in warnings_in(caplog) if fleet.second.url in text]) == 1

    fleet.second.ready()
    idle = fleet.second.asked()
    sample(engine)
    assert fleet.second.asked() == idle
    policy = moved(fleet)
    engine.push_weights(policy.weights())
    assert policy.gap(PROMPTS, sample(engine), TEMPERATURE)[0] < 1e-4
    assert fleet.second.asked() > idle


def test_a_trainer_that_died_during_a_push_leaves_servers_that_the_next_one_can_use(fleet, opened):
    engine = opened(fleet.first)
    policy = moved(fleet)

    class Died(Exception):
        pass

    def weights():
        for i, pair in enumerate(policy.weights()):
            if i == 5:
                raise Died
            yield pair

    with pytest.raises(Died):
        engine.push_weights(weights())
    engine.close()
    again = opened(fleet.first)
    again.push_weights(policy.weights())
    assert policy.gap(PROMPTS, sample(again), TEMPERATURE)[0] < 1e-4


def test_weights_that_no_server_takes_are_a_clear_error_and_all_run_through(fleet, opened):
    engine = opened(fleet.first)
    policy = moved(fleet)
    seen = []

    def weights():
        yield "model.layers.9.mlp.down_proj.weight", torch.zeros(1000)
        for name, weight in policy.weights():
            seen.append(name)
            yield name, weight

    with pytest.raises(NoServerError, match=f"no rollout server is left \\({fleet.first.url}: 500 .*layers.9"):
        engine.push_weights(weights())
    assert seen == [name for name, _ in policy.weights()]
    with pytest.raises(NoServerError, match=r"layers\.9"):
        sample(engine)
    engine.push_weights(policy.weights())
    assert policy.gap(PROMPTS, sample(engine), TEMPERATURE)[0] < 1e-4


@pytest.mark.long
def test_two_ranks_with_sharded_weights(fleet, tmp_path):
    urls = [fleet.first.ready(), fleet.second.ready()]
    worker = ROOT / "tests" / "train" / "ranks_worker.py"
    completed(worker, str(fleet.models[True]), str(tmp_path), *urls, ranks=2)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for seen in ranks:
        assert "rollout.servers: http://127.0.0.1:1 cannot be reached" in seen["unreachable"]
        assert seen["before"] in ("NoServerError", "WeightMismatchError")  # by what other tests left behind
        assert seen["after"] < 1e-5
        assert seen["answers"] == 10
        assert seen["differing"] == []


def test_what_cannot_be_used_is_one_clear_error_with_the_command_that_helps(fleet, opened):
    command = "start it with `python -m exgrpo.tools.serve "
    with pytest.raises(ConfigError, match=f"{fleet.first.url} has tie_word_embeddings.*{command}"):
        opened(fleet.first, tied=False)
    with pytest.raises(ConfigError, match=f"takes 64 tokens.*are 65: {command}.*--max-tokens 65 --port"):
        opened(fleet.first, max_tokens=57)
    with pytest.raises(ConfigError, match=f"has dtype float32 and not bfloat16.*{command}.*--dtype bf16"):
        opened(fleet.first, dtype="bf16")
    nowhere = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ConfigError, match=f"rollout.servers: {nowhere} cannot be reached"):
        ServerEngine(tiny.engine_settings(fleet.models[True], max_tokens=8, servers=(nowhere,)), ALONE)


def test_a_server_that_dies_during_a_push_does_not_stop_it(fleet, opened, caplog):
    engine = opened(fleet.first, fleet.second)
    policy = moved(fleet)

    def weights():
        for i, pair in enumerate(policy.weights()):
            if i == 5:
                fleet.second.kill()
            yield pair

    engine.push_weights(weights())
    assert policy.gap(PROMPTS, sample(engine), TEMPERATURE)[0] < 1e-4
    (warning,) = warnings_in(caplog)
    assert f"{fleet.second.url} takes no weights and is left out until it does: " in warning


def test_routes_that_change_a_server_are_open_to_no_other_machine_and_nobody_without_the_token(fleet):
    url = fleet.first.ready()
    with pytest.raises(requests.ConnectionError):
        requests.get(f"http://127.0.0.2:{fleet.first.port}/health", timeout=5)
    content, page = {"Content-Type": "application/json"}, {"Origin": "http://evil.example", "Host": "evil.example"}
    for route in ("collective_rpc", "update_weights", "sleep", "pause", "inference/v1/generate", "v1/completions"):
        for headers in (page, content):
            assert requests.post(f"{url}/{route}", data=b"{}", headers=headers, timeout=60).status_code == 401
