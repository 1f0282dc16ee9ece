"""The package that knows mlx_lm and mlx_vlm: loading, running and sampling models.

load/          from a name to a model in memory: for `assembly`; `cli` and `fleet` inspect folders
tokenizer/     the tokenizer port
decode/        rows, steps and the runner: for the engine, through its port
speculation/   who drafts, and how many tokens are tried: asked by the runner's steps
grammar/       grammars to masks
vision/        models that see pictures
embedder       models that embed: for `assembly`

`backends` may use and replace parts of all of them.
"""
