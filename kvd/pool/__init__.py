"""Which namespace owns which bytes of the pool. Pure; knows nothing of chunks."""
