"""A stand-in for vLLM on a GPU: it accepts exactly the recorded arguments of each version of vLLM.

It raises where the real one would access memory that does not exist.
"""

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import torch

from tests.train.rollout.vllm.signatures import recorded, signature

GARBAGE = -1


def checked(version, name, function):
    """The function with the parameters that the one of this name has in a version."""

    def call(*args, **kwargs):
        signature(version, name).bind(*args, **kwargs)
        return function(*args, **kwargs)

    return call


class Module:
    """The module `vllm` of a version: its one engine, `made`, and `error`, which making it raises."""

    def __init__(self, version):
        self.version, self.made, self.error, self.configured = version, None, None, False
        self.emptied = self.older_runner = False
        self.reloads = 0
        fields = partial(checked, version)
        self.SamplingParams = fields("SamplingParams", lambda **given: SimpleNamespace(**given))
        self.sampling_params = SimpleNamespace(RequestOutputKind=SimpleNamespace(CUMULATIVE="all", FINAL_ONLY="end"))
        self.inputs = SimpleNamespace(tokens_input=fields("tokens_input", lambda prompt: prompt))
        self.config = SimpleNamespace(set_current_vllm_config=fields("set_current_vllm_config", self._configured))

    def LLM(self, path, **given):
        own = signature(self.version, "LLM").parameters
        own_arguments = {name: value for name, value in given.items() if name in own}
        signature(self.version, "LLM").bind(path, **own_arguments)
        signature(self.version, "EngineArgs").bind(**{name: value for name, value in given.items() if name not in own})
        if self.error:
            raise self.error
        self.made = StandIn(self)
        return self.made

    @contextmanager
    def _configured(self, config):
        assert config is self.made.vllm_config
        self.configured = True
        yield
        self.configured = False


class StandIn:
    """LLM and LLMEngine: memory by tag as vLLM keeps it; its one weight is the token that it generates."""

    def __init__(self, module):
        self.module, self.llm_engine = module, self
        assert "VllmConfig.use_v2_model_runner" in recorded()[module.version]
        self.vllm_config = SimpleNamespace(use_v2_model_runner=not module.older_runner)
        self.asleep = set()
        self.model = RMSNorm()
        self.saved = None
        self.requests = {}
        self.parameters = []
        self.steps_behind = 0
        self.error = None
        for of, names in (
            ("LLM", ("sleep", "wake_up", "collective_rpc", "apply_model")),
            ("LLMEngine", ("add_request", "step", "abort_request", "reset_prefix_cache", "has_unfinished_requests")),
        ):
            for name in names:
                setattr(self, name, checked(module.version, f"{of}.{name}", getattr(self, f"_{name}")))

    def _sleep(self, level):
        assert not self.requests, "asleep with requests under way"
        assert not self.asleep, "up to 0.30 vLLM passes over a sleep where a part is asleep"
        self.saved = self.weight if level == 1 else None
        self.weight = GARBAGE
        self.asleep = {"weights", "kv_cache"}

    def _wake_up(self, tags):
        assert self.module.emptied, "0.26 does not give back what torch has cached"
        self.module.emptied = False
        if self.error:
            raise self.error
        for tag in tags:
            assert tag in self.asleep, f"vLLM passes over a wake of {tag}, which is awake"
        self.asleep -= set(tags)
        if "weights" in tags and self.saved is not None:
            self.weight = self.saved

    def _collective_rpc(self, method, kwargs):
        assert method == "reload_weights"
        for runner in ("GPUModelRunner", "GPUModelRunnerV2"):
            signature(self.module.version, f"{runner}.{method}").bind(**kwargs)
        assert self.module.configured, "0.26 reloads weights without its configuration"
        assert "weights" not in self.asleep, "weights are loaded into memory that is not there"
        self.module.reloads += 1
        ((_, weight),) = kwargs["weights_iterator"]
        self.weight = weight

    def _apply_model(self, function):
        assert "weights" not in self.asleep, "reads memory that is not there"
        return [function(self.model)]

    @property
    def weight(self):
        return int(self.model.weight)

    @weight.setter
    def weight(self, weight):
        self.model.weight.data.fill_(weight.item() if isinstance(weight, torch.Tensor) else weight)

    def _has_unfinished_requests(self):
        return bool(self.requests)

    def _reset_prefix_cache(self):
        assert not self.asleep
        return not self.steps_behind

    def _add_request(self, name, prompt, parameters):
        assert not self.asleep, "generates while it is asleep"
        self.requests[name] = prompt
        self.parameters.append(parameters)

    def _step(self):
        assert not self.asleep, "generates while it is asleep"
        if self.error:
            raise self.error
        self.steps_behind = max(0, self.steps_behind - 1)
        return [Output(self.requests.popitem()[0], self.weight)] if self.requests else []

    def _abort_request(self, names):
        for name in names:
            self.requests.pop(name)


class RMSNorm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))


class Output:
    num_cached_tokens = 0
    finished = True
    logprobs = None

    def __init__(self, request_id, token):
        self.request_id = request_id
        self.outputs = [self]
        self.token_ids = [token]
        self.finish_reason = "stop"


class Weights:
    """Can be run through again, as the trainer's."""

    def __init__(self, weight):
        self.weight = weight

    def __iter__(self):
        return iter([("weight", torch.tensor([float(self.weight)]))])
