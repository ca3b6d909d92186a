"""The types that the processes share: requests, messages, the transport, and model descriptions."""
