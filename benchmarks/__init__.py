"""Measurements of remat beside eager and ``torch.compile``; run one with ``python -m benchmarks.first``."""

import os

# The profiler announces each start and stop on stderr at its level USDT, which is 5; the level is read on import.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
