"""The command line as a program of `forked.Program`."""

from headwise.cli import main

main()
