"""The middlewares of a front, from the outside in, all plain ASGI (streams and disconnects pass through untouched).

request context -> observe -> CORS -> gate -> API keys -> supervisor -> body limit -> FastAPI's router.
"""
