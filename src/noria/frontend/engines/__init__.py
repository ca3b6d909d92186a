"""The engines as a front end uses them: which takes a request, and what happens when one ends."""
