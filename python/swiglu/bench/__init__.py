"""Measurements beside other implementations: ``python -m swiglu.bench``."""
