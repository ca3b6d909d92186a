"""The live view of the running batches: its route, the feed, its subscribers and the sprite sheets of thumbnails."""
