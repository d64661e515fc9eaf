"""Three optimiser steps under ZeRO-3; rank 0 saves what came out. Arguments: model folder, result file, JSON cases."""

import json
import sys
from pathlib import Path

import torch

from exgrpo.train.common.distributed import start
from exgrpo.train.config.options import ObjectiveConfig
from exgrpo.train.policy.policy import Policy
from exgrpo.train.policy.scores import make_reference
from exgrpo.train.policy.source import find_model
from tests.train import tiny


def main(result: Path, cases: list[dict]) -> None:
    world = start(timeout_minutes=2)
    tiny.allow_fp16()
    outcomes = []
    for case in cases:
        folder = Path(case.pop("model"))
        case.pop("rates", None)  # what they come to
        objective = ObjectiveConfig(**case.pop("objective"))
        clip = case.pop("clip", True)
        term = case.pop("term")
        poison = case.pop("poison", False)
        of_rows = {name: case.pop(name, False) for name in ("observing", "allowed_tokens")}
        config, source = tiny.config(folder, objective, **case), find_model(str(folder))
        policy = Policy(config, source, world)
        reference = make_reference(config, source, policy)
        sharded = world.size == 1 or all(p.ds_tensor.numel() < p.ds_numel for p in policy.model.parameters())
        batches = tiny.minibatches(objective, reference, **of_rows)
        if poison:
            batches[0] = tiny.poisoned(batches[0])
        stats = [policy.update(minibatch, clip=clip, term=term) for minibatch in batches]
        score = policy.score(tiny.step_batch(**of_rows), policy.temperature)
        found = {"stats": [vars(s) for s in stats], "frequencies": policy.model.get_decoder().rotary_emb.inv_freq}
        found |= {name: torch.from_numpy(getattr(score, name)) for name in ("log_prob", "entropy")}
        weights = {name: weight.clone() for name, weight in policy.weights()}
        outcomes.append({**found, "sharded": sharded, "weights": weights})
    if world.is_main:
        torch.save(outcomes, result)


if __name__ == "__main__":
    *_, result, cases = sys.argv  # the launcher puts --local_rank first
    main(Path(result), json.loads(cases))
