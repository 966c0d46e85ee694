"""Which namespace owns which bytes of the pool. No I/O; knows nothing of chunks."""
