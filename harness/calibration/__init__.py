"""Limits from benign builds, faults as test data, sweeps of variants: the arithmetic, without an engine."""
