"""The server of a front end: the connections of uvicorn, TLS, and the routes about the server itself."""
