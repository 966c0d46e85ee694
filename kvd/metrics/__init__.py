"""What the daemon counts and reports: every figure is declared once, here, and shown from that.

A new counter is one line in `counts.py` and the line that increments it; then it is in the
report of its part and in the totals, in Prometheus's metrics and in docs/status.md (`make docs`).
"""
