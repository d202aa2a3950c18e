"""The canonical form: the captured graph in few operators, without what differs from rank to rank."""
