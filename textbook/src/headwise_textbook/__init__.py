"""For readers of a textbook on multi-head attention: its claims measured, a guide with exercises, every step traced.

claims     what textbooks claim, each with its measurement     topics       of the guide, with code and exercises
exercises  our solutions, and the grading of readers' ones     tour         a topic in the terminal
texts      the outline of five texts                           places       of the texts, and what shows them
trace      a design step by step, with numbers                 reconstruct  a common demonstration, done twice
commands   of `headwise`, by entry points                      curves       line plots as SVG
pages      docs/guide, the pages of the guide              statements   of the texts, with verdicts

It uses public names of headwise only.
"""

__version__ = "0.1.0"
