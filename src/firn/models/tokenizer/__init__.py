"""The tokenizer and its chat templates, thread-safe and bounded in time.

`load` builds an `HfTokenizer` for each model; all others use it through the port.
"""
