"""What the broker decides, without any I/O: directory, policies, leases, pool, namespaces.

Nothing here sends, opens or waits. Time comes in as `now`, seconds of a
monotonic clock; memory comes in as buffers. Every piece with invariants has
`check_integrity()`, which raises `kvd.errors.IntegrityError`.
"""
