"""logitgate: judge an engine build by its logits. See README.md; the nouns are in `types.py`."""

__version__ = "0.1.0"
