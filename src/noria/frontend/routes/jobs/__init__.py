"""The routes of jobs, and the requests in them."""
