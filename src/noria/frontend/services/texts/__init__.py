"""What routes of text encoders call: texts to token ids, to numbers, to scores."""
