"""Jobs of texts: a file of lines in, a file of numbers out."""
