"""Stand between the launchers and the kernels, to see what is launched."""

from importlib import import_module

KERNELS = (
    "flashattn.forward._attn_fwd_kernel",
    "flashattn.backward._attn_bwd_dq_kernel",
    "flashattn.backward._attn_bwd_dkdv_kernel",
)


def record_launches(monkeypatch, times=1):
    """Have each kernel launched several times; return the list that will hold (grid, keyword arguments), once each."""
    launches = []

    class Recorded:
        def __init__(self, kernel):
            self.kernel, self.arg_names = kernel, kernel.arg_names

        def __getitem__(self, grid):
            def launch(*arguments, **options):
                launches.append((grid, options))
                for _ in range(times):
                    self.kernel[grid](*arguments, **options)

            return launch

    monkeypatch.setattr("flashattn.launch.LAUNCHES", {})  # those remembered would go past
    for name in KERNELS:
        module, attribute = name.rsplit(".", 1)
        monkeypatch.setattr(name, Recorded(getattr(import_module(module), attribute)))
    return launches
