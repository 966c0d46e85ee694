"""kvd selftest: whether a running daemon moves bytes, lane by lane, and gives its space back."""
