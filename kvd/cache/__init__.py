"""Which chunk lies where: directory, ledger, slots, leases, eviction policies, namespaces.

No I/O: nothing here sends, opens or waits. Callers pass the time as `now`, seconds of a monotonic
clock, and memory as buffers. Classes with invariants have `check_integrity()`, which raises
`kvd.errors.IntegrityError`.
"""
