"""Facts about the host, for the daemon and the doctor."""
