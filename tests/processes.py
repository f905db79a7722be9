"""Other processes: a fresh Python, with nothing imported and no interpreter on, and the ranks of a group."""

import datetime
import io
import multiprocessing
import os
import subprocess
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed

WITHOUT_TRITON = Path(__file__).with_name("without_triton")


def python(*arguments, without_triton=False):
    """Run ``python *arguments``, assert that it succeeds, and return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Beside other tests, threads that wait for one another make minutes out of seconds.
    environment["OMP_NUM_THREADS"] = "1"
    if without_triton:
        environment["PYTHONPATH"] = os.pathsep.join([str(WITHOUT_TRITON), environment.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


class Ranks:
    """Processes of one torch.distributed group, which wait for functions to call; a context manager.

    Args:
        n_ranks: how many.
        folder: an empty one, where they meet.
        gpus: whether each has a GPU and they talk through NCCL; else gloo.
        timeout_s: the longest that they wait for each other in one operation.
    """

    def __init__(self, n_ranks, folder, gpus=False, timeout_s=150):
        context = multiprocessing.get_context("spawn")
        self.timeout_s, self.ends, self.processes = timeout_s, [], []
        for rank in range(n_ranks):
            here, there = context.Pipe()
            arguments = (there, rank, n_ranks, f"file://{folder}/meeting", gpus, timeout_s)
            process = context.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            there.close()
            self.ends.append(here)
            self.processes.append(process)

    def __call__(self, function, *arguments):
        """Call a function of a module on every rank, and return what they return, in a list; raise what one raises."""
        for end in self.ends:
            end.send((function, arguments))
        results = []
        for rank, end in enumerate(self.ends):
            assert end.poll(2 * self.timeout_s), f"rank {rank} gave no answer within {2 * self.timeout_s} s"
            done, result = end.recv()
            results.append((done, torch.load(io.BytesIO(result)) if done else result))
        for rank, (done, result) in enumerate(results):
            assert done, f"on rank {rank}:\n{result}"
        return [result for _, result in results]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for end in self.ends:
            end.close()  # which ends a rank that waits
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def _rank(end, rank, n_ranks, meeting, gpus, timeout_s):
    """Do what a rank does until the other end is closed."""
    if gpus:
        torch.cuda.set_device(rank)
    limit = datetime.timedelta(seconds=timeout_s)
    torch.distributed.init_process_group(
        "nccl" if gpus else "gloo", init_method=meeting, rank=rank, world_size=n_ranks, timeout=limit
    )
    while True:
        try:
            function, arguments = end.recv()
        except EOFError:
            torch.distributed.destroy_process_group()
            return
        try:
            result = io.BytesIO()
            torch.save(function(*arguments), result)
            end.send((True, result.getvalue()))
        except Exception:  # told to the other side, and the next call comes
            end.send((False, traceback.format_exc()[-3000:]))
