"""Processes of a gloo group, for tests of what several ranks do together."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing


def on_ranks(work, ranks, folder, *arguments):
    """Calls `work(rank, *arguments)` in a process per rank, each with one thread and in one group; fails as they do.

    The ranks are forked from one new process, which imports what all of them need and has no thread of its own.

    Args:
        folder: of this call alone; the ranks meet there.
    """
    torch.multiprocessing.spawn(_fork, (work, ranks, str(folder), arguments), nprocs=1)


def _fork(_, work, ranks, folder, arguments):
    torch.multiprocessing.start_processes(_start, (work, ranks, folder, arguments), nprocs=ranks, start_method="fork")


def _start(rank, work, ranks, folder, arguments):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    work(rank, *arguments)
    dist.destroy_process_group()
    # Not through the end of the interpreter: a thread of gloo that lets go of a tensor then aborts the process
    # (torch 2.13, pytorch issue 190489), and a group that something still refers to keeps its threads.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
