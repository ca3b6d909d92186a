"""Live views of an engine: its slots or sessions, its queue, its last minute, thumbnails of its images."""
