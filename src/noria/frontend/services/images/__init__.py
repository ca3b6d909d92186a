"""The services that routes of images and jobs call: a body to an admitted request, to pixels, to files."""
