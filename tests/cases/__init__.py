"""Small cases that failed once, replayed beside plain PyTorch: ``python -m tests.cases``."""
