"""The engines as a front end sees them: which engine gets a request, and what happens when an engine ends."""
