"""Typed results in, text out: nothing here computes a verdict or reads a row."""
