"""The content of records, as arrays on the device and as bytes on the host.

    payload.py  Payload: a record's arrays, stacked; how they are copied, joined and computed
    host.py     a payload to bytes of the host and back, for storage/ and ranks/
    cuda.py     the same copies for an NVIDIA GPU, at the speed of the bus

Only this package and the codecs know MLX. Arrays are made and dropped on the engine thread alone.
"""
