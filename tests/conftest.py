"""What holds for all tests."""

import signal

# A job in the background ignores Ctrl-C, and hands that down; the programs that tests start and stop must not.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
