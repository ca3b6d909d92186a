"""Jobs of images and of texts: their routes, and what runs them."""
