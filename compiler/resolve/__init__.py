"""Resolution: the lines of a plan on the tensors, sub-dims and stages of one model."""
