"""`python -m headwise`, the same as `headwise`."""

from headwise.cli import main

main()
