"""HTTP, all on the asyncio thread. No mlx.

server      builds the app: `app`, the front and its children call it
services    what `assembly` hands to it
http/       one exchange, whoever answers it
dialects/   the APIs that generate, one file each
calls/      a call's way through the engine
routes/     all other routes
observe/    what the server shows of itself
"""
