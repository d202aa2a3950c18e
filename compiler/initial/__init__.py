"""Initial values: how weights and buffers get them, as functions of an element's number or from files."""
