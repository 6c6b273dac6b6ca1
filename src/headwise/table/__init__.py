"""A number for each head: the result of every measurement of heads.

>>> import headwise as hw
>>> table = hw.HeadTable({"entropy": hw.table.HeadColumn([[2.5, 0.25], [1.0, 3.0, 0.5]], unit="nats")})
>>> table["entropy"][1].tolist(), table[1, 2]["entropy"]         # the heads of a layer, and one head
([1.0, 3.0, 0.5], 0.5)
>>> table.top("entropy", 2)
layer  head  entropy (nats)
    1     1           3.000
    0     0           2.500

columns  numbers of one kind with their unit, description and error     heads  the table    rows  its layers and heads
show     as text and as HTML                                            files  Parquet, CSV and JSON
"""

from headwise.table.columns import HeadColumn
from headwise.table.heads import HeadTable

__all__ = ["HeadColumn", "HeadTable"]
