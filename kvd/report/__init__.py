"""What is shown of a daemon over HTTP: health, metrics, the status page.

A process of its own that only reads; it knows the daemon by its status report only.
"""
