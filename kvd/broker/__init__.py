"""The broker's decisions: pure, no sockets, no processes, no clock of their own."""
