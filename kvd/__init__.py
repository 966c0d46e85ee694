"""kvd: the KV-cache offload daemon."""
