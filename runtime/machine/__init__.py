"""The machine that runs one program: operators, kernels, reuse of memory, torch.compile."""

from . import attention, expert_kernels  # note their code

__all__ = ["attention", "expert_kernels"]
