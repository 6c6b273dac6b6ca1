"""headwise compared with its peers in alternating runs in one process.

    python -m benchmarks                       # every case at full size: half an hour and more
    python -m benchmarks --case decode tiny    # some of them; --list names them
    python -m benchmarks --quick               # all of them, small: that they run and agree, not how fast they are

The files in the order of reading: `cases` (what is measured, as data), `inputs`, `formulas` (the dense formulas),
`contestants` (who takes part), `timing`, `memory`, `checks`, `machine`, `runner` (one case from start to end),
`results`, `tables`, `sweep` and `plot`. docs/performance.md explains the method.
"""
