"""A trace of requests, played through the eviction policies: what would have been found."""
