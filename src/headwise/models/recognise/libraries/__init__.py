"""Functions of PyTorch and of other packages that compute a whole attention.

Each package has a file that names its functions and reads their arguments as a `FusedCall`; `LIBRARIES` lists them. A
function of Python is replaced, wherever it was imported, while tensors are followed (intercepted.py), so a package is
not imported here. The result is compared with headwise's, as of attention that is written out.
"""

from headwise.models.recognise.libraries import flash, flex, varlen, xformers
from headwise.models.recognise.libraries.base import Library

LIBRARIES: tuple[Library, ...] = (*flex.LIBRARIES, *varlen.LIBRARIES, *flash.LIBRARIES, *xformers.LIBRARIES)

__all__ = ["LIBRARIES", "Library"]
