"""From a reply's tokens to events: detokenize, split into text, reasoning and calls, stop.

`ReplyReader` (reader) is the way in, for `api/calls`; `assembly` finds out the model's format (formats).
"""
