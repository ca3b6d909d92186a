"""The web pages: HTML, CSS and ES modules, and their routes."""
