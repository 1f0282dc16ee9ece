"""The tokenizer and its chat templates, thread-safe and bounded in time.

`load` builds an `HfTokenizer` for each model. `assembly` and `grammar` know it; all others see the port.
"""
