"""PURE: what the supervisor decides about its children. Time is an argument; nothing here starts, signals or reads anything."""
