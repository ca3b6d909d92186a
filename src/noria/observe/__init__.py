"""What Noria tells about itself: metrics today; logs, traces and statistics later."""
