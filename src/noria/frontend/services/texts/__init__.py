"""The services that routes of text encoders call: texts to token ids, to numbers, to scores."""
