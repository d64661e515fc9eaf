"""What an estimate is made of: GPUs and models by their data sheets, hardware, assumptions, amounts and times."""

import re
from dataclasses import dataclass, field
from typing import Any, Literal

GIB = 1 << 30


@dataclass(frozen=True)
class Gpu:
    """A data sheet.

    Attributes:
        memory: in GiB.
        bf16: dense peak on tensor cores, TFLOP/s; that of fp16, too.
        fp32: peak without them, TFLOP/s.
        bandwidth: of the memory, GB/s.
        multiprocessors: how many.
        architecture: as tables of settings name it.
    """

    memory: float
    bf16: float
    fp32: float
    bandwidth: float
    multiprocessors: int
    architecture: str


GPUS = {
    "A100-40": Gpu(40, 312, 19.5, 1555, 108, "sm_80"),
    "A100-80": Gpu(80, 312, 19.5, 2039, 108, "sm_80"),
    "H100": Gpu(80, 989, 67, 3350, 132, "sm_90"),
    "H200": Gpu(141, 989, 67, 4800, 132, "sm_90"),
    "B200": Gpu(180, 2250, 75, 8000, 148, "sm_100"),
    "L40S": Gpu(48, 362, 91.6, 864, 142, "sm_89"),
    "A6000": Gpu(48, 155, 38.7, 768, 84, "sm_86"),
    "RTX3090": Gpu(24, 71, 35.6, 936, 82, "sm_86"),
    "RTX4090": Gpu(24, 165, 82.6, 1008, 128, "sm_89"),
    "RTX5090": Gpu(32, 209.5, 104.8, 1792, 170, "sm_120"),
}
"""NVIDIA's figures, of the SXM boards where there are several. A sheet's gigabytes of memory are taken as GiB."""


def _sizes(family: str, width: int, mlp: int, layers: int, heads: tuple[int, int], vocabulary: int, tied: bool) -> Any:
    """What a config.json says; `heads` are those of the queries, and of keys and values."""
    return {
        "model_type": family,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }


QWEN_1_5B = _sizes("qwen2", 1536, 8960, 28, (12, 2), 151936, tied=True)
QWEN_7B = _sizes("qwen2", 3584, 18944, 28, (28, 4), 152064, tied=False)
LLAMA_8B = _sizes("llama", 4096, 14336, 32, (32, 8), 128256, tied=False)
MODELS = {
    "Qwen/Qwen2.5-7B-Instruct": QWEN_7B,
    "Qwen/Qwen2.5-1.5B": QWEN_1_5B,
    "Qwen/Qwen2.5-Math-1.5B": QWEN_1_5B,
    "Qwen/Qwen2.5-Math-7B": QWEN_7B,
    "meta-llama/Llama-3.1-8B": LLAMA_8B,
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA_8B,
    "models/LUFFY-Qwen-Math-7B-Zero": QWEN_7B,
    "runs/models/SmolLM2-135M-Instruct": _sizes("llama", 576, 1536, 30, (9, 3), 49152, tied=True),
}
"""Sizes of models that recipes and pages name, as in their config.json: an estimate needs neither hub nor folder."""


def machine(words: str) -> tuple[str, int | None]:
    """A GPU by its name, and how many there are (None: it is not said): h100x8, A100-80.

    Raises:
        ValueError: it has no data sheet here.
    """
    for name in GPUS:
        if found := re.fullmatch(rf"{name}(?:x([1-9][0-9]*))?", words, re.IGNORECASE):
            return name, int(found[1]) if found[1] else None
    raise ValueError(f"give a GPU and how many of them, as h100x8; known ones are {', '.join(GPUS)}")


def data_sheet_of(name: str, multiprocessors: int, memory: int) -> str | None:
    """Which of `GPUS` a GPU is, by what it says of itself; None: none of them.

    Another board of the same name (PCIe, a laptop, a part of a GPU) has fewer multiprocessors or other bytes of memory.
    """
    joined = name.replace(" ", "")
    for known, gpu in GPUS.items():
        same = known.partition("-")[0] in joined and multiprocessors == gpu.multiprocessors
        if same and 0.9 < memory / (gpu.memory * GIB) < 1.1:
            return known
    return None


@dataclass(frozen=True)
class Hardware:
    """GPUs, all of one kind; or the CPU of one machine, of which each process has a share.

    Attributes:
        gpus: how many GPUs, one rank each; or how many processes.
        memory: bytes of each that tensors can take.
        flops: peak FLOP/s of each, dense, in the recipe's compute dtype.
        bandwidth: memory bandwidth of each, bytes per second.
        kind: what each is.
        words: what the figures are of, and where they come from.
    """

    gpus: int
    memory: float
    flops: float
    bandwidth: float
    kind: Literal["GPU", "process"] = "GPU"
    words: str = field(default="", compare=False)

    @property
    def device(self) -> str:
        """The kind of device, as torch calls it."""
        return "cuda" if self.kind == "GPU" else "cpu"


@dataclass(frozen=True)
class Assumptions:
    """What no configuration says.

    Attributes:
        prompt_tokens, response_tokens: mean lengths.
        success_rate: share of fresh answers that are right and stored.
        candidates: mean number of stored successes of a replayed question.
        mfu: share of the peak FLOP/s that passes through the model reach, communication included.
        bandwidth_use: share of the memory bandwidth that decoding reaches.
        layer_launch: seconds to launch the kernels of one layer in decoding: what bounds transformers' generate.
        engine_step: seconds of vLLM's own work for a step of decoding, in which the GPU waits (measured: an H100, 120
            answers).
        host_bandwidth: bytes per second between GPU and CPU memory (pageable, as the engine sleeps).
    """

    prompt_tokens: float
    response_tokens: float
    mfu: float
    success_rate: float = 0.5
    candidates: float = 4.0
    bandwidth_use: float = 0.6
    layer_launch: float = 700e-6
    engine_step: float = 3.5e-3
    host_bandwidth: float = 10e9


@dataclass(frozen=True)
class Amount:
    """Bytes of one thing in CPU memory or on disk, of all ranks together."""

    name: str
    bytes: float


@dataclass(frozen=True)
class Phase:
    """One phase of a step.

    Attributes:
        name: as in metrics.jsonl.
        seconds: estimated.
        flops: over all GPUs; 0 where none are counted.
    """

    name: str
    seconds: float
    flops: float = 0


@dataclass(frozen=True)
class Work:
    """Sequences of one step with replay under way: sampled, trained, and stored ones that are scored to choose."""

    fresh: int
    rows: int
    candidates: float
