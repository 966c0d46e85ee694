"""kvd_proto: messages, codec and layout arithmetic shared by daemon and client; no I/O, no torch."""
