"""What a record holds, as arrays on the device and as bytes of the host.

Here and in the codecs alone the cache knows MLX.
"""
