"""Sessions: a build opened on one rank, to train, evaluate and predict."""
