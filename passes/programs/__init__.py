"""Programs from typed graphs: blocks, forwards, backwards, sums of gradients, stages."""
