"""The command line."""

import time

STARTED = time.monotonic()
"""When the command began, for figures that count from there: importing torch is part of what a user waits for."""
