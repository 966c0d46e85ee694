"""kvd demo: a small engine that proves, byte by byte, that what is loaded is what was stored."""
