"""Parts of bodies and responses that several protocols have: forms, fields, event streams, inputs of texts."""
