"""Work of each of two gloo processes in the tests of sharded heads."""

import copy
import os
from functools import partial
from importlib.util import find_spec

import pytest
import torch

from exgrpo.heads import head_inputs, vocab_shard
from exgrpo.kernels import linear_log_prob

WORLD = 2


def check(rank, checks):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), DS_ACCELERATOR="cpu")
    for each in checks:
        each(rank)


def tensor_parallel(rank):
    """A DTensor split along V, unevenly: results and gradients are those of the whole head."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(0)
    hidden = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    weight, bias = torch.randn(33, 8, dtype=torch.float64), torch.randn(33, dtype=torch.float64)
    target = torch.randint(33, (2, 5))
    whole = [x.clone().requires_grad_() for x in (weight, bias)]
    split = [torch.nn.Parameter(distribute_tensor(x, mesh, [Shard(0)])) for x in (weight, bias)]

    shard = vocab_shard(*split)
    found = linear_log_prob(hidden, shard.weight, target, bias=shard.bias, vocab_group=shard.vocab_group)
    exact = linear_log_prob(hidden, whole[0], target, bias=whole[1])
    torch.testing.assert_close(found, exact)
    ours = torch.autograd.grad((found.log_prob + found.entropy).sum(), [hidden, *split])
    own = torch.autograd.grad((exact.log_prob + exact.entropy).sum(), [hidden, *whole])
    assert all(gradient.placements == (Shard(0),) for gradient in ours[1:])
    torch.testing.assert_close([ours[0], *(x.full_tensor() for x in ours[1:])], list(own))

    replicated = distribute_tensor(weight, mesh, [Replicate()])
    with pytest.raises(ValueError, match=r"weight: expected the placement .*Replicate.*to_local"):
        vocab_shard(replicated)
    with pytest.raises(TypeError, match="bias: expected a DTensor"):
        vocab_shard(split[0], bias)
    head = torch.nn.Linear(8, 33)
    head.weight = split[0]
    with pytest.raises(RuntimeError, match=r"Linear.weight: a DTensor .*vocab_shard"):
        head_inputs(head, hidden)


def plain(name):
    from . import tiny

    return tiny.model(name)


def adapted(name):
    """With LoRA on the head and elsewhere, the same on all ranks."""
    import peft

    model = plain(name)
    options = peft.LoraConfig(target_modules=["lm_head", "q_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, options)


def check_data_parallel(rank, wrap, gather, make=plain, names=("llama", "qwen2")):
    """Patched and wrapped, each rank with its own row: gradients are those of both rows together on one rank.

    The first one has a head of its own, the second one a tied one.
    """
    from exgrpo.integrations.transformers import patch_lm_head

    from . import tiny

    batch = tiny.batch()
    for name in names:
        model = make(name)
        alone = patch_lm_head(copy.deepcopy(model))
        output = alone(**batch)
        (output.log_prob.sum() + 2 * output.entropy.sum()).backward()
        wrapped, backward = wrap(model)
        found = wrapped(**{key: values[rank : rank + 1] for key, values in batch.items()})
        torch.testing.assert_close(found.log_prob, output.log_prob[rank : rank + 1], rtol=1e-5, atol=1e-5)
        backward((found.log_prob.sum() + 2 * found.entropy.sum()) * WORLD)  # which gradients are averaged over
        for (key, parameter), own in zip(model.named_parameters(), alone.parameters(), strict=True):
            if not own.requires_grad:
                continue
            torch.testing.assert_close(
                gather(parameter), own.grad, rtol=1e-4, atol=1e-4, msg=lambda m, k=key: f"{k}: {m}"
            )


def replicated(rank):
    """DDP."""
    from exgrpo.integrations.transformers import patch_lm_head

    def wrap(model):
        return torch.nn.parallel.DistributedDataParallel(patch_lm_head(model)), torch.Tensor.backward

    check_data_parallel(rank, wrap, lambda parameter: parameter.grad)


def fully_sharded(rank):
    """FSDP2, the head in the root's group and in one of its own, patched before and after."""
    from torch.distributed.fsdp import fully_shard

    from exgrpo.integrations.transformers import patch_lm_head

    def wrap(model, first, own_group):
        if first:
            patch_lm_head(model)
        for layer in model.model.layers:
            fully_shard(layer)
        if own_group and not model.config.tie_word_embeddings:
            fully_shard(model.lm_head)
        fully_shard(model)
        with pytest.raises(RuntimeError, match="a DTensor .*under FSDP call the model"):
            head_inputs(model.lm_head, torch.zeros(1, 32))
        return model if first else patch_lm_head(model), torch.Tensor.backward

    for first, own_group in ((True, False), (False, True)):
        check_data_parallel(
            rank,
            lambda model, first=first, own_group=own_group: wrap(model, first, own_group),
            lambda parameter: parameter.grad.full_tensor(),
        )


def zero3(rank):
    """ZeRO-3: patched in the engine and before; outside a forward the partitioned head is refused."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    from exgrpo.integrations.transformers import patch_lm_head

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which else is compiled for minutes
    deepspeed.init_distributed("gloo")
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }

    def wrap(model, first=False):
        if first:
            patch_lm_head(model)
        optimizer = torch.optim.AdamW(model.parameters())
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        if not first:
            patch_lm_head(engine.module)
        head, hidden = model.get_output_embeddings(), torch.zeros(1, 32)
        with pytest.raises(RuntimeError, match="ZeRO-3 has it partitioned, .*GatheredParameters"):
            head_inputs(head, hidden)
        with pytest.raises(ValueError, match=r"weight: expected shape \[V, 32\].*got \[0\]"):
            linear_log_prob(hidden, getattr(head, "base_layer", head).weight, torch.zeros(1, dtype=torch.int64))
        return engine, engine.backward

    check_data_parallel(rank, wrap, safe_get_full_grad)
    check_data_parallel(rank, partial(wrap, first=True), safe_get_full_grad)
    if find_spec("peft"):
        check_data_parallel(rank, wrap, safe_get_full_grad, adapted, ["llama"])
    partitioned = plain("llama")
    deepspeed.zero.Init(module=partitioned, config_dict_or_path=settings)
    with pytest.raises(RuntimeError, match=r"patch engine.module, after deepspeed.initialize"):
        patch_lm_head(partitioned)
