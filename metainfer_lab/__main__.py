"""`python -m metainfer_lab` is the `metainfer-lab` command."""

from .cli import main

main()
