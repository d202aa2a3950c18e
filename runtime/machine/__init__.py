"""The machine that runs one program: operators, kernels, reuse of memory, torch.compile."""

from . import expert_kernels, slot_kernels  # note their code

__all__ = ["expert_kernels", "slot_kernels"]
