"""What the processes say to each other: requests, messages, the transport, what is known of a model."""
