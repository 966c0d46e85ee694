"""The status report, and what is measured for it alone."""
