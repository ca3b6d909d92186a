"""The live view of the running batches: the feed, its subscribers and the sprite sheets of thumbnails."""
