"""The commands of the registry: models, what made them, and its database."""
