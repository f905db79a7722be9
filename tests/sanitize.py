"""Run the kernels under NVIDIA's compute-sanitizer on this machine's GPU, and record what it finds.

    python tests/sanitize.py --out tests/results/sanitizer.json

memcheck watches every access to memory, racecheck every access to shared memory. PyTorch's caching allocator is off, so
that an access past the end of a tensor is one past the end of an allocation. A tool that finds nothing must be shown to
find something: a planted write past the end is run as well, and has to be reported.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
import triton
import triton.language as tl

from flashattn import flash_attention, flash_attention_varlen, scaled_dot_product_attention
from flashattn.testing import machine_facts


@triton.jit
def _write_past_the_end(x_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(x_ptr + offs, offs.to(tl.float32), mask=offs < n + 1)  # planted: n + 1


def plant():
    """Write one element past the end of a tensor of 1024."""
    x = torch.empty(1024, device="cuda")
    _write_past_the_end[(1,)](x, len(x), BLOCK=2048)
    torch.cuda.synchronize()


def calls():
    """Yield (name, function, tensors): every mask and every layout, lengths that are no multiple of a block."""

    def draw(*shape, dtype):
        return torch.randn(*shape, dtype=dtype, device="cuda", requires_grad=True)

    for dtype, d, d_v in ((torch.bfloat16, 64, 64), (torch.float32, 40, 72)):
        q, k, v = draw(1, 4, 131, d, dtype=dtype), draw(1, 2, 203, d, dtype=dtype), draw(1, 2, 203, d_v, dtype=dtype)
        packed = tuple(draw(100, heads, size, dtype=dtype) for heads, size in ((4, d), (2, d), (2, d_v)))
        offsets = torch.tensor([0, 5, 5, 97], dtype=torch.int32, device="cuda")
        mask = torch.rand(131, 203, device="cuda") > 0.3
        functions = {
            "causal": (lambda *x: flash_attention(*x, causal=True), (q, k, v)),
            "packed": (lambda *x, o=offsets: flash_attention_varlen(*x, o, o, causal=True), packed),
            "window": (lambda *x: flash_attention(*x, window=(70, 9), softcap=5.0), (q, k, v)),
            "mask": (lambda *x, m=mask: scaled_dot_product_attention(*x, m, enable_gqa=True), (q, k, v)),
        }
        for name, (call, tensors) in functions.items():
            if dtype == torch.bfloat16 or name in ("causal", "packed"):
                yield f"{str(dtype).removeprefix('torch.')} D{d}/{d_v} {name}", call, tensors


def work():
    """Run every call forward and backward."""
    names = []
    for name, call, tensors in calls():
        out = call(*tensors)
        torch.autograd.grad(out, tensors, torch.ones_like(out))
        names.append(name)
    torch.cuda.synchronize()
    print(json.dumps(names))


def sanitize(tool, what):
    """Run this file's ``what`` under a tool; return a dict with the number of findings and the seconds."""
    executable = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    command = [executable, "--tool", tool, sys.executable, __file__, f"--{what}"]
    start = time.perf_counter()
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    )
    log = done.stdout + done.stderr
    summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", log)
    if summary is None:
        raise RuntimeError(f"{' '.join(command)} did not run to its end:\n{log[-3000:]}")
    findings = int(summary.group(1))
    ran = what == "plant" or '"bfloat16 D64/64 causal"' in log
    if not ran:
        raise RuntimeError(f"the calls did not run under {tool}:\n{log[-3000:]}")
    first = next((line.strip() for line in log.splitlines() if "Invalid" in line or "hazard" in line), "")
    return dict(
        tool=tool, run=what, findings=findings, seconds=round(time.perf_counter() - start, 1),
        first=first if findings else "",
    )  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    parser.add_argument("--work", action="store_true")
    parser.add_argument("--plant", action="store_true")
    options = parser.parse_args()
    if options.work or options.plant:
        return work() if options.work else plant()
    work()  # without a tool, so that what it runs is compiled
    runs = [sanitize("memcheck", "work"), sanitize("racecheck", "work"), sanitize("memcheck", "plant")]
    results = machine_facts() | dict(calls=[name for name, _, _ in calls()], runs=runs)
    if options.out:
        Path(options.out).write_text(json.dumps(results, indent=1) + "\n")
    for run in runs:
        print(run)
    clean = all(run["findings"] == 0 for run in runs if run["run"] == "work")
    found = all(run["findings"] > 0 for run in runs if run["run"] == "plant")
    return 0 if clean and found else 1


if __name__ == "__main__":
    sys.exit(main())
