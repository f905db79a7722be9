"""Launch kernels, and launch them again without deciding anew what the first launch decided.

What a call decides, its blocks, grids, boxes and compiled kernels, depends on its options and on the sizes, strides,
dtypes and alignment of its tensors. All of that is the key under which the first call leaves its decisions.
"""

from typing import NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

LAUNCHES = {}
MOST = 4096  # kinds of calls that are remembered; with more, all are forgotten


class Launch:
    """How to launch one kernel on tensors of one layout. It keeps no tensor alive.

    Args:
        kernel: its arguments are, in this order, pointers (``q_ptr`` to the tensor named ``q``), descriptors
            (``q_desc``), numbers and constexprs.
        grid: the number of programs.
        boxes: {name: shape of the box that one load brings} of the tensors to describe; other descriptors are None.
        layouts: {name: how its box lies in shared memory}, for a kernel in Gluon; one in Triton has no say in that.
        numbers: in order.
        constants: the constexprs, num_warps and so on, by name.
    """

    def __init__(self, kernel, grid, boxes, numbers, constants, layouts=None):
        names = kernel.arg_names
        self.kernel, self.grid, self.boxes, self.layouts = kernel, (grid, 1, 1), boxes, layouts
        self.pointers = [name.removesuffix("_ptr") for name in names if name.endswith("_ptr")]
        self.described = [name.removesuffix("_desc") for name in names if name.endswith("_desc")]
        self.numbers, self.constants = numbers, constants
        self.constexprs = [constants[name] for name in names[len(self.pointers) + len(self.described) + len(numbers) :]]
        self.templates, self.compiled = {}, None

    def __call__(self, tensors):
        arguments = [tensors[name] for name in self.pointers]
        arguments += [self._describe(name, tensors[name]) if name in self.boxes else None for name in self.described]
        arguments += self.numbers
        if self.compiled is None:
            self.compiled = self.kernel[self.grid](*arguments, **self.constants)  # None in the interpreter
        else:
            self.compiled[self.grid](*arguments, *self.constexprs)

    def _describe(self, name, x):
        """Return a descriptor of x. The first of each name is checked by Triton; later ones differ in memory alone."""
        if name not in self.templates:
            box = list(self.boxes[name])
            if self.layouts is None:
                descriptor = TensorDescriptor.from_tensor(x, box)
            else:
                from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

                descriptor = GluonDescriptor.from_tensor(x, box, self.layouts[name])
            self.templates[name] = vars(descriptor) | {"base": None}
            self.descriptor = type(descriptor)
            return descriptor
        descriptor = self.descriptor.__new__(self.descriptor)
        vars(descriptor).update(self.templates[name], base=x)
        return descriptor


class Scratch(NamedTuple):
    """Memory that the launches after it use: a tensor of this name, allocated anew at each call."""

    name: str
    shape: tuple
    dtype: torch.dtype

    def __call__(self, tensors):
        tensors[self.name] = tensors["q"].new_empty(self.shape, dtype=self.dtype)


def launch(decide, tensors, *options):
    """Launch what decide(tensors, *options) returns, or returned for such a call before.

    That is a list of :class:`Launch`, and of :class:`Scratch`, whose tensors are added to ``tensors``.

    Args:
        decide: a function of the module, whose answer depends on nothing but its arguments' layouts and values.
        tensors: {name: tensor or None}, always in the same order.
        options: numbers and None.
    """
    key = (decide, options, *[x if x is None else _layout(x) for x in tensors.values()])
    launches = LAUNCHES.get(key)
    if launches is None:
        if len(LAUNCHES) >= MOST:
            LAUNCHES.clear()
        launches = LAUNCHES[key] = decide(tensors, *options)
    for each in launches:
        each(tensors)


def _layout(x):
    """Return all that Triton, ``boxes_fit`` and the choice of blocks look at in a tensor."""
    return x.dtype, x.device, x.shape, x.stride(), x.data_ptr() % 16
