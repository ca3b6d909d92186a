"""What an image file says and how schedulers are named. No torch."""
