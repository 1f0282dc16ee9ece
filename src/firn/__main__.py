"""`python -m firn` is `firn`."""

from firn.cli import main

main()
