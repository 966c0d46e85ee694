"""Which chunk lies where: directory, ledger, slots, leases, eviction policies, namespaces.

Pure: nothing here sends, opens or waits. Time comes in as `now`, seconds of a
monotonic clock; memory comes in as buffers. Every piece with invariants has
`check_integrity()`, which raises `kvd.errors.IntegrityError`.
"""
