"""parc: declarative plans that turn a PyTorch model into checked per-rank programs."""
