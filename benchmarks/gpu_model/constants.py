"""All that the model assumes. Calibrated against the record of an H100, see docs/gpu_model.md; prediction elsewhere."""

DEVICES = {
    "NVIDIA A100-SXM4-40GB": "A100-40",
    "NVIDIA A100-SXM4-80GB": "A100-80",
    "NVIDIA B200": "B200",
    "NVIDIA GeForce RTX 4090": "RTX4090",
    "NVIDIA GeForce RTX 5090": "RTX5090",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H200": "H200",
    "NVIDIA L40S": "L40S",
    "NVIDIA RTX A6000": "A6000",
}
"""Names that drivers give to the GPUs of the data sheets. Other boards of the same chips have other data sheets."""

LIBRARY_TILES = {(128, 256): 1.0, (256, 128): 1.0, (128, 128): 0.9}
"""Assumed. Tiles of a library's product, and how fast each is; the library takes the best for a shape."""

PEAK_SHARE = 0.81
"""Calibrated. Of the data sheet's bf16 peak, what a library's main loop reaches on a device that was idle before."""

SUSTAINED_SHARE = 0.685
"""Calibrated. Of the same, what the power limit leaves to products that last."""

CREDIT = 2.5e-3
"""Calibrated. Seconds of a call's products, at the sustained rate, that the power limit spares after an idle time."""

BANDWIDTH_SHARE = 0.65
"""Calibrated. Of the data sheet's bandwidth, what kernels that only read and write reach."""

EXPOSED_SHARE = 0.3
"""Calibrated. Of the time that a product's result takes to memory, what its main loops do not hide."""

LAUNCH = 8.5e-6
"""Calibrated. Seconds of a launch: the host's work on it, or the device's between two of them."""

TRITON_STEP = 10e-9
"""Calibrated. Seconds that a step of a Triton tile along D takes longer than by the library."""

EPILOGUE = 79.0
"""Calibrated. Operations of a logit in the epilogue of the Triton product, at the data sheet's fp32 peak."""

CUDA_STEP = 100e-9
"""Calibrated. Seconds that a step of a tile of the CUDA product takes longer than by the library."""

CUDA_CLUSTER = 2
"""That of csrc/cuda/product.h: blocks whose tiles lie below each other."""

SHARED_MEMORY = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99}
"""CUDA's figures: KiB that a block can have, by architecture. The operands of a tile's stages have to fit."""

LAUNCHES = {
    "forward": (16, 9, 3),
    "log_prob": (32, 16, 9),
    "policy_loss": (25, 13, 7),
    "policy_loss+entropy": (26, 16, 10),
}
"""Counted in the code, and a test counts them again: launches of a call, and of each of its chunks if the product is
fused or the library's. One more where a gradient of the weight is gathered over chunks."""
