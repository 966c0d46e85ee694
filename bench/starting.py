"""From starting a daemon to ready, and what it occupies beyond its pool when idle."""

from harness import MIB, Daemon, Figures, median

POOL = 64 * MIB
RUNS = 5


def measure() -> Figures:
    """Milliseconds to ready; MiB resident of broker and lane."""
    start_ms, broker_mb, lane_mb = [], [], []
    for _ in range(RUNS):
        with Daemon(POOL) as daemon:
            broker, lane = daemon.memory()
        start_ms.append(daemon.start_ms)
        broker_mb.append(broker)
        lane_mb.append(lane)
    return {
        "start_ready_ms": median(start_ms),
        "broker_rss_mb": median(broker_mb),
        "lane_rss_mb": median(lane_mb),
    }
