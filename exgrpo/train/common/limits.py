"""Upper bounds of the numbers of a run: larger values are mistakes and would exhaust memory or make no sense."""

MOST_STEPS = 99_999_999
"""Checkpoints are sorted by the eight digits of their names."""
LONGEST = 2**24
"""Tokens of a sequence: no model has so many positions."""
MOST_TOKENS = 2**28
"""Tokens of a batch: their ids alone take 1 GiB."""
MOST_LAYERS = 1000
"""Layers of a model; the largest models have some hundreds."""
MOST_SAMPLES = 2**14
"""Answers to a question; the largest published studies of pass@k have 10,000."""
MOST_KEPT = 1024
"""Tokens that `rollout.top_k` may allow: each is stored with its token, in 4 bytes."""
MOST_ANSWERS = 2**20
"""Answers of a step: every rank holds all of them, with their log-probs and scores."""
MOST_ROWS = 10**7
"""Questions: every rank holds all of them, about 1 kB each."""
MOST_PROCESSES = 1024
"""Processes of one kind: no machine has more cores, and no model's heads are split further."""
MOST_CALLS = 1000
"""Calls in flight per process: each has a connection, and many systems let a process open 1024 files."""
MOST_GIB = 2**20
"""Memory of a process in GiB: no machine has so much."""
RESERVED_GIB = 4.0
"""GPU memory reserved for everything but the run's tensors: CUDA context, NCCL, library workspaces, fragmentation."""
MOST_PARTS = 100
"""Parts of a reward: each is a line of the metrics."""
LARGEST_REWARD = 1e6
"""Advantages are computed in fp32, with seven digits: in larger rewards, differences of 0.1 vanish."""
