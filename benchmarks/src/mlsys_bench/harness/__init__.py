"""The harness of every suite: cases in turns, settings, journal, child processes, report."""
