"""A model of two linear layers, for tests that ask commands about a plan and not about its model."""

MODULE = """
from torch import nn
def net():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
"""
"""Its file, ``net.py``."""

TASK = """
model     "./net.py:net"
input     input float32 [B, 8]
input     y int64 [B]
sizes     B=8
loss      cross_entropy(output, y)
optimizer sgd lr 0.1
column    0 over tp
row       2 over tp
"""
"""The lines of a plan that splits it, but for the mesh."""
