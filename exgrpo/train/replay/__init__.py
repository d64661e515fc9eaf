"""Experience management (arXiv 2510.02245, section 3.2): storing, retiring, drawing and replaying.

Decisions from numpy arrays and a random generator; no model, no process group. `Replay` joins them. A method is five
functions, in the modules `admit`, `prioritise`, `compose`, `weigh` and `expire` (see `rules`). A new trajectory rule or
band is an entry in `candidates.RULES` or `groups.BANDS`, and its name in the options.
"""

from exgrpo.train.common.functions import needs
from exgrpo.train.config.objective import MethodOptions
from exgrpo.train.config.replay import ExperienceConfig
from exgrpo.train.replay.candidates import Candidates, Expired, MeanScores, Priority, draw
from exgrpo.train.replay.contract import PlannedGroup, Weighed
from exgrpo.train.replay.memory import ExperienceMemory
from exgrpo.train.replay.planner import BatchPlanner, FreshQuestions, Mixture
from exgrpo.train.replay.replay import Replay, ReplayState, StoreReport, numbers_of, planned_from, replay_metrics

__all__ = [
    "BatchPlanner",
    "Candidates",
    "ExperienceConfig",
    "ExperienceMemory",
    "Expired",
    "FreshQuestions",
    "MeanScores",
    "MethodOptions",
    "Mixture",
    "PlannedGroup",
    "Priority",
    "Replay",
    "ReplayState",
    "StoreReport",
    "Weighed",
    "draw",
    "needs",
    "numbers_of",
    "planned_from",
    "replay_metrics",
]
