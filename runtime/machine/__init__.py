"""The machine that runs one program: operators, kernels, reuse of memory, torch.compile."""
