"""Recurrent layers where mlx-lm has no kernels for them: everywhere but on Metal.

    chunks        what recurrences over many tokens at once share
    delta         the gated delta rule, in plain MLX operations
    linear        linear attention (lightning attention, mamba 2)
    wkv           RWKV 7's
    scans         selective scans (mamba 1, jamba), sums with gates (recurrent gemma)
    ssm           state space layers (mamba 2) in shorter chunks, or as linear attention
    convolution   short convolutions, a product for each tap
    forms         the first three as backends use them: how long chunks are, and from when on they pay
    replaced      a backend's form of the delta rule in place of mlx-lm's and mlx-vlm's
    families      forms of the others in place of what the models compute token by token
    replacements  how a library's function is replaced

A backend says which form it uses where; CUDA has kernels of its own (`cuda.recurrence`, `cuda.scans`).
"""
