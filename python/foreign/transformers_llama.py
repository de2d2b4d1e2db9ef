"""Lets the blocks of transformers' Llama compute with our kernels, for its own tests: a plugin of pytest."""

import swiglu.hf

swiglu.hf.apply("llama")
