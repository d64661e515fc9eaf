"""Train a reasoning model by ExGRPO: `deepspeed exgrpo/train/main.py [--recipe FILE] [--section.field VALUE ...]`.

The command line and all cheap checks come first, then the imports that take seconds.
"""

import sys

if __name__ == "__main__":
    # A script's own folder is first on sys.path; modules in it must not be importable as top-level packages.
    sys.path.pop(0)

from contextlib import ExitStack
from pathlib import Path

from exgrpo.extras import needs

with needs(__name__, "exgrpo[train]"):
    from exgrpo.train.checkpoint.resume import continued, finished, locate, saved_config
    from exgrpo.train.common.errors import is_first_rank
    from exgrpo.train.common.process import leave, run_program
    from exgrpo.train.config.hub import check_upload, upload
    from exgrpo.train.config.options import Config
    from exgrpo.train.config.recipe import parse_args
    from exgrpo.train.run.startup_checks import check_startup


def main(argv: list[str]) -> int:
    """Run the program and return its exit status."""

    def work(resources: ExitStack) -> None:
        config, folder = configure(argv)
        if done := finished(config):  # a launcher may restart all processes after one was lost at the very end
            if is_first_rank():
                print(f"{done} is finished: nothing is left to do")
                if config.output.push_to_hub:  # the upload may be what failed
                    check_upload(config.output)
                    from exgrpo.train.run.model_folder import uploads

                    print(f"uploaded to {upload(config.output.push_to_hub, uploads(done))}")
            return
        startup = check_startup(config, resources, resumed=folder is not None)
        from exgrpo.train.run.loop import run  # imports torch, transformers and DeepSpeed, so after all cheap checks

        run(config, startup, resources, folder)

    return run_program(work, "stopped before the first step: nothing has changed")


def configure(argv: list[str]) -> tuple[Config, Path | None]:
    """Return the configuration and the folder of the run to resume; None: a new run."""
    config = parse_args(argv)
    folder = locate(config)
    if folder is not None:
        saved = saved_config(folder)
        config = continued(parse_args(argv, saved), saved)
    return config, folder


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
