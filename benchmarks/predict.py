"""Prediction of the head's times on an H100, before and after slices of the vocabulary: `python -m benchmarks.predict`.

The numbers of chunks and slices are the library's. The constants are fitted to records; the last line says how well.
"""

import re
from pathlib import Path
from statistics import median

import torch

from benchmarks.record import read
from exgrpo.kernels.chunks import chunking, walks
from exgrpo.kernels.chunks.head import ChunkedHead
from exgrpo.kernels.cuda_chunks.cuda_fused import FusedCudaPasses
from exgrpo.kernels.inputs import Head, HeadOptions, VocabShard
from exgrpo.kernels.triton_chunks.launch import planned
from exgrpo.kernels.triton_chunks.triton_passes import rows_of

ROW = re.compile(r"(forward|log_prob|policy_loss(?:\+entropy)?) bfloat16 (\d+)x(\d+)x(\d+)")
SIZES = ((8192, 4096, 131072), (8192, 3584, 152064), (8192, 1536, 151936), (16384, 4096, 151936))
OPERATIONS = ("log_prob", "log_prob+entropy", "policy_loss", "policy_loss+entropy")
PROCESSORS, PEAK, BANDWIDTH = 132, 989e12, 3.35e12  # data sheet of an H100 SXM
BURST, SUSTAINED, CREDIT = 0.79, 0.685, 2.5e-3
"""Shares of the peak that products reach after an idle time, and under the power limit, which spares them some seconds
after an idle time."""
EPILOGUE = 0.9e-12
"""Seconds of a logit that the epilogue of the fused product takes beside its main loops."""
MOVED, SHORT, EXPOSED = 0.65, 0.85, 0.3
"""Shares of the bandwidth that elementwise passes reach, and short programs (assumed); share of the time of a product's
result that its main loops do not hide."""
LAUNCH, LAUNCHES = 8.5e-6, {"forward": (16, 9), "log_prob": (41, 7), "policy_loss": (25, 13)}
"""Seconds of a launch; how many a call has, and each chunk or slice."""
BOUNDED = "2026-11-25"
"""Records before this day have chunks of 8192 rows, 30 launches a chunk, and gradients scaled by that of the loss."""


def plan_of(operation: str, size: tuple[int, int, int], *, after: bool) -> tuple[int, int]:
    """Return the library's numbers of chunks and slices for bf16; ``after``: with slices, and a bound on the peak."""
    tokens, width, vocabulary = size
    hidden, weight = (torch.empty(n, width, dtype=torch.bfloat16, device="meta") for n in (tokens, vocabulary))
    target = torch.empty(tokens, dtype=torch.int64, device="meta")
    options = HeadOptions(None, None, torch.bfloat16, VocabShard.whole(vocabulary), counts=(tokens, tokens))
    walk = ChunkedHead(Head(hidden, weight, None, target, options))
    passes = FusedCudaPasses(walk, planned("sm_90", torch.bfloat16, width))
    spare = 4 * vocabulary * width if after and operation.startswith("policy") else 0
    rows = rows_of(passes.plan, None, tokens, width, passes.cost(vocabulary), PROCESSORS, spare)
    columns = walks.slice_columns(walk, passes, rows) if after and operation.startswith("log_prob") else 0
    chunks = len(list(chunking.spans(tokens, rows, chunking.TILE_ROWS)))
    return chunks, -(-vocabulary // columns) if columns else 0


def seconds(
    operation: str, size: tuple[int, int, int], plan: tuple[int, int], *, after: bool, scaled: bool = False
) -> float:
    """Return what a call should take, forward and backward; ``scaled``: by the code of the first records."""
    (tokens, width, vocabulary), (chunks, slices) = size, plan
    name, _, entropy = operation.partition("+")
    of_hidden, of_weight, logits = tokens * width, vocabulary * width, tokens * vocabulary
    scaled, summed, fused = scaled and name == "policy_loss", chunks > 1 and not slices, 1 + (name == "log_prob")
    call, each = LAUNCHES[name]
    launches = call + (slices or chunks) * (each + 17 * scaled)
    moved = short = exposed = 0.0
    if name != "forward":  # row scales, gradients to bf16, and the sum of that of the weight for each chunk
        moved = 18 * of_hidden + 6 * of_weight * summed + 4 * (of_weight + of_hidden) * scaled
        exposed = 2 * logits + 4 * of_hidden * max(1, slices) + of_weight * (4 * chunks if summed else 2)
    if entropy and after:  # the backward of log-probs has it in the product's epilogue
        short = 4 * logits * (name != "log_prob")
    elif entropy:
        moved += 4 * logits
    flops = 2 * logits * width * (fused + 2 * (name != "forward"))
    products = max(flops / (BURST * PEAK), flops / (SUSTAINED * PEAK) - CREDIT) + EPILOGUE * fused * logits
    return products + ((moved + EXPOSED * exposed) / MOVED + short / SHORT) / BANDWIDTH + launches * LAUNCH


def errors() -> list[float]:
    """Predicted over measured time of each group in the records of an H100, of its faster backend."""
    found = []
    for record in map(read, sorted(Path(__file__).parent.glob("results/*_nvidia-h100*.json"))):
        times: dict[str, float] = {}
        for row in record.rows:
            if row.get("row") in ("exgrpo cuda", "exgrpo triton") and ROW.fullmatch(row["group"]):
                times[row["group"]] = min(row["median"], times.get(row["group"], row["median"]))
        for group, time in times.items():
            operation, *numbers = re.split(r" bfloat16 |x", group)
            size, old = (int(numbers[0]), int(numbers[1]), int(numbers[2])), record.date < BOUNDED
            plan = (-(-size[0] // 8192), 0) if old else plan_of(operation, size, after=False)
            found.append(seconds(operation, size, plan, after=False, scaled=old) / time)
    return found


def main() -> None:
    """Print the table, and how well the model fits the records."""
    print(f"{'(T, D, V)':23} {'operation':21} {'before':>8} chunks {'after':>8} chunks slices")
    for size in SIZES:
        for operation in OPERATIONS:
            plans = [plan_of(operation, size, after=after) for after in (False, True)]
            before, now = (1e3 * seconds(operation, size, plans[i], after=bool(i)) for i in (0, 1))
            chunks = 0 if plans[1][1] else plans[1][0]
            print(
                f"{size!s:23} {operation:21} {before:5.1f} ms {plans[0][0]:6} {now:5.1f} ms {chunks:6} {plans[1][1]:6}"
            )
    ratios = sorted(errors())
    print(
        f"predicted / measured in {len(ratios)} rows: {ratios[0]:.2f} to {ratios[-1]:.2f}, median {median(ratios):.2f}"
    )


if __name__ == "__main__":
    main()
