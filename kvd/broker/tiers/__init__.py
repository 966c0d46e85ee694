"""Demotion to tiers, promotion from them, and the circuit breaker of each tier."""
