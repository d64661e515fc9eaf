"""Do the rollout engine and the trainer compute the same policy?"""

from exgrpo.train.doctor.check import Check, Given
from exgrpo.train.doctor.tiny import open_inputs, tiny_run

REMEDY = "Try --rollout.engine transformers, --policy.kernel_backend torch and --policy.attention eager, one by one"


def check(given: Given) -> str:
    """Set the small run up as any run is: the policy's weights go to the engine, and their log-probs are compared."""
    config = tiny_run(given)
    inputs, world = open_inputs(config, given.resources)
    from exgrpo.train.run import Run
    from exgrpo.train.weight_check import TOLERANCE

    run = Run(config, inputs, world, given.resources)
    dtype = config.policy.dtype
    return (
        f"{run.parts.choice.name} and trainer in {dtype}: log-probs differ by {run.weight_gap:.1e} on average, and "
        f"{TOLERANCE[dtype]:.0e} is allowed"
    )


CHECKS = (Check("agreement", check, 2, REMEDY),)
