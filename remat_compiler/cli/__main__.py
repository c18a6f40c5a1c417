"""``python -m remat_compiler.cli``."""

from . import main

main(prog_name="remat")
