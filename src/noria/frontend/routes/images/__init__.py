"""Routes of images, and what those of other APIs share with them: forms, event streams."""
