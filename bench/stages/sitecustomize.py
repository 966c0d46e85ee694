"""Timers in every lane process that has this folder on PYTHONPATH and LANE_STAGES; see lane_timers.

Python imports this module at its start; lane.py sets both for a run of its own.
"""

import os
import sys

if "LANE_STAGES" in os.environ and "kvd.lane" in sys.orig_argv:
    import lane_timers

    lane_timers.install(os.environ["LANE_STAGES"])
