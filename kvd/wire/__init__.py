"""Bytes between processes: sockets, framing, descriptors."""
