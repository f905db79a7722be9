"""Compile the kernels of sparse.py for a GPU that is not here, in a process of its own, as compile_kernels.py does.

    python tests/compile_sparse.py '[["forward", 64, "float16", "sm_90", "documents"], ...]'

prints one JSON row per entry: blocks, shared memory, registers, spills, tensor-core instructions.
"""

import json
import sys

import torch
import triton
from compile_kernels import compile_for, ptxas_report, signature_of

from flashattn import masks, sparse
from flashattn.configs import TARGETS

KERNELS = {
    "forward": sparse._sparse_fwd_kernel,
    "dq": sparse._sparse_dq_kernel,
    "dkdv": sparse._sparse_dkdv_kernel,
}
IDS = torch.zeros(1, dtype=torch.int32)
# name -> (mask, score); of "whole" no tile is partial
MASKS = {
    "window": (masks.causal() & masks.sliding_window(1023), None),
    "documents": (masks.causal() & masks.documents(IDS), None),
    "blocks": (masks.selected_blocks(torch.zeros(1, 1, dtype=torch.int64), 128), None),
    "whole": (masks.selected_blocks(torch.zeros(1, 1, dtype=torch.int64), 128), None),
    "alibi": (masks.causal(), sparse.alibi(torch.zeros(1))),
}


def pointee(name, given):
    """Return the type behind a pointer that ``signature_of`` does not know, or None."""
    if name in ("index_ptr", "counts_ptr"):
        return "i32"
    if name in ("sees_ptr", "seen_ptr"):
        return "i8"
    types = {torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8", torch.float32: "fp32"}
    return types[given[name].dtype] if name in given else None


def compile_sparse(direction, head_dim, dtype, target, name, tile=128):
    """Compile one kernel under one mask and return a dict of what it uses."""
    kernel = KERNELS[direction]
    mask, score = MASKS[name]
    boxes = TARGETS[target].has_boxes and dtype != "float32"
    partial = name != "whole"
    sizes = (direction, head_dim, head_dim, getattr(torch, dtype), TARGETS[target])
    cfg = sparse.kernel_blocks(*sizes, tile=tile, partial=partial)
    functions, steps = mask.program()
    steps = steps if partial else None
    tensors, numbers, program = mask.tensors, mask.numbers, None
    if score:
        functions, program = score.program(functions, len(tensors), len(numbers))
        tensors += score.tensors
    constants = dict(HEAD_DIM=head_dim, HEAD_DIM_V=head_dim, TILE=tile, FUNCTIONS=functions, STEPS=steps, SCORE=program)
    constants |= {key: value for key, value in cfg.launch().items() if key.startswith("BLOCK")}
    given = {f"{slot}_ptr": x for slot, x in zip(masks.TENSOR_SLOTS, tensors, strict=False)}
    absent = {"cap", "dlse_ptr", "sees_ptr", "seen_ptr", *masks.NUMBER_SLOTS[len(numbers) :]}
    absent |= {f"{slot}_ptr" for slot in masks.TENSOR_SLOTS} - set(given)
    absent |= set() if program or dtype == "float32" else {"lse_low_ptr"}
    absent |= set() if boxes else {key for key in kernel.arg_names if key.endswith("_desc")}
    constants |= dict.fromkeys(absent)
    constants |= {key: 1 for key in kernel.arg_names if key.startswith("stride") and key.endswith("d")}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    types, hints = signature_of(kernel, dtype, constants)
    for i, key in enumerate(kernel.arg_names):
        if types[key] != "constexpr" and pointee(key, given):
            types[key] = "*" + pointee(key, given)
        if key in sparse.VARYING:
            hints.pop((i,), None)
    compiled = compile_for(target, kernel, types, hints, constants, cfg.launch())
    row = dict(target=target, triton=triton.__version__, direction=direction, head_dim=head_dim, dtype=dtype, mask=name)
    return row | cfg._asdict() | dict(shared_bytes=compiled.metadata.shared) | ptxas_report(compiled.asm["ptx"])


if __name__ == "__main__":
    for entry in json.loads(sys.argv[1]):
        print(json.dumps(compile_sparse(*entry)), flush=True)
