"""A GPU's verdict: ``python -m benchmarks.gpu --into FOLDER`` holds the promises against one CUDA device, in minutes.

It needs the source and what torch brings, and no installation: where ``remat_passes`` is not installed it is found in
the source tree.
"""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("remat_passes") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "passes"))
