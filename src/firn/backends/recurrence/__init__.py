"""Recurrent layers where mlx-lm has no kernels for them: everywhere but on Metal.

    delta        the gated delta rule over many tokens at once, in plain MLX operations
    replaced     a backend's form of it in place of mlx-lm's and mlx-vlm's
    ssm          state space layers (mamba 2) in shorter chunks
    scans        selective scans (mamba 1)
    convolution  short convolutions, a product for each tap

A backend says from how many tokens on it uses which form; CUDA has a kernel of its own (`cuda.delta`).
"""
