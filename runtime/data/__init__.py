"""Data: samples, batches, and each rank's part of them."""
