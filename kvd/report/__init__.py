"""The HTTP process: health, metrics, the status page. It knows the daemon by its status report."""
