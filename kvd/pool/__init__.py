"""Who owns which bytes of the pool. Pure."""
