"""The Open Inference Protocol, version 2, for text encoders: over REST, and over gRPC."""
