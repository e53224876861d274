"""The commands of `cli`, one module for each group; with `cli`, the only ones that print."""
