"""One HTTP exchange: sockets, the layers around routes, bodies, errors. Knows no engine and no model.

Every part of `api` may use it, and so may the front of several models and the listener. It imports
nothing else of `api`.
"""
