"""The content of records, as arrays on the device and as bytes on the host.

    payload.py    Payload: a record's arrays, stacked; how they are copied, joined and computed
    host.py       payloads to host bytes and back, for storage/ and ranks/
    transfers.py  how the device's arrays become host bytes, and the other way round

Only this package and the codecs know MLX. Arrays are created and freed only on the engine thread.
"""
