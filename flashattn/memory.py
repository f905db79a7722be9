"""Measure the memory of tensors: by PyTorch's allocator on a GPU, by watching the operators on a CPU."""

import contextlib
import gc
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _CpuMemory(TorchDispatchMode):
    """Count the bytes of the tensor storages that are born while the mode is on, and the most alive at once."""

    def __init__(self):
        super().__init__()
        self.live, self.peak_bytes = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        leaves = tree_leaves((args, kwargs))  # storages too: Triton's interpreter makes tensors of those it is given
        given = {x.untyped_storage()._cdata for x in leaves if isinstance(x, torch.Tensor)}
        given |= {x._cdata for x in leaves if isinstance(x, torch.UntypedStorage)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if storage._cdata not in self.live and storage._cdata not in given:
                    self.live[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, storage._cdata)
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes())
        return result

    def allocated_bytes(self):
        return sum(self.live.values())


class _GpuMemory:
    """The same by the counters of PyTorch's caching allocator."""

    def __init__(self, device):
        self.device, self.peak_bytes = device, 0

    def __enter__(self):
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.before = torch.cuda.memory_allocated(self.device)
        return self

    def __exit__(self, *exception):
        self.peak_bytes = torch.cuda.max_memory_allocated(self.device) - self.before

    def allocated_bytes(self):
        return torch.cuda.memory_allocated(self.device) - self.before


def watch_memory(device):
    """Return a context that counts bytes of tensors beyond those alive at its beginning.

    What it gives has ``allocated_bytes()``, those alive now, and after its end ``peak_bytes``, the most at once; how
    they are counted says ``peak_memory_bytes``.
    """
    return _GpuMemory(device) if torch.device(device).type == "cuda" else _CpuMemory()


def peak_memory_bytes(function, device):
    """Return the most bytes of tensors that were alive at once during function(), beyond those alive before.

    On a GPU this is what PyTorch's caching allocator handed out, rounded up to 512 bytes a tensor, in the second of two
    calls (the first may create the workspaces of libraries); on a CPU the sizes of the results of PyTorch's operators,
    scratch space inside an operator left out.
    """
    if torch.device(device).type == "cuda":
        function()
    with watch_memory(device) as memory:
        function()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
    return memory.peak_bytes


def free_memory(device):
    """Give back to the GPU what no tensor uses."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def total_memory_bytes(device):
    """Return the bytes of a GPU's memory, 0 for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


@contextlib.contextmanager
def memory_at_most(limit_bytes, device):
    """Return a context in which PyTorch has no more of a GPU's memory than that; on a CPU nothing is held."""
    if device.type != "cuda":
        yield
        return
    free_memory(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total_memory_bytes(device)), device.index)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device.index)
