"""Health, metrics and the status page over HTTP: a process of its own that only reads."""
