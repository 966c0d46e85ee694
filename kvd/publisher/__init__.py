"""The process that publishes KV events for engines that do not.

It reads directories and descriptions in shared memory and files, as schedulers do, and what
engines there are the broker tells it.
"""
