"""kvd_proto: messages, codec and layout arithmetic of daemon and client; no I/O, no torch."""
