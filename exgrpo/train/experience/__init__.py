"""Experience management (arXiv 2510.02245, section 3.2): what is kept, retired, drawn and replayed.

Pure decisions: numpy arrays and a random generator in, choices out. No model, no process group. `Replay` joins them
all. A further question law, trajectory rule, way to read rewards or band is one entry in a table: `sampling.LAWS`,
`selection.RULES`, `buckets.BUCKETS`, `difficulty.BANDS`; the configuration takes the names from there.
"""

from exgrpo.train.experience.difficulty import Evidence, count_successes, deviation_counts, in_band
from exgrpo.train.experience.memory import ExperienceMemory, MemoryRules
from exgrpo.train.experience.plan import DelayedStart, FreshQuestions, Mixture, StepPlan, plan_questions
from exgrpo.train.experience.replay import Replay, ReplayState, Selected, TakenIn
from exgrpo.train.experience.sampling import draw_questions, question_law
from exgrpo.train.experience.selection import Candidates, MeanScore

__all__ = [
    "Candidates",
    "DelayedStart",
    "Evidence",
    "ExperienceMemory",
    "FreshQuestions",
    "MeanScore",
    "MemoryRules",
    "Mixture",
    "Replay",
    "ReplayState",
    "Selected",
    "StepPlan",
    "TakenIn",
    "count_successes",
    "deviation_counts",
    "draw_questions",
    "in_band",
    "plan_questions",
    "question_law",
]
