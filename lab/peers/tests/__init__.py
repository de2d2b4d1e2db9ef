"""Tests of the peers. All of them need numpy, with which inputs are derived."""

import importlib.util
import unittest

if importlib.util.find_spec("numpy") is None:
    raise unittest.SkipTest("not run: numpy is not installed")
