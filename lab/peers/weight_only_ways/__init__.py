"""Ways of computing with weights that are quantised: their data, Triton kernels, and one function per way."""
