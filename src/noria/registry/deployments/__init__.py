"""The versions that serve endpoints: what people want, what servers did, and the routes that follow."""
