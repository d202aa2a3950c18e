"""The machine that runs one program: operators, kernels, reuse of memory, torch.compile."""

from . import expert_kernels  # notes its code

__all__ = ["expert_kernels"]
