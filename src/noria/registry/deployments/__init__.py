"""Which versions serve which endpoints: what people want, what servers did, and the routes that follow."""
