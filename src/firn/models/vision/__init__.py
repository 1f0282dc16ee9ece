"""Models that see pictures: loading, preparing a picture, its features, positions and masks.

`load` makes a vision model, which then runs like a text model; `assembly` uses the processor alone.
"""
