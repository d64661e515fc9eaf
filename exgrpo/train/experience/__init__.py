"""Experience management (arXiv 2510.02245, section 3.2): what is kept, retired, drawn and replayed.

Pure decisions: numpy arrays and a random generator in, choices out. No model, no process group.
"""

from exgrpo.train.experience.difficulty import Evidence, count_successes, deviation_counts, in_band
from exgrpo.train.experience.memory import ExperienceMemory
from exgrpo.train.experience.plan import DelayedStart, FreshQuestions, StepPlan, plan_questions
from exgrpo.train.experience.sampling import draw_questions, question_law
from exgrpo.train.experience.selection import select_trajectory

__all__ = [
    "DelayedStart",
    "Evidence",
    "ExperienceMemory",
    "FreshQuestions",
    "StepPlan",
    "count_successes",
    "deviation_counts",
    "draw_questions",
    "in_band",
    "plan_questions",
    "question_law",
    "select_trajectory",
]
