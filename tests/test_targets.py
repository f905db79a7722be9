"""Compile the kernels for GPUs that are not here: they fit, and the default configurations do not spill."""

import json
from pathlib import Path

import pytest
import torch
from processes import python

from flashattn.configs import INTERPRETER, SHARED_BYTES, Target, block_config

pytestmark = pytest.mark.triton
KERNELS = ("forward", "delta", "dkdv", "dq")
# Every target, head dimension, dtype and mask at least once; `make test` on 2 cores has no time for their product.
JOBS = {
    "sm_75": [("float16", 64, True), ("float32", 256, True)],
    "sm_80": [("bfloat16", 128, True)],
    "sm_86": [("float16", 256, False), ("bfloat16", 64, True)],
    "sm_90": [("bfloat16", 64, True), ("float16", 128, False), ("bfloat16", 256, True)],
    "sm_100": [("bfloat16", 128, True), ("float16", 256, True)],
    "sm_120": [("bfloat16", 128, False)],
}


@pytest.mark.parametrize("target", JOBS)
def test_compiles_and_fits(target, record_property):
    arch = int(target[3:])
    entries = [(kernel, d, dtype, causal, arch) for dtype, d, causal in JOBS[target] for kernel in KERNELS]
    script = Path(__file__).with_name("compile_kernels.py")
    rows = [json.loads(line) for line in python(str(script), json.dumps(entries)).splitlines()]
    assert len(rows) == len(entries)
    for row in rows:
        assert row["shared_bytes"] <= SHARED_BYTES[arch], row
        if arch >= 80 and row["dtype"] != "float32":
            assert row["spill_stores_bytes"] == 0, row
            assert row["tensor_cores"], row


@pytest.mark.parametrize("head_dim", [1, 16, 17, 64, 80, 128, 200, 256])
@pytest.mark.parametrize("arch", SHARED_BYTES)
def test_blocks_cover_every_head_dim(arch, head_dim):
    for target in (Target(arch, SHARED_BYTES[arch]), INTERPRETER):
        for kernel in KERNELS:
            for dtype in (torch.float16, torch.float32):
                config = block_config(kernel, head_dim, dtype, target, causal=True)
                assert config.block_d >= max(head_dim, 16) and config.block_d & (config.block_d - 1) == 0
                assert config.block_m >= 16 and (config.block_n >= 16 or kernel == "delta")
