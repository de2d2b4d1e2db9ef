"""Plain Triton kernels, as a user of Triton would write them, and the ways that launch them."""
