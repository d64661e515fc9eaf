"""Predicted seconds of generation with and without partial rollouts: `python -m benchmarks.partial`.

A model, no measurement: each GPU has a policy of 7 billion parameters in bf16 (28 layers, 4 heads of keys and values)
and decodes as fast as memory is read, 3.35 TB/s at 70 %: the weights, and the keys and values of all open answers. What
is begun is read again at 300 TFLOP/s. Lengths are log-normal and cut at the limit; half of the variance of their
logarithms is the question's. A step needs 8 groups of 8 answers for each GPU.
"""

import sys

import numpy as np

SHARE, SAMPLES, WARM, STEPS, OLDEST = 8, 8, 10, 60, 4
WEIGHT_SECONDS, TOKEN_SECONDS, READ_SECONDS = 15.2e9 / 2.3e12, 57344 / 2.3e12, 15.2e9 / 3e14
LENGTHS = {"8k": (2500, 0.8, 8192), "16k": (5000, 0.9, 16384), "32k": (8000, 1.0, 32768)}
"""Median, standard deviation of the logarithm, and limit, in tokens."""
Numbers = dict[str, float]


def drawn(rng: np.random.Generator, lengths: str, groups: int) -> np.ndarray:
    """Return the lengths [G, K] of answers."""
    median, sigma, limit = LENGTHS[lengths]
    logs = rng.normal(0, sigma / 2**0.5, (groups, 1)) + rng.normal(0, sigma / 2**0.5, (groups, SAMPLES))
    return np.minimum(np.ceil(median * np.exp(logs)), limit).astype(int)


def decoded(left: np.ndarray, written: np.ndarray, end: int) -> Numbers:
    """Return what a GPU takes for `end` tokens of each answer [G, K] that has so many left and written."""
    time, order = np.arange(end), np.argsort(left.ravel())
    running = left.size - np.searchsorted(left.ravel()[order], time, side="right")
    begun = np.concatenate([np.cumsum(written.ravel()[order][::-1])[::-1], [0]])[left.size - running]
    context = int((begun + running * time).sum())
    read = int(written[left > 0].sum())
    seconds = end * WEIGHT_SECONDS + context * TOKEN_SECONDS + read * READ_SECONDS
    return {"seconds": seconds, "open": float(running.sum()), "end": float(end)}


def simulate(lengths: str, oversample: float, gpus: int, common: bool) -> Numbers:
    """Return means over steps. `common`: all GPUs end together, and not each with its share of the groups."""
    needed, rng, found = SHARE * gpus, np.random.default_rng(0), []
    total, written, began = (np.empty((0, SAMPLES), int) for _ in range(3))
    for step in range(WARM + STEPS):
        old = (written > 0) & (began < step - OLDEST)
        written[old], began[old] = 0, step
        more = needed if step else round(oversample * needed)
        total = np.concatenate([total, drawn(rng, lengths, more)])
        written, began = (
            np.concatenate([now, np.full((more, SAMPLES), new)]) for now, new in ((written, 0), (began, step))
        )
        left, parts = total - written, []
        waited = (left == 0).all(1)
        ends = [np.sort(left[rank::gpus].max(1)) for rank in range(gpus)]
        last = np.sort(np.concatenate(ends))[needed - 1]
        for rank in range(gpus):
            end = min(last, ends[rank][-1]) if common else ends[rank][SHARE - 1]
            parts.append(decoded(left[rank::gpus], written[rank::gpus], int(end)))
            written[rank::gpus] += np.minimum(left[rank::gpus], end)
        whole = np.flatnonzero((written == total).all(1))
        whole = whole[np.argsort(~waited[whole], kind="stable")][:needed]
        open_ = sum(part["open"] for part in parts) / max(1.0, sum(part["end"] for part in parts))
        seconds, ages = max(part["seconds"] for part in parts), step - began[whole]
        found.append((seconds, open_, (ages > 0).mean(), ages.max(), total[whole].mean()))
        total, written, began = (np.delete(values, whole, 0) for values in (total, written, began))
    names = ("seconds", "open", "continued", "oldest", "length")
    return dict(zip(names, np.array(found, float)[WARM:].mean(0).tolist(), strict=True))


def main() -> int:
    print("| limit | oversample | 1 GPU | 16 GPUs | together | open answers | begun earlier | oldest | length |")
    print("|" + "---|" * 9)
    for lengths in LENGTHS:
        for over in (1.0, 1.5, 2.0, 3.0):
            one, *several = (simulate(lengths, over, *how) for how in ((1, False), (16, False), (16, True)))
            seconds = [f"{of['seconds']:.0f} s" for of in (one, *several)]
            print(f"| {lengths} | {over:g} | {' | '.join(seconds)} | {one['open']:.0f} | {one['continued']:.0%} | "
                  f"{one['oldest']:.1f} | {one['length']:.0f} |")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
