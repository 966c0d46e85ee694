"""`kvd demo`: a small engine that checks, byte by byte, that it loads what it stored."""
