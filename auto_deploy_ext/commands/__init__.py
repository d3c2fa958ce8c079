"""The command line: arguments, the decode that `run` measures, and what is printed."""
