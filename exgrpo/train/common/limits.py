"""Bounds of the numbers of a run: what lies beyond cannot be meant, and would end in no memory or no sense."""

MOST_STEPS = 99_999_999
"""Checkpoints are sorted by the eight digits of their names."""
LONGEST = 2**24
"""Tokens of a sequence: no model has so many positions."""
MOST_TOKENS = 2**28
"""Tokens of a batch: their ids alone take 1 GiB."""
MOST_LAYERS = 1000
"""Of a model; the largest ones have some hundreds."""
MOST_SAMPLES = 2**14
"""Answers to a question; the largest published studies of pass@k have 10,000."""
MOST_KEPT = 1024
"""Words that `rollout.top_k` may leave: each is stored with its token, in 4 bytes."""
MOST_ANSWERS = 2**20
"""Answers of a step: every rank holds all of them, with their log-probs and scores."""
MOST_ROWS = 10**7
"""Questions: every rank holds all of them, about 1 kB each."""
MOST_PROCESSES = 1024
"""Of one kind: a machine has no more cores, and no head of a model is split further."""
MOST_CALLS = 1000
"""In flight in one process: each has a connection, and many systems let a process open 1024 files."""
MOST_GIB = 2**20
"""Memory of a process: no machine has so much."""
RESERVED_GIB = 4.0
"""Of a GPU, for what is no tensor of the run: the CUDA context, NCCL, workspaces of libraries, fragmentation."""
MOST_PARTS = 100
"""Of a reward: each is a line of the metrics."""
LARGEST_REWARD = 1e6
"""Advantages are computed in fp32, which has seven digits: beside larger rewards, differences of 0.1 vanish."""
