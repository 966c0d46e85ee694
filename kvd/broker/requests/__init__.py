"""What sessions ask: steps of schedulers, and what operators' tools ask for."""
