"""The seed article's scenarios as Locust files; `noria bench` runs them, and so does plain `locust -f FILE --host URL`."""
