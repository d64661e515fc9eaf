"""Are the packages there that this one needs, and does torch see the GPUs of the machine?"""

from importlib.metadata import PackageNotFoundError, requires, version

from exgrpo.train.doctor.check import Check, CheckFailedError, Given
from exgrpo.train.doctor.machine import device


def check(given: Given) -> str:
    """Import torch, find its devices, and compare what is installed with what the package asks for."""
    import torch

    from exgrpo.train.distributed import ALONE, missing_gpu

    if problem := missing_gpu(ALONE):
        raise CheckFailedError(f"{problem}: install a build of torch for this driver (pytorch.org), or see nvidia-smi")
    if wrong := unsuitable():
        raise CheckFailedError(f"{'; '.join(wrong)}: pip install 'exgrpo[train]' again")
    text = f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    if device().type == "cpu":
        return f"{text}, no GPU: the CPU computes"
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return f"{text}, CUDA {torch.version.cuda}, NCCL {nccl}: {names}"


def unsuitable() -> list[str]:
    """The requirements of the trainer that what is installed does not meet; none where they are not known."""
    from packaging.requirements import Requirement

    try:
        needed = [Requirement(line) for line in requires("exgrpo") or ()]
    except PackageNotFoundError:  # run from its sources
        return []
    found = []
    for requirement in needed:
        if requirement.marker and not requirement.marker.evaluate({"extra": "train"}):
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            found.append(f"{requirement} is not installed")
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            found.append(f"{requirement.name} {installed} is installed, and {requirement} is needed")
    return found


CHECKS = (Check("versions", check, 0, "Torch cannot be used: install a build of it for this machine (pytorch.org)"),)
