"""The step scheduler: schedules the running batch of images, one iteration at a time. Pure."""
