"""The content of records, as arrays on the device and as bytes on the host.

Only this package and the codecs know MLX.
"""
