"""Experience management (arXiv 2510.02245, section 3.2): what is kept, retired, drawn and replayed.

Pure decisions: numpy arrays and a random generator in, choices out. No model, no process group.
"""

from exgrpo.train.experience.memory import ExperienceMemory
from exgrpo.train.experience.partition import deviation_buckets, estimate_successes, in_band
from exgrpo.train.experience.plan import DelayedStart, FreshQuestions, StepPlan, plan_questions
from exgrpo.train.experience.sampling import bucket_log_weights, draw_questions
from exgrpo.train.experience.selection import select_trajectory

__all__ = [
    "DelayedStart",
    "ExperienceMemory",
    "FreshQuestions",
    "StepPlan",
    "bucket_log_weights",
    "deviation_buckets",
    "draw_questions",
    "estimate_successes",
    "in_band",
    "plan_questions",
    "select_trajectory",
]
