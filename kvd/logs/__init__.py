"""Logging: one line per event on stderr, for people, for journald or as JSON.

Modules use the standard library (``logging.getLogger``), identifiers go into
``extra``: engine, rank, session, job, lane, pid. Each process configures once.
"""
