"""The command line: one file per command, and help that loads no torch."""
