"""The data plane: the decode loop, its targets, and the records it writes."""
