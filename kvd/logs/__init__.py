"""Logging: one line per event on stderr, for people, for journald or as JSON.

Modules use the standard library (``logging.getLogger``), identifiers go into
``extra``: engine, rank, session, job, lane, pid. Each process configures once:

- `kvd.logs.setup` puts the pieces together;
- `kvd.logs.sink` writes, and never makes the caller wait;
- `kvd.logs.limit` leaves out what repeats;
- `kvd.logs.render` makes the lines.
"""
